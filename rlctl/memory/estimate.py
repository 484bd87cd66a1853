"""Bytes by rank and phase: the parts of a run laid over the phases of its mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from rlctl.memory.activations import cast_weight_bytes, logits_bytes, saved_bytes
from rlctl.memory.engine_memory import engine_work_bytes, kv_cache_bytes
from rlctl.memory.model_sizes import MASTER_BYTES, TrainedSizes
from rlctl.memory.workload import Workload

CONTEXT_BYTES = {"cuda": 1 << 30, "npu": 1 << 30, "cpu": 0}
"""Taken for granted on each device: the driver's context, the libraries' work space, NCCL's buffers. Not computed."""
FRAGMENTATION = {"cuda": 0.05, "npu": 0.05, "cpu": 0.0}
"""Share of what comes and goes in a pass that the allocator is taken to lose between its blocks. Not computed."""
_PASSING = ("gradients", "activations", "logits")


class Phase(Protocol):
    """A stretch of a step; modes declare theirs (``rlctl.trainers.memory_phases``)."""

    @property
    def name(self) -> str:
        """As shown to users."""

    @property
    def devices(self) -> str:
        """Whose: "shared", "trainer", "rollout" or "reward"."""

    @property
    def holds(self) -> Sequence[str]:
        """Names of the parts that lie in memory."""


@dataclass(frozen=True)
class RankMemory:
    """One device.

    Attributes:
        devices: "shared", "trainer", "rollout" or "reward".
        rank: the trainer rank on it, else the rollout or reward rank.
        parts: bytes of each part that can lie there.
        single_pass: an update is one micro-batch: its gradients come as its activations go.
    """

    devices: str
    rank: int
    parts: Mapping[str, int]
    single_pass: bool = False

    def bytes_in(self, phase: Phase) -> int:
        """Return the bytes that lie here in ``phase``."""
        return sum(self.parts_in(phase).values())

    def parts_in(self, phase: Phase) -> dict[str, int]:
        """Return the parts that lie here in ``phase``, "context" and "fragmentation" among them."""
        names = (*phase.holds, "context", *(("fragmentation",) if "activations" in phase.holds else ()))
        found = {name: self.parts[name] for name in names if self.parts.get(name)}
        if self.single_pass and "activations" in found and "gradients" in found:
            passing = found["activations"] + found.get("logits", 0)
            found["gradients"] = max(found["gradients"] - passing, 0)
        return found


@dataclass(frozen=True)
class PhaseMemory:
    """A phase on the device that is fullest in it."""

    name: str
    devices: str
    rank: int
    nbytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """A run's memory, predicted.

    Attributes:
        ranks: every device.
        phases: in order of a step; each on its fullest device.
        limit: bytes of one device; 0 when not stated.
    """

    ranks: tuple[RankMemory, ...]
    phases: tuple[PhaseMemory, ...]
    limit: int

    @cached_property
    def peak(self) -> PhaseMemory:
        """The fullest moment."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits; None when the device's memory is not stated."""
        return self.peak.nbytes <= self.limit if self.limit else None

    def rank_peaks(self, phases: Sequence[Phase]) -> list[int]:
        """Return each device's own peak, in the order of ``ranks``."""
        return [max(rank.bytes_in(p) for p in phases if p.devices == rank.devices) for rank in self.ranks]


def estimate(work: Workload, phases: Sequence[Phase], *, limit: int) -> Estimate:
    """Return the memory of ``work`` over ``phases`` of its mode.

    Args:
        work: the run.
        phases: of its mode, in order.
        limit: bytes of one device; 0 when unknown.

    Raises:
        UsageError: heads, experts or rows cannot be dealt out over the ranks.
    """
    ranks = tuple(_ranks(work, {phase.devices for phase in phases}, phases, limit))
    found = []
    for phase in phases:
        there = [rank for rank in ranks if rank.devices == phase.devices]
        if not there:  # a pool without devices
            continue
        fullest = max(there, key=lambda rank: rank.bytes_in(phase))
        found.append(
            PhaseMemory(phase.name, phase.devices, fullest.rank, fullest.bytes_in(phase), fullest.parts_in(phase))
        )
    return Estimate(ranks, tuple(found), limit)


def _ranks(work: Workload, kinds: set[str], phases: Sequence[Phase], limit: int) -> list[RankMemory]:
    place, sizes = work.config.placement, work.sizes
    beside = work.beside.parts(work.micro_batch, work.precision)
    trainer = _pass_parts(work)
    ranks: list[RankMemory] = []
    for kind in ("shared", "trainer", "rollout"):
        if kind not in kinds:
            continue
        count = place.replicas * place.replica_tp if kind == "rollout" else place.trainer_ranks
        for rank in range(count):
            parts = {"context": CONTEXT_BYTES[work.config.cluster.device], "buckets": _buckets(work)}
            if kind != "rollout":
                parts |= _held(sizes.trained[rank]) | trainer
                parts |= beside if rank == 0 else {}
            if kind != "trainer" or place.hybrid_replicas:
                parts["engine_weights"] = sizes.engine[rank % len(sizes.engine)]
                parts["engine_work"] = engine_work_bytes(work)
                if kind == "shared" and place.layout == "hybrid" and work.config.model.lora.rank:
                    parts["adapter_sums"] = sizes.summed[rank % len(sizes.summed)]
                if work.config.sync.delta:
                    assert work.kept is not None, "deltas keep something"
                    parts["engine_weights"], parts["sent_before"] = work.kept(work.config, work.spec)[rank]
                parts["kv_cache"] = kv_cache_bytes(work, room=_room(RankMemory(kind, rank, parts), phases, limit))
            ranks.append(RankMemory(kind, rank, parts, work.single_pass))
    context = {"context": CONTEXT_BYTES[work.config.cluster.device]}
    pool = range(place.reward_devices if "reward" in kinds else 0)
    return ranks + [RankMemory("reward", rank, context | beside) for rank in pool]


def _buckets(work: Workload) -> int:
    """Return the bytes of transfer buckets; within one process tensors are copied without any, and a switch in place
    has one for what it cuts and receives."""
    sync = work.config.sync
    if sync.backend == "reshard":  # with deltas, what was sent before lies beside each message, and its code
        return sync.bucket_size * 3 // 2 if sync.delta else sync.bucket_size
    return 0 if work.embedded and sync.backend == "naive" else 2 * sync.bucket_size


def _held(sizes: TrainedSizes) -> dict[str, int]:
    return {"trainer_weights": sizes.weights, "gradients": sizes.gradients, "optimizer": sizes.optimizer}


def _pass_parts(work: Workload) -> dict[str, int]:
    """Return what a forward and backward pass needs on each trainer rank."""
    sizes, tp, precision = work.sizes, work.config.placement.trainer_tp, work.precision
    logits = logits_bytes(work.spec, work.micro_batch, precision)
    checkpointing = work.config.model.gradient_checkpointing
    saved = saved_bytes(work.spec, work.micro_batch, precision, tp=tp, checkpointing=checkpointing)
    # A layer is computed again when the logits are gone.
    activations = saved.kept + max(saved.recomputed - logits, 0)
    if work.spread:
        # FSDP gathers two layers and the outer group, and makes the gradient of a layer before it is scattered.
        activations += (sizes.outer_elements + 2 * sizes.largest_block // tp) * precision.product
        activations += sizes.largest_block // tp * MASTER_BYTES
    else:
        activations += cast_weight_bytes(sizes.matrix_elements, precision)
    share = FRAGMENTATION[work.config.cluster.device]
    passing = activations + logits + sizes.trained[0].gradients
    return {"activations": activations, "logits": logits, "fragmentation": int(share * passing)}


def _room(rank: RankMemory, phases: Sequence[Phase], limit: int) -> int | None:
    """Return the bytes that are left for a KV cache on ``rank``; None when the device's memory is not stated."""
    if not limit:
        return None
    beside = [rank.bytes_in(p) for p in phases if p.devices == rank.devices and "kv_cache" in p.holds]
    return max(limit - max(beside, default=0), 0)
