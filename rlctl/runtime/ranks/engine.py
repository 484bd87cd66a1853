"""A model whose ranks are child processes, to a trainer like any other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rlctl.experience.row_data import pack_rows, unpack_floats
from rlctl.experience.rows import Floats, Row
from rlctl.model.base import LossSpec, ModelEngine, UpdateResult
from rlctl.runtime.ranks.messages import TensorHead, head_of, pieces_of, tensor_from
from rlctl.runtime.ranks.supervisor import TrainerRanks

_KINDS = ("params", "exp_avg", "exp_avg_sq")


class RankedEngine(ModelEngine):
    """Sends what a trainer asks for to the ranks. Weights and states come, and go, one whole tensor at a time.

    What ``state`` returns is what one process would: any number of ranks goes on from it.

    Attributes:
        changing: held while the weights change; who holds it sees them stay.
        changed: whether they have since somebody set this to false.
    """

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._giving = threading.Lock()  # of rows, to the operation that they are for
        self.changing = threading.Lock()
        self.changed = True

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        return self._split(rows, "log_probs", temperature=temperature)

    def keep_policy(self) -> None:
        self._ranks.call("keep_policy")

    def kept_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        return self._split(rows, "kept_log_probs", temperature=temperature)

    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        with self.changing:
            self.changed = True
            found = self._with(rows, "update", loss=msgspec.to_builtins(loss))
        return UpdateResult(found["metrics"], _split(rows, found["logprobs"]), found["tokens"], found["micro_batches"])

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("weights")

    def offload(self) -> None:
        self._ranks.call("offload")

    def onload(self) -> None:
        self._ranks.call("onload")

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {kind: {} for kind in _KINDS}
        for head, found in self._tensors("state"):
            if head is None:
                state["updates"] = found
            else:
                state[head.kind][head.name] = found
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        given = [(head_of(kind, name, t), t) for kind in _KINDS for name, t in state[kind].items()]
        heads = [msgspec.to_builtins(head) for head, _ in given]
        pieces = (piece for _, tensor in given for piece in pieces_of(tensor))
        with self.changing:
            self.changed = True
            self._ranks.feed("load", pieces, updates=int(state["updates"]), heads=heads)

    def save_pretrained(self, folder: Path) -> None:
        self._ranks.call("save_pretrained", folder=str(folder.resolve()))

    def params_digest(self) -> str:
        return str(self._ranks.call("params_digest"))

    @property
    def ranks(self) -> TrainerRanks:
        """The processes that it is made of."""
        return self._ranks

    def sent(self) -> dict[str, list[Any]]:
        """Return what the last weight sync sent: name -> [dtype, shape, digest]; empty where it is not noted."""
        found: dict[str, list[Any]] = self._ranks.call("sent")
        return found

    def send_base(self, with_base: bool) -> None:
        """Where syncs carry adapters alone: from now on they bring the base, too, or do not."""
        self._ranks.call("send_base", with_base=with_base)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _with(self, rows: Sequence[Row], operation: str, **arguments: Any) -> Any:
        """Give the ranks rows and have them do something with them; other threads' rows wait."""
        with self._giving:
            for piece in pack_rows(rows):
                self._ranks.call("rows", rows=piece)
            return self._ranks.call(operation, **arguments)

    def _split(self, rows: Sequence[Row], operation: str, **arguments: Any) -> list[Floats]:
        """Have the ranks find a number for each response token, and return them by row."""
        return _split(rows, self._with(rows, operation, **arguments))

    def _named(self, operation: str) -> Iterator[tuple[str, torch.Tensor]]:
        for head, tensor in self._tensors(operation):
            if head is not None:
                yield head.name, tensor

    def _tensors(self, operation: str) -> Iterator[tuple[TensorHead | None, Any]]:
        """Yield the head of each tensor with the tensor; at the end None with the operation's result."""
        for report in self._ranks.stream(operation):
            if report.kind == "tensor":
                head = msgspec.convert(report.result, TensorHead)
                yield head, tensor_from(head, lambda: self._ranks.piece(operation))
            else:
                yield None, report.result


def _split(rows: Sequence[Row], flat: bytes) -> list[Floats]:
    ends = np.cumsum(np.asarray([len(row.response_ids) for row in rows], np.int64))
    return list(np.split(unpack_floats(flat), ends[:-1])) if len(rows) else []
