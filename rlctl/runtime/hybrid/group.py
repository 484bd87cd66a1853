"""A run on one set of devices: rank processes that train in one layout and generate in another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from rlctl.errors import RlctlError, UnavailableError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import ReplicaChanged, SyncEnded, SyncPhase
from rlctl.model.loading import LoadedModel
from rlctl.rollout.base import Output, Request
from rlctl.rollout.on_ranks import RankRolloutSetup, Seat, Switched, TrainedAdapter
from rlctl.rollout.registry import RANK_ENGINES
from rlctl.runtime.cluster.agreement import LogProbAgreement
from rlctl.runtime.cluster.making import max_length
from rlctl.runtime.hybrid.ranks import DeviceRanks
from rlctl.runtime.hybrid.rollout import RankReplicas
from rlctl.runtime.launch.launcher import Launcher
from rlctl.runtime.launch.making import make_launcher
from rlctl.runtime.models_beside import ModelsBeside
from rlctl.runtime.ranks.adapted import RankedLoraEngine
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.starting import start_ranks
from rlctl.runtime.sync_ended import sync_ended
from rlctl.runtime.trained_model import memory_of
from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone
from rlctl.sync.deadline import Deadline
from rlctl.sync.report import SyncError, SyncReport
from rlctl.sync.states import Ending


class HybridGroup:
    """Ranks that train, the replicas that they are between two updates, and the switch from one to the other.

    There is nothing to fence: when a switch fails, or a rank dies, the run ends, and goes on from its last checkpoint.

    Args: see ``ClusterGroup``.

    Raises:
        UnavailableError: the run needs what such devices do not have.
        RlctlError: a rank did not come up.
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
        self._config, self._events = config, events
        self._beside = ModelsBeside(config, reference, critic, total_updates)
        if launcher is None:
            launcher = make_launcher(config)
            stack.callback(launcher.close)
        self.model = start_ranks(
            config,
            loaded.model.config,
            loaded.source,
            total_updates=total_updates,
            memory=memory_of(config),
            logs=logs,
            stack=stack,
            launcher=launcher,
            kind=DeviceRanks,
        )
        self._beside.stand_on(self.model, config)
        self.reference, self.critic = self._beside.reference, self._beside.critic
        ranks = self.model.ranks
        assert isinstance(ranks, DeviceRanks)
        self._ranks = ranks
        self._setup = rollout_setup(config, loaded.source, adapter_of(config, self.model))
        seats = msgspec.convert(ranks.call_each("host", setup=msgspec.to_builtins(self._setup)), list[Seat])
        vocabulary = loaded.model.config.get_text_config().vocab_size
        self.engine = RankReplicas(ranks, seats, vocab_size=vocabulary, max_length=max_length(config))
        self._names = [str(number) for number in range(config.placement.replicas)]
        self._agreement: LogProbAgreement | None = None
        if config.model.dtype == "float32" and not config.trainer.offload.params:
            self._agreement = LogProbAgreement(
                lambda rows: self.model.log_probs(rows, temperature=1.0),
                vocabulary=vocabulary,
                max_length=max_length(config),
                seed=config.run.seed,
            )
        self._version: int | None = None
        self._begun = False

    @property
    def hybrids(self) -> int:
        """None: the replicas are always on the trainer's devices."""
        return 0

    def versions(self) -> Mapping[str, int | None]:
        """Return the version that each replica serves; None while the devices train."""
        return dict.fromkeys(self._names, self._version)

    def sync_weights(self, version: int) -> SyncReport:
        """Have the devices generate with ``version``, the trainer's weights as they are.

        Raises:
            SyncError: parts did not come whole, or a replica computes otherwise than the trainer.
            RankError: a rank died or stalled.
        """
        begin, phases, first = time.monotonic(), dict[str, float](), not self._begun
        self._version, self._begun = None, True
        self._beside.offload()
        try:
            report = self._bring(version, phases)
        except RlctlError as error:
            self._events.emit(SyncEnded(version=version, status="failed", fenced=self._names))
            raise SyncError(
                f"the switch to version {version} failed: {error.message}",
                fenced=self._names,
                fix=error.fix or "go on from the last checkpoint with --resume auto",
            ) from error
        for name in self._names:
            self._events.emit(ReplicaChanged(replica=name, change="joined" if first else "woke", version=version))
        self._version = version
        report.seconds = report.stall = time.monotonic() - begin
        self._events.emit(sync_ended(report))
        return report

    def abort(self) -> None:
        """End running requests; what they made comes to the rollouter by its next step."""
        self.engine.abort()

    def sleep(self) -> None:
        """Hand the devices to the trainer: generation shards and KV cache are let go, nothing moves."""
        self._version = None
        self._ranks.call("sleep")
        self.model.onload()
        self._beside.onload()
        for name in self._names:
            self._events.emit(ReplicaChanged(replica=name, change="slept"))

    def to_rollout(self, version: int) -> None:
        """There is nothing to lend."""

    def to_trainer(self) -> None:
        """Nothing was lent."""

    def _bring(self, version: int, phases: dict[str, float]) -> SyncReport:
        said: list[Any] = []
        self._phase("reshard", version, phases, lambda: said.extend(self._ranks.switch(version, self._setup.timeout)))
        if self._agreement is None:  # nothing is computed with the trainer's weights any more
            self._phase("offload_trainer", version, phases, self.model.offload)
        self._phase("wake_kv", version, phases, lambda: self._ranks.call("wake"))
        if self._agreement is not None:
            self._phase("agree", version, phases, lambda: self._agree(version))
            self._phase("offload_trainer", version, phases, self.model.offload)
        switched = msgspec.convert(said, list[Switched])
        return SyncReport(
            version,
            sum(one.tensors for one in switched),
            sum(one.sent for one in switched),
            0.0,
            phases,
            ending=Ending.COMMITTED,
            committed=self._names,
            extra_nbytes=max(one.extra_bytes for one in switched),
            delivery="slices",
            kept_nbytes=max(one.kept_bytes for one in switched),
        )

    def _phase(self, name: str, version: int, phases: dict[str, float], act: Callable[[], object]) -> None:
        begin, error = time.monotonic(), ""
        try:
            act()
        except RlctlError as caught:
            error = caught.message
            raise
        finally:
            phases[name] = time.monotonic() - begin
            self._events.emit(SyncPhase(version=version, phase=name, seconds=phases[name], error=error))

    def _agree(self, version: int) -> None:
        assert self._agreement is not None
        outputs = self.engine.probe(self._agreement.requests)
        for name, mine in zip(self._names, outputs, strict=True):
            self._agreement.check(_Answered(name, mine), version, Deadline(self._config.sync.timeout))


class _Answered:
    """A replica that has answered the probes."""

    def __init__(self, replica: str, outputs: list[Output]) -> None:
        self.replica = replica
        self._outputs = outputs

    def probe(self, requests: Sequence[Request], deadline: Deadline) -> list[Output]:
        """See Probed."""
        del requests, deadline
        return self._outputs

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See Probed. The parts were compared when they came."""
        del names, deadline
        return {}


def adapter_of(config: Config, model: RankedEngine) -> TrainedAdapter | None:
    """Return the adapter that the ranks train; None where they train all weights."""
    if not isinstance(model, RankedLoraEngine):
        return None
    shapes = model.ranks.call("trained_shapes")
    return TrainedAdapter(config=model.adapter_config.to_dict(), shapes=shapes, alone=adapter_alone(config))


def rollout_setup(config: Config, source: str, adapter: TrainedAdapter | None = None) -> RankRolloutSetup:
    """Return how each device generates. ``source``: folder or hub name of the model; ``adapter``: that is trained."""
    placement = config.placement
    return RankRolloutSetup(
        engine=config.rollout.engine,
        source=source,
        trust_remote_code=config.model.trust_remote_code,
        dtype=config.model.dtype,
        device="",  # each rank knows its own
        ranks=placement.trainer_ranks,
        trainer_tp=placement.trainer_tp,
        replicas=placement.replicas,
        replica_tp=placement.replica_tp,
        devices_per_node=config.cluster.devices_per_node,
        max_slots=config.rollout.max_slots,
        max_length=max_length(config),
        offload_params=bool(config.trainer.offload.params),
        timeout=min(config.sync.timeout, config.trainer.rank_timeout),
        verify=config.sync.verify,
        adapter=adapter,
        delta=config.sync.delta,
        pad=placement.pad,
    )


def require_supported(config: Config) -> None:
    """Raise UnavailableError when devices that both train and generate cannot serve a run."""
    engine = config.rollout.engine.partition(":")[0]
    if engine not in RANK_ENGINES.names():
        raise UnavailableError(
            f"rollout engine {engine} does not generate on the trainer's own ranks",
            where="rollout.engine",
            fix=f"set rollout.engine={' or '.join(RANK_ENGINES.names())}, or placement.layout=colocated",
        )
    if config.sync.backend != "reshard":
        raise UnavailableError(
            f"checkpoint engine {config.sync.backend} does not move weights in place",
            where="sync.backend",
            fix="set sync.backend=reshard",
        )
    if config.model.lora.use_dora:
        raise UnavailableError(
            "DoRA divides by the lengths of whole rows, and devices of the hybrid layout fold their own parts in",
            where="model.lora.use_dora",
            fix="set model.lora.use_dora=false, or placement.layout=colocated and sync.backend=naive",
        )
