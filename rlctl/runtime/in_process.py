"""A run with its replica in this process; the trainer is here too, or in ranks of its own that this process drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlctl.experience.event_log import EventLog
from rlctl.experience.events import ReplicaChanged, SyncEnded, SyncPhase
from rlctl.model.loading import LoadedModel
from rlctl.model.lora import LoraEngine
from rlctl.rollout.adapter_updates import AdapterUpdates
from rlctl.rollout.base import Output
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.runtime.adapter_source import AdapterSource
from rlctl.runtime.models_beside import ModelsBeside, device_of, passes_of
from rlctl.runtime.ranks.adapted import RankedLoraEngine
from rlctl.runtime.sync_ended import sync_ended
from rlctl.runtime.trained_model import trained_model
from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone
from rlctl.sync.colocated import ColocatedSync
from rlctl.sync.protocols import Replica, WeightSource
from rlctl.sync.report import SyncError, SyncReport

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class InProcessGroup:
    """Trainer rank, replica and the weight sync between them.

    Args:
        config: resolved.
        loaded: the model in float32.
        events: where syncs and sleeps are told.
        total_updates: optimizer steps of the whole run, for the schedule.
        reference: a causal LM that the policy is held near; None for the one under the adapter, or for no KL.
        critic: a causal LM whose body the critic takes over, or None.
        logs: folder of the logs of the trainer's ranks.
        stack: closing it ends the trainer's ranks, and frees the replica.
    """

    def __init__(
        self,
        config: Config,
        loaded: LoadedModel,
        events: EventLog,
        *,
        total_updates: int,
        reference: Any = None,
        critic: Any = None,
        logs: Path | None = None,
        stack: ExitStack,
    ) -> None:
        self._events = events
        passes = passes_of(config)
        self.model = trained_model(
            config, loaded, events, total_updates=total_updates, passes=passes, logs=logs, stack=stack
        )
        self._beside = ModelsBeside(config, reference, critic, total_updates)
        self._beside.stand_on(self.model, config)
        self.reference, self.critic = self._beside.reference, self._beside.critic
        self.engine = ROLLOUT_ENGINES.load(config.rollout.engine.partition(":")[0], where="rollout.engine")(
            loaded.model.config,
            dtype=DTYPES[config.model.dtype],
            max_slots=config.rollout.max_slots,
            max_length=config.task.max_prompt_tokens + config.rollout.max_new_tokens,
            device=device_of(config),
            trust_remote_code=config.model.trust_remote_code,
        )
        stack.callback(self.engine.close)
        source: WeightSource = self.model
        replica: Replica = self.engine
        self._stays = adapter_alone(config)
        if self._stays:
            assert isinstance(self.model, LoraEngine | RankedLoraEngine)
            replica = updates = AdapterUpdates(self.engine, self.model.adapter_config, experts=self.model.experts)
            source = AdapterSource(self.model, updates)
        self._sync = ColocatedSync(
            source,
            [replica],
            timeout=config.sync.timeout,
            on_phase=self._on_phase,
            verify=config.sync.verify,
        )
        self._version = -1
        self._aborted: Callable[[Sequence[Output]], None] = lambda _: None

    @property
    def hybrids(self) -> int:
        """None: the one replica is always on the trainer's device."""
        return 0

    def on_aborted(self, take: Callable[[Sequence[Output]], None]) -> None:
        """Hand what ``abort`` ended to ``take``."""
        self._aborted = take

    def versions(self) -> Mapping[str, int | None]:
        """Return the version that the replica serves."""
        return {self.engine.replica: self.engine.version}

    def sync_weights(self, version: int) -> SyncReport:
        """Bring the replica to ``version``. Raises SyncError."""
        self._version = version
        self._beside.offload()
        try:
            report = self._sync.sync(version)
        except SyncError as error:
            self._events.emit(SyncEnded(version=version, status="fenced", fenced=error.fenced))
            raise
        self._events.emit(sync_ended(report))
        return report

    def abort(self) -> None:
        """End running requests; what they made goes to whom ``on_aborted`` named."""
        # In the order in which a run that goes on from a checkpoint queues them.
        if ended := sorted(self.engine.abort(), key=lambda output: output.key):
            self._aborted(ended)

    def to_rollout(self, version: int) -> None:
        """There is nothing to lend."""

    def to_trainer(self) -> None:
        """Nothing was lent."""

    def sleep(self) -> None:
        """Hand the device to the trainer: the replica gives back its KV cache, then the models come back.

        Its weights go too, and the next sync brings fresh ones; but those that adapters alone are sent to stay.
        """
        self.engine.sleep(1 if self._stays else 2)
        self.model.onload()
        self._beside.onload()
        self._events.emit(ReplicaChanged(replica=self.engine.replica, change="slept", version=self._version))

    def _on_phase(self, phase: str, seconds: float, error: str) -> None:
        self._events.emit(SyncPhase(version=self._version, phase=phase, seconds=seconds, error=error))
