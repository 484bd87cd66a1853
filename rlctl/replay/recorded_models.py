"""Models that say what was recorded of them: the stages of training compute with the record alone."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlctl.experience.rows import Floats, Row
from rlctl.experience.segments import RequestKey
from rlctl.model.accumulating import Scores, accumulate
from rlctl.model.base import LossSpec, ModelEngine, UpdateResult
from rlctl.model.critic.base import Critic
from rlctl.model.fsdp2.dealing import dealt_micro_batches
from rlctl.model.micro_batches import MicroBatch, micro_batch
from rlctl.model.passes import Passes

_CPU = torch.device("cpu")


class Unrecorded(Exception):  # noqa: N818 - a reason, not a fault
    """The record does not hold what is asked for."""


class RecordedModel(ModelEngine):
    """The model that was trained, as far as the record knows it: log-probs, and from those the loss. It has no weights.

    Args:
        rows: of a local update, as recorded.
        micro_batch_tokens: most tokens of one pass, padding counted.
        ranks: that shared the rows; None: one process had all.
    """

    def __init__(self, rows: Sequence[Row], *, micro_batch_tokens: int, ranks: int | None = None) -> None:
        self._rows = {row.key: row for row in rows}
        self._budget = micro_batch_tokens
        self._ranks = ranks

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return the old log-probs."""
        return [_told(self._rows[row.key].old_logprobs, "old_logprobs", row.key) for row in rows]

    def keep_policy(self) -> None:
        """The record has it."""

    def kept_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        return self.log_probs(rows, temperature=temperature)

    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        """Return what an update said of its loss; the model takes no step. Where the loss has an entropy bonus, of
        which the record keeps no tokens, its ``loss`` and ``entropy`` mean nothing."""

        logprobs = [_told(self._rows[row.key].train_logprobs, "train_logprobs", row.key) for row in rows]

        def score(batch: MicroBatch, _: float, entropy: bool) -> Scores:
            values = torch.cat([torch.from_numpy(logprobs[i]) for i in batch.indices])
            return values.requires_grad_(torch.is_grad_enabled()), torch.zeros_like(values) if entropy else None

        if self._ranks is None:
            passes = Passes(dtype="float32", micro_batch_tokens=self._budget, pad_id=0, device=_CPU)
            metrics, _ = accumulate(score, passes, rows, loss)
            micro_batches = passes.shares()
        else:
            shares = _Shares(self._ranks, self._budget, logprobs)
            metrics, micro_batches = {}, []
            for shares.rank in range(self._ranks):
                metrics, _ = accumulate(score, shares, rows, loss)
                micro_batches += shares.shares()
        return UpdateResult(metrics, logprobs, sum(row.length for row in rows), micro_batches)

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise Unrecorded("weights")

    def offload(self) -> None:
        """Nothing is held."""

    def onload(self) -> None:
        """Nothing is held."""

    def state(self) -> dict[str, Any]:
        raise Unrecorded("the model's state")

    def load(self, state: Mapping[str, Any]) -> None:
        raise Unrecorded("the model's state")

    def save_pretrained(self, folder: Path) -> None:
        raise Unrecorded("weights")

    def params_digest(self) -> str:
        raise Unrecorded("weights")


class RecordedReference:
    """A reference model, as the record knows it; see ``rlctl.model.reference.Reference``."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.key: row for row in rows}

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return the reference's log-probs."""
        return [_told(self._rows[row.key].ref_logprobs, "ref_logprobs", row.key) for row in rows]

    def offload(self) -> None:
        """Nothing is held."""

    def onload(self) -> None:
        """Nothing is held."""


class RecordedCritic(Critic):
    """A critic, as the record knows it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.key: row for row in rows}

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        return [_told(self._rows[row.key].values, "values", row.key) for row in rows]

    def update(self, rows: Sequence[Row], *, clip: float | None) -> dict[str, float]:
        """Return nothing: what the critic said during its update is not recorded."""
        return {}

    def offload(self) -> None:
        """Nothing is held."""

    def onload(self) -> None:
        """Nothing is held."""

    def state(self) -> dict[str, Any]:
        raise Unrecorded("the critic's state")

    def load(self, state: Mapping[str, Any]) -> None:
        raise Unrecorded("the critic's state")

    def params_digest(self) -> str:
        raise Unrecorded("the critic's weights")


class _Shares(Passes):
    """The passes of each of several ranks in turn; what they add up is as they added it: in the order of ranks."""

    def __init__(self, ranks: int, budget: int, logprobs: list[Floats]) -> None:
        super().__init__(dtype="float32", micro_batch_tokens=budget, pad_id=0, device=_CPU)
        self.rank = 0
        self._ranks = ranks
        self._logprobs = logprobs
        self._sums: dict[str, float] = {}

    def micro_batches(self, rows: Sequence[Row], still: Container[int] = ()) -> Iterator[MicroBatch]:
        for indices in dealt_micro_batches([row.length for row in rows], self._ranks, self._budget)[self.rank]:
            yield micro_batch(rows, indices, pad_id=0, device=self.device)

    def complete(self, rows: Sequence[Row], values: list[Floats]) -> list[Floats]:
        return self._logprobs

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        if self.rank == 0:
            self._sums = {}
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        return dict(self._sums)


def _told(values: Floats | None, name: str, key: RequestKey) -> Floats:
    if values is None:
        raise Unrecorded(f"{name} of prompt {key.ordinal}, sample {key.sample}")
    return values.copy()
