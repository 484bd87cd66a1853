"""Level R2: from a checkpoint through recorded steps to the weights of any version, each step compared on its way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from rlctl.errors import RlctlError, UnavailableError
from rlctl.experience.records.errors import AbsentError, RecordError
from rlctl.replay.comparing import state_difference
from rlctl.replay.findings import Difference, Finding, absent, next_lower
from rlctl.replay.fingerprints import of_another_machine, of_another_run
from rlctl.replay.rebuild import Rebuilt
from rlctl.replay.recompute import of_failure
from rlctl.replay.step_record import Source, StepRecord
from rlctl.replay.telling import Telling, tell
from rlctl.runtime.fingerprint import fingerprint


class UnreachableError(Exception):
    """The weights of a version cannot be had from what is kept."""


class Walk:
    """The rebuilt run on its way through versions.

    Args:
        source: the run's record.
        step: one of its steps, under whose configuration the run is first made.
        stack: closing it ends what was started.

    Attributes:
        rebuilt: the run's models. Another object as soon as a step was trained under another configuration.

    Raises:
        RlctlError: the run cannot be made here.
    """

    def __init__(self, source: Source, step: int, stack: ExitStack) -> None:
        self._own = stack.enter_context(ExitStack())
        first = source.step(step)
        self.rebuilt = Rebuilt(first.config, first.total_steps, self._own)
        self._source = source
        self._parted: int | None = None
        self._begun = False

    @property
    def parted(self) -> int | None:
        """The step after which the weights are no longer those of the run; None while they are."""
        return self._parted

    def begin_of(self, version: int) -> int:
        """Return the version that the way to ``version`` starts from.

        Raises:
            UnreachableError: no checkpoint is early enough, or a step between has no record.
        """
        source = self._source
        early = [step for step in source.checkpoints if step <= version]
        if not early and source.steps and source.steps[0] == 1:
            early = [0]  # the model as the run found it
        if not early:
            kept = f"the first that is kept is step {source.checkpoints[0]}'s" if source.checkpoints else "none is kept"
            raise UnreachableError(f"there is no checkpoint at or before step {version}: {kept}")
        begin, here = early[-1], self.rebuilt.version
        # Weights that have parted from the run's are left as soon as a later checkpoint is there.
        on_the_way = here is not None and begin <= here <= version
        if self._begun and on_the_way and here is not None and (self._parted is None or begin < self._parted):
            begin = here
        recorded = set(source.steps)
        if absent := [step for step in range(begin + 1, version + 1) if step not in recorded]:
            raise UnreachableError(
                f"step {absent[0]}, between the checkpoint of step {begin} and this one, has no record"
            )
        return begin

    def go_to(self, version: int) -> None:
        """Bring the weights to ``version``. Raises UnreachableError, or RlctlError for a checkpoint that is not the
        run's."""
        begin = self.begin_of(version)
        if not self._begun or self.rebuilt.version != begin:
            self._load(begin)
        while self.rebuilt.version != version:
            assert self.rebuilt.version is not None
            self.run(self._source.step(self.rebuilt.version + 1))

    def run(self, record: StepRecord) -> Telling:
        """Train a step on its recorded rows, from the weights before it, and compare what its stages make."""
        rebuilt, step = self._under(record), record.step
        assert rebuilt.version == step - 1
        rebuilt.version = None
        told = tell(step, record.rounds, rebuilt.config, rebuilt.stages.table, failure=record.failure)
        if record.failure is not None:
            return told  # the weights are those of no version
        rebuilt.version = step
        told.params_digest = rebuilt.model.params_digest()
        if record.params_digest and told.params_digest != record.params_digest:
            told.difference = told.difference or self._parameters(step)
        if rebuilt.critic is not None and record.critic_digest not in ("", rebuilt.critic.params_digest()):
            told.difference = told.difference or Difference("critic", "digest")
        if told.difference is not None and self._parted is None:
            self._parted = step
        return told

    def _under(self, record: StepRecord) -> Rebuilt:
        """Return the run as it goes on under the configuration of a step."""
        if record.config != self.rebuilt.config or record.total_steps != self.rebuilt.total_steps:
            stack, version = ExitStack(), self.rebuilt.version
            self._own.callback(stack.close)
            other = Rebuilt(record.config, record.total_steps, stack)
            if version is not None:
                other.load(version, self.rebuilt.states())
            self.rebuilt = other
        return self.rebuilt

    def _load(self, step: int) -> None:
        if step in self._source.checkpoints:
            self.rebuilt.load(step, self._source.states(step))
        elif self._begun:
            raise UnreachableError("the weights that the run began with are trained by now, and no checkpoint has them")
        self._begun, self._parted = True, None

    def _parameters(self, step: int) -> Difference:
        """Return which parameter differs after a step, where a checkpoint can tell."""
        if step in self._source.checkpoints:
            kept: Mapping[str, Any] = self._source.states(step)["model"]
            for part in ("params", "exp_avg", "exp_avg_sq", "updates"):
                mine = self.rebuilt.model.state()
                if difference := state_difference("parameters", mine.get(part), kept.get(part), part):
                    return difference
        return Difference("parameters", "digest")


def rerun(walk: Walk, source: Source, step: int) -> Finding:
    """Return how a step comes out when it is trained again from the nearest checkpoint."""
    found = partial(Finding, step=step, level="R2")
    try:
        record = source.step(step)
        walk.go_to(step - 1)
        parted = walk.parted
        told = walk.run(record)
    except (UnreachableError, UnavailableError) as error:
        return found(status="unavailable", reason=f"{error}{next_lower('R2')}")
    except AbsentError as error:
        return absent(step, "R2", error)
    except RlctlError as error:
        stage = "record" if isinstance(error, RecordError) else "checkpoint"
        where = Difference(stage, error.where or stage)
        return found(status="differs", reason=error.message, first_difference=where)
    here = fingerprint(record.config, threads=torch.get_num_threads())
    if (otherwise := of_another_run(record.fingerprint, here)) is not None:
        key = otherwise.tensor
        reason = f"recorded with {key} {record.fingerprint[key]}, and its configuration gives {here[key]}"
        return found(status="differs", reason=reason, first_difference=otherwise, params_digest=told.params_digest)
    elsewhere = of_another_machine(record.fingerprint, here)
    failed = of_failure(record.failure)
    if told.difference is None:
        notes = [failed, f"though it was recorded elsewhere: {elsewhere}" if elsewhere else ""]
        return found(status="exact", reason="; ".join(filter(None, notes)), params_digest=told.params_digest)
    if elsewhere:
        reason = f"recorded elsewhere ({elsewhere}), whose last bits this machine does not give{next_lower('R2')}"
        return found(status="unavailable", reason=reason, first_difference=told.difference)
    return found(
        status="differs",
        reason=f"step {parted}, on the way from the checkpoint, differs already" if parted is not None else failed,
        first_difference=told.difference,
        params_digest=told.params_digest,
    )
