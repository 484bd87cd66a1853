"""A run in many processes: trainer ranks, rollout replicas, and the weights that go from one to the other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.experience.event_log import EventLog
from rlctl.model.loading import LoadedModel
from rlctl.rollout.pool import ReplicaPool
from rlctl.rollout.pool_stats import PoolStats
from rlctl.rollout.seats import ReplicaChange
from rlctl.runtime.cluster.fleet import Fleet
from rlctl.runtime.cluster.probed_replica import ProbedReplica
from rlctl.runtime.cluster.revival import Life
from rlctl.runtime.cluster.starting import start_processes
from rlctl.runtime.cluster.supported import require_supported
from rlctl.runtime.cluster.told import Told
from rlctl.runtime.launch.launcher import Launcher
from rlctl.runtime.launch.making import make_launcher
from rlctl.runtime.models_beside import ModelsBeside
from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.report import SyncError, SyncReport


class ClusterGroup:
    """Trainer ranks and replicas, each in a process of its own, and the weight sync between them.

    Args:
        config: resolved.
        loaded: the model in float32.
        events: where syncs and what becomes of replicas are told.
        total_updates: optimizer steps of the whole run, for the schedule.
        reference: a causal LM that the policy is held near, or None for no KL.
        critic: a causal LM whose body the critic takes over, or None.
        logs: folder of what the processes print.
        stack: closing it ends all processes.
        launcher: what starts them; None: the one that the configuration names.

    Raises:
        UnavailableError: the run needs what processes of their own do not have.
        RlctlError: a process did not come up.
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
        launcher: Launcher | None = None,
    ) -> None:
        require_supported(config)
        self._config = config
        self._shared = config.placement.layout != "separate"
        self._level = 1 if adapter_alone(config) else 2  # adapters alone are added to weights that stay
        self._told = Told(events)
        self._syncing = threading.Lock()
        self._stopped = self._lent = False
        self._last: PoolStats | None = None
        self._resting = threading.Lock()
        self._trainer_rests = True
        self._beside = ModelsBeside(config, reference, critic, total_updates)
        if launcher is None:
            launcher = make_launcher(config)
            stack.callback(launcher.close)
        started = start_processes(
            config,
            loaded,
            launcher,
            total_updates=total_updates,
            logs=logs,
            stack=stack,
            before_kv=self._rest_trainer,
            tell=self._on_life,
            on_event=self._told.in_sync,
        )
        self.model, self._replicas, self._hybrids = started.model, started.replicas, started.hybrids
        self._beside.stand_on(self.model, config)
        self.reference, self.critic = self._beside.reference, self._beside.critic
        self.engine = ReplicaPool(
            self._replicas.replicas.values(),
            deterministic=config.run.deterministic,
            on_change=self._on_change,
            patience=config.sync.timeout,
            tell=events.emit,
        )
        stack.callback(self.engine.close)

    @property
    def hybrids(self) -> int:
        """How many replicas the trainer's devices can lend."""
        return len(self._hybrids.replicas)

    def versions(self) -> Mapping[str, int | None]:
        """Return the version that each replica serves; None while it does not."""
        return {**self._replicas.versions(), **self._hybrids.versions()}

    def sync_weights(self, version: int) -> SyncReport:
        """Bring every replica that serves, or was started again, to ``version``, lent ones too.

        Raises:
            SyncError: none serves it.
            RankError: a trainer rank died.
        """
        with self._syncing:
            self._told.version = version
            try:
                with self.engine.syncing():
                    report = self._bring(self._replicas, version, asleep=self._shared)
                    if self._lent:
                        self._bring(self._hybrids, version, asleep=False)
            finally:
                self._go_on()
            return report

    def abort(self) -> None:
        """End running requests on all replicas, and let none run until the next sync."""
        self._stop()
        deadline, version = self._deadline(), self._told.version
        for fleet in [self._replicas, self._hybrids] if self._lent else [self._replicas]:
            fleet.each("abort", lambda replica: replica.interrupt("abort", version, deadline), deadline)

    def sleep(self) -> None:
        """Give devices that are shared to the trainer."""
        if not self._shared:
            return
        self._stop()
        deadline = self._deadline()
        self._replicas.each("sleep", lambda replica: replica.sleep(self._level, deadline), deadline)
        for name in self._replicas.replicas:
            self._told.replica(name, "slept")
        self.model.onload()
        self._beside.onload()

    def to_rollout(self, version: int) -> None:
        """Lend: bring the hybrid replicas to ``version``, which the trainer's weights are, and have them take requests.

        Raises:
            SyncError: none serves it; the trainer has its devices then.
        """
        with self._syncing:
            assert not self._lent
            try:
                self._bring(self._hybrids, version, asleep=True)
            except SyncError:
                self._take_back(self._hybrids.living)
                raise
            self._lent = True
            for replica in self._hybrids.living:
                if replica.serving is not None:
                    self.engine.add(replica)

    def to_trainer(self) -> None:
        """Take back: no more requests, the running ones end and go on elsewhere, the memory goes to the trainer."""
        with self._syncing:
            if not self._lent:
                return
            self._lent = False
            here = self.engine.stats().requests
            lent = [replica for name, replica in self._hybrids.replicas.items() if name in here]
            for replica in lent:
                self.engine.remove(replica.replica, "abort")
            self._take_back([replica for replica in lent if not replica.lost])

    def _bring(self, fleet: Fleet, version: int, *, asleep: bool) -> SyncReport:
        """Bring a fleet to a version. ``asleep``: it is, on the trainer's devices."""
        deadline = self._deadline()
        self._trainer_rests = not asleep
        if asleep:
            self._beside.offload()
            fleet.each("wake", lambda replica: replica.wake(("weights",), deadline), deadline)
        try:
            report = fleet.sync(version, deadline)
        except SyncError as error:
            self._told.not_synced(version, error)
            self.model.ranks.require_alive(f"the weight sync to version {version}")
            raise
        self.model.changed = False
        self._told.synced(report)
        return report

    def _rest_trainer(self) -> None:
        """Have the trainer leave shared devices, once in a sync, before the first KV cache comes back."""
        with self._resting:
            if not self._trainer_rests:
                self.model.offload()
                self._trainer_rests = True

    def _take_back(self, lent: list[ProbedReplica]) -> None:
        deadline = self._deadline()
        self._hybrids.each("sleep", lambda replica: replica.sleep(self._level, deadline), deadline)
        for replica in lent:
            self._hybrids.manager.lost(replica.replica, "its devices are the trainer's")
            self._told.replica(replica.replica, "slept")
        self.model.onload()
        self._beside.onload()

    def _stop(self) -> None:
        """From now until the next sync replicas do not serve, on purpose."""
        if not self._stopped:
            self.engine.hold()
            self._stopped = True

    def _go_on(self) -> None:
        if self._stopped:
            self.engine.release()
            self._stopped = False

    def take_figures(self) -> dict[str, float]:
        """See MeasuredRollouts. Replicas that share the trainer's devices, or decode when they are told to, have no
        bubble of their own."""
        stats, last = self.engine.stats(), self._last
        self._last = stats
        figures = {
            "moved_requests": float(stats.resubmitted - (last.resubmitted if last else 0)),
            "moved_tokens_kept": float(stats.tokens_kept - (last.tokens_kept if last else 0)),
            "moved_tokens_read_again": float(stats.tokens_read_again - (last.tokens_read_again if last else 0)),
        }
        decoding, there = self.engine.take_time()
        if there and not self._shared and not self._config.run.deterministic:
            figures["bubble_rollout"] = max(0.0, 1.0 - decoding / there)
        return figures

    def _on_change(self, change: ReplicaChange) -> None:
        """The pool sees a replica otherwise. One that it has given up, alive or not, is started again."""
        self._told.moved(change)
        if change.change == "lost":
            for fleet in (self._replicas, self._hybrids):
                if change.replica in fleet.remotes:
                    call(partial(fleet.give_up, change.replica, change.why), f"end replica {change.replica}")

    def _on_life(self, name: str, life: Life, why: str) -> None:
        """A replica died, or was started again; told from a thread of its own."""
        self._told.replica(name, life, why)
        if life == "restarted" and not self._shared and name in self._replicas.replicas:
            self._bring_back()

    def _bring_back(self) -> None:
        """Bring replicas that were started again to the version of the last sync before the next one comes: out of
        what the engine kept of it, or, when no replica serves any more, by sending it once more. Not when the trainer's
        weights have changed since; the next sync does it then."""
        fleet = self._replicas
        with self._syncing, self.model.changing:
            if self._stopped or self.model.changed:
                return
            fleet.seat()
            # What the engine kept of an adapter alone is of no use to one that has no base.
            for report in fleet.manager.catch_up().values() if fleet.bases is None else ():
                fleet.revival.served(report.committed)
                self._told.synced(report)
            if not any(version is not None for version in fleet.versions().values()):
                with suppress(RlctlError), self.engine.syncing():  # told by events; whoever waits for a replica fails
                    self._bring(fleet, self._told.version, asleep=False)

    def _deadline(self) -> Deadline:
        return Deadline(self._config.sync.timeout)
