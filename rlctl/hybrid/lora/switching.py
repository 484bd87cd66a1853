"""The switch of a model whose adapter is trained: the base comes once, then adapters alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rlctl.hybrid.lora.folding import folded
from rlctl.hybrid.lora.parts import adapter_names, sums
from rlctl.hybrid.reshard.report import PHASES, Switched, SwitchReport
from rlctl.hybrid.reshard.resharder import BUCKET_NBYTES, Resharder
from rlctl.hybrid.tp.weights import apart
from rlctl.keys.lora.contents import LoraModule
from rlctl.sync.plan import Plan


class AdapterResharder:
    """What ``Resharder`` is to a model that is trained whole; all ranks make one, and the same calls.

    The base's generation shards are kept as they came, and each adapter is added to those, never to an earlier sum.

    Args:
        plan: of the model's weights and the adapter's, see ``parts.adapter_weights``.
        modules: the adapted layers.
        group, deadline, bucket_nbytes: see ``Resharder``.
        keeps: the base's shards stay while the ranks train (``SwitchReport.kept_bytes``); else every switch brings
            them, too.
        parked: training shards leave the device while it generates. What is kept of the base then lies in host
            memory, and takes none of the device's beside the sums.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Sequence[LoraModule],
        group: dist.ProcessGroup | None,
        *,
        deadline: float,
        keeps: bool = True,
        parked: bool = False,
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> None:
        names = set(adapter_names(modules))
        rest = [weight.name for weight in plan.weights if weight.name not in names]
        self._movers = [
            Resharder(plan, group, deadline=deadline, names=some, bucket_nbytes=bucket_nbytes) for some in (rest, names)
        ]
        self._keeps, self._parked = keeps, parked
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        device = plan.placement.train[rank]
        places = plan.placement.rollout
        self._sums = list(sums(plan, modules, places.index(device))) if device in places else []
        self._summed = {one.shard for one in self._sums}
        self._base: dict[str, torch.Tensor] | None = None
        self._adapter: dict[str, torch.Tensor] = {}
        self._device = torch.device("cpu")
        self._kept_bytes = 0

    @property
    def holds_base(self) -> bool:
        """Whether the next switch brings the adapter alone."""
        return self._base is not None

    def bring(self, held: Mapping[str, torch.Tensor], *, version: int | None = None) -> Switched:
        """Return the generation shards of what this rank lacks: base and adapter apart, or the adapter's alone.

        Args: see ``Resharder.to_rollout``; the adapter's shards under their names in the model.
        """
        self._device = next((tensor.device for tensor in held.values()), self._device)
        base, adapter = self._movers
        parts: dict[str, torch.Tensor] = {}
        reports = []
        if self._base is None:
            moved = base.to_rollout(held, version=version)
            base.to_training()
            parts |= moved.shards
            reports.append(moved.report)
            self._base = self._as_kept(moved.shards, held)
        moved = adapter.to_rollout(held, version=version)
        adapter.to_training()
        self._adapter = moved.shards
        reports.append(moved.report)
        report = together(reports)
        return Switched(
            parts | moved.shards,
            replace(
                report,
                kept_bytes=self._kept_bytes if self._keeps else 0,
                peak_extra_bytes=report.peak_extra_bytes + sum(self._base[name].nbytes for name in self._summed),
            ),
        )

    def summed(self) -> dict[str, torch.Tensor]:
        """Return the generation shards with the adapter in them, of what was brought last."""
        assert self._base is not None, "nothing was brought"
        return folded(self._base, self._adapter, self._sums, self._device)

    def to_rollout(self, held: Mapping[str, torch.Tensor], *, version: int | None = None) -> Switched:
        """See ``Resharder``; the shards have the adapter in them."""
        report = self.bring(held, version=version).report
        begin = time.perf_counter()
        shards = self.summed()
        seconds = {**report.seconds, "place": report.seconds["place"] + time.perf_counter() - begin}
        return Switched(shards, replace(report, seconds=seconds))

    def forget(self) -> None:
        """Have the next switch bring the base, too."""
        self._base = None

    def to_training(self) -> None:
        """Let go of the sums, and of the base unless it is kept. Nothing moves."""
        self._adapter = {}
        if not self._keeps:
            self._base = None

    def _as_kept(self, shards: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = dict(shards)
        if self._parked:
            kept = {name: shard.to("cpu") for name, shard in apart(shards, held.values()).items()}
        masters = {tensor.untyped_storage().data_ptr() for tensor in held.values() if tensor.numel()}
        own = (shard for shard in kept.values() if shard.untyped_storage().data_ptr() not in masters)
        self._kept_bytes = sum(shard.nbytes for shard in own)
        return kept


def together(reports: Sequence[SwitchReport]) -> SwitchReport:
    """Return one report of what was moved one after the other."""
    pairs: Counter[tuple[int, int]] = Counter()
    for report in reports:
        pairs.update(report.device_pairs)
    return SwitchReport(
        sent_bytes=sum(report.sent_bytes for report in reports),
        received_bytes=sum(report.received_bytes for report in reports),
        num_all_gather=sum(report.num_all_gather for report in reports),
        num_p2p=sum(report.num_p2p for report in reports),
        max_latency_ms=max(report.max_latency_ms for report in reports),
        device_pairs=dict(pairs),
        seconds={phase: sum(report.seconds[phase] for report in reports) for phase in PHASES},
        peak_extra_bytes=sum(report.peak_extra_bytes for report in reports),
        control_bytes=sum(report.control_bytes for report in reports),
    )
