"""Whole small runs whose steps are kept in memory, as a recorder would see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from rlctl.config import Layer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Finished, Scored
from rlctl.experience.records.columns import spans_of
from rlctl.experience.records.reading import Round
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.ops.session import Session
from rlctl.replay.step_record import StepRecord
from rlctl.runtime.checkpoint_names import checkpoint_steps
from rlctl.runtime.checkpoints import read_checkpoint
from rlctl.runtime.signals import StopSignal

SMALL = {
    "trainer.prompts_per_step": 4,
    "trainer.mini_batch_prompts": 2,
    "trainer.optimizer.lr": 1e-4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 24,
    "run.validate_prompts": 0,
    "run.threads": 1,
    "run.checkpoint_every": 2,
    "run.keep_checkpoints": 9,
}


class KeptRun:
    """A run of ``steps`` steps; a ``Source``."""

    def __init__(self, folder: Path, *overrides: str, steps: int = 4, begin: Path | None = None) -> None:
        self._folder = folder
        self._records: dict[int, StepRecord] = {}
        events: list[Event] = []
        log = EventLog(None)
        log.subscribe(events.append)
        resolution = resolve(env={}, layers=[Layer("small", SMALL)], overrides=[f"run.steps={steps}", *overrides])
        resolution.require_valid()
        self.config = resolution.config
        with Session(self.config, find_inputs(self.config), log, folder / "ckpt", StopSignal()) as session:
            trainer, parts = session.trainer, session.parts
            if begin is not None:
                trainer.load_checkpoint(begin)
            else:
                trainer.save_checkpoint()
            table = trainer._stages.table
            rounds: list[Round] = []

            def update_actor(step: Any) -> None:
                kl = parts.algorithm.kl.value
                table["update_actor"](step)
                place = {row.key: i for i, row in enumerate(step.rows)}
                scored = [e for e in events if isinstance(e, Scored)]
                long = {(e.ordinal, e.sample) for e in events if isinstance(e, Finished) and e.reason == "length"}
                rewards = [row.reward for row in step.rows]
                rounds.append(
                    Round(
                        rows=[copy(row) for row in step.rows],
                        task_rewards=scored[-1].task if scored else rewards,
                        scores=None if not scored else np_array(scored[-1].scores),
                        cut=[(row.key.ordinal, row.key.sample) in long for row in step.rows],
                        segments=[segments_of(step.groups, row.key) for row in step.rows],
                        mini_batches=[[place[row.key] for row in rows] for rows in step.mini_batches],
                        metrics=dict(step.metrics),
                        kl_coef=kl,
                        kl_coef_after=parts.algorithm.kl.value,
                        groups=[],
                        micro_batches=[],
                    )
                )
                if len(rounds) == (self.config.trainer.parameter_sync_step or 1):
                    digest = parts.model.params_digest()
                    self._records[step.number] = StepRecord(
                        step.number, self.config, list(rounds), digest, total_steps=parts.total_steps
                    )
                    rounds.clear()

            trainer._stages.table = {**table, "update_actor": update_actor}
            trainer.fit()
            self.digest = parts.model.params_digest()

    @property
    def steps(self) -> Sequence[int]:
        return sorted(self._records)

    @property
    def checkpoints(self) -> Sequence[int]:
        return checkpoint_steps(self._folder / "ckpt")

    def step(self, number: int) -> StepRecord:
        return self._records[number]

    def states(self, number: int) -> Mapping[str, Any]:
        return read_checkpoint(self._folder / "ckpt" / f"step_{number}")[1]


def np_array(values: Sequence[float]) -> Any:
    import numpy as np

    return np.asarray(values, np.float64)


def segments_of(groups: Sequence[Any], key: Any) -> list[Any]:
    (response,) = [r for group in groups for r in group.ordered if r.key == key]
    return spans_of(response.segments)
