"""The reward model on devices of its own: a process for each, which ends with this one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.rows import Floats
from rlctl.model.micro_batches import partition
from rlctl.model.reward.base import RewardModel
from rlctl.model.reward.serving import Fault, Settings, serve
from rlctl.process import Child, ChildDied, Deadline, start

LOAD_SECONDS = 1800.0
Batches = list[list[list[int]]]


class RewardPool(RewardModel):
    """Batches are those of one device, cut before they are dealt out in turn, so that the number of devices changes
    no score. A process that dies is started once more, and its batches are scored again.

    Args:
        settings: of each process, one a device.
        micro_batch_tokens: most tokens of one pass, padding counted.
        timeout: deadline of a pass over all sequences, in seconds.
        output: file for what the processes print; None discards it.

    Raises:
        UsageError: the model does not load.
        RlctlError: a process does not start.
    """

    def __init__(
        self, settings: Sequence[Settings], *, micro_batch_tokens: int, timeout: float, output: Path | None = None
    ) -> None:
        self._settings = settings
        self._budget = micro_batch_tokens
        self._timeout = timeout
        self._output = output
        self._children: list[Child] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for rank in range(len(settings)):
                self._children.append(self._start(rank))
            undo.pop_all()

    def scores(self, sequences: Sequence[Sequence[int]]) -> Floats:
        groups = partition([len(ids) for ids in sequences], self._budget)
        ranks = len(self._settings)
        shares = [[[list(sequences[i]) for i in group] for group in groups[rank::ranks]] for rank in range(ranks)]
        deadline = Deadline(self._timeout)
        result = np.zeros(len(sequences), np.float32)
        sent = [self._send(rank, share, deadline) for rank, share in enumerate(shares)]
        for rank, share in enumerate(shares):
            answer = self._receive(rank, deadline) if sent[rank] else None
            answer = self._again(rank, share, deadline) if answer is None else answer
            for group, scores in zip(groups[rank::ranks], answer, strict=True):
                result[group] = scores
        return result

    def close(self) -> None:
        for child in self._children:
            child.close()

    def _send(self, rank: int, share: Batches, deadline: Deadline) -> bool:
        """Hand a process its batches; False when it is gone."""
        try:
            self._children[rank].channel.send(share, deadline.remaining())
        except TimeoutError:
            raise self._late(rank) from None
        except OSError:
            return False
        return True

    def _receive(self, rank: int, deadline: Deadline) -> list[list[float]] | None:
        """Return a process's scores, by batch; None when it is gone."""
        try:
            return self._children[rank].channel.receive(deadline.remaining(), list[list[float]])
        except TimeoutError:
            raise self._late(rank) from None
        except (EOFError, OSError):
            return None

    def _again(self, rank: int, share: Batches, deadline: Deadline) -> list[list[float]]:
        """Start a process once more and have it score its batches."""
        self._children[rank].kill()
        self._children[rank] = self._start(rank)
        try:
            return self._children[rank].request(share, deadline.remaining(), list[list[float]])
        except TimeoutError:
            raise self._late(rank) from None
        except ChildDied as error:
            raise RlctlError(
                f"process {rank} of the reward model died twice: {error.reason}",
                where="placement.reward_devices",
                fix="look at logs/reward.log of the run; lower trainer.micro_batch_tokens if memory ran out",
            ) from error

    def _late(self, rank: int) -> RlctlError:
        self._children[rank].kill()
        return RlctlError(
            f"process {rank} of the reward model gave no scores within {self._timeout:g} s",
            where="reward_model.timeout",
            fix="raise it, or placement.reward_devices; the run goes on with --resume auto",
        )

    def _start(self, rank: int) -> Child:
        settings = self._settings[rank]
        child = start(
            f"{serve.__module__}:{serve.__name__}",
            name=f"reward-model-{rank}",
            output=self._output,
            env={"OMP_NUM_THREADS": str(settings.threads)},
        )
        try:
            fault = child.request(settings, LOAD_SECONDS, Fault)
        except (TimeoutError, ChildDied, msgspec.ValidationError) as error:
            child.kill()
            reason = error.reason if isinstance(error, ChildDied) else f"nothing within {LOAD_SECONDS:g} s"
            raise RlctlError(
                f"process {rank} of the reward model does not start: {reason}",
                where="reward_model.path",
                fix="look at logs/reward.log of the run",
            ) from error
        if fault.message:
            child.close()
            raise UsageError(fault.message, where=fault.where, fix=fault.fix)
        return child
