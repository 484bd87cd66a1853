"""What one vLLM worker remembers over weight syncs: where its weights lie, their version, its inlet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from rlctl.errors import RlctlError, UnavailableError
from rlctl.keys.lora.names import Part, parse_key
from rlctl.process import TOKEN_VARIABLE
from rlctl.rollout.vllm import kv_memory
from rlctl.rollout.vllm.weights import VllmWeights, weights_of
from rlctl.rollout.vllm.worker_adapter import WorkerAdapter
from rlctl.sync.deadline import Deadline
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.member import described
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta


class WorkerState:
    """See above.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.version: int | None = None
        self._weights: VllmWeights | None = None
        self._inlet: WeightInlet | None = None
        self.adapter = WorkerAdapter(worker)
        self._dropped = self._based = False

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self._worker.model_runner

    @property
    def weights(self) -> VllmWeights:
        """Where the weights lie. Raises UnavailableError when they cannot be updated."""
        if self._dropped:
            raise RlctlError("the weights are asleep", fix='wake the tag "weights" first')
        if self._weights is None:
            self._weights = weights_of(self._worker.model_runner.get_model(), self._worker.vllm_config)
        return self._weights

    def targets(self) -> tuple[list[TensorMeta], str]:
        """Return the weights, and how they are written."""
        return list(self.weights.targets().values()), self.weights.way

    def load(self, order: LoadOrder, seconds: float) -> LoadReport:
        """Load through the inlet. Until all of it has come, the weights count as a mix."""
        weights = self.weights
        if self._inlet is None:
            self._inlet = WeightInlet(_token())
        self.version = None
        deadline = Deadline(seconds)
        if self.adapter.expected is not None:
            report = self._load_adapted(order, weights, deadline)
        elif weights.views is not None:
            report = self._inlet.into(order, weights.views, deadline)
        else:
            report = weights.load(self._inlet.stream(order, deadline), cast=order.cast)
        if not report.unknown:  # whether some may stay untouched is for the sync's policy to say
            self.version = order.version
        return report

    def digests(self, names: Sequence[str] | None) -> dict[str, list[Any]]:
        """Return name -> [dtype, shape, digest]; of what a worker holds in part, of its part.

        Of an adapter's tensors, those that came, as long as the engine computes with them. Raises RlctlError when it
        computes with something else.
        """
        adapter = self.adapter.tensors
        own = [name for name in adapter if names is None or name in names]
        if own:
            self.adapter.require_in_use()
        rest = names if names is None else [name for name in names if name not in adapter]
        found = {name: described(name, tensor.cpu()) for name, tensor in self._read(rest)}
        return found | {name: described(name, adapter[name]) for name in own}

    def _load_adapted(self, order: LoadOrder, weights: VllmWeights, deadline: Deadline) -> LoadReport:
        """Load a base with an adapter behind it, or an adapter alone, onto the base that is here."""
        assert self._inlet is not None
        assert self.adapter.expected is not None
        tensors: dict[str, torch.Tensor] = {}
        base = _until_adapter(self._inlet.stream(order, deadline), tensors)
        first = next(base, None)
        report = LoadReport([], [], [])
        if first is not None:
            self._based = False
            report = weights.load(chain([first], base), cast=True)
            self._based = report.complete
        if not self._based:
            raise RlctlError("the engine holds no whole base to add an adapter to", fix="send the base")
        added = self.adapter.load(self.adapter.expected, tensors, order.version)
        return LoadReport([*report.loaded, *added.loaded], [*report.unknown, *added.unknown], [])

    def read(self, name: str) -> list[tuple[list[tuple[int, int]], str, bytes]]:
        """Return (region of the tensor, dtype, bytes) for each region that this worker holds."""
        found = []
        for region in self.weights.held().read(name):
            plain = region.view.detach().contiguous().cpu()
            box = [(span.start, span.stop) for span in region.box]
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            found.append((box, TensorMeta.of(name, plain).dtype, data))
        return found

    def release_kv(self) -> int:
        """Give the KV cache's memory back; return its bytes."""
        return kv_memory.release(self._worker)

    def restore_kv(self) -> int:
        """Allocate it again; return its bytes."""
        return kv_memory.restore(self._worker)

    def sleep(self, level: int) -> None:
        """Free memory; after level 2 there is no version, and none of what a load needs until the weights wake."""
        if level >= 2:
            self.version, self._dropped, self._based = None, True, False
            self._weights = None  # views keep memory alive, and there is other memory afterwards
        self._worker.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate it again."""
        self._worker.wake_up(list(tags))
        if "weights" in tags:
            self._dropped = False

    def _read(self, names: Sequence[str] | None) -> Iterable[tuple[str, torch.Tensor]]:
        held = self.weights.held()
        for name in held.metas if names is None else names:
            for number, region in enumerate(held.read(name)):
                yield name if not number else f"{name}#{number}", region.view


def _until_adapter(
    stream: Iterable[tuple[str, torch.Tensor]], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base's tensors; an adapter's are copied to ``tensors``."""
    for name, tensor in stream:
        if parse_key(name).part is Part.BASE:
            yield name, tensor
        else:
            tensors[name] = tensor.detach().to("cpu", copy=True)


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        raise UnavailableError(
            f"{TOKEN_VARIABLE} is not set in the engine's environment",
            fix="set it, before vLLM starts its processes, to the token of the run whose weights it is to take",
        )
    return token
