"""Weight updates that carry a LoRA adapter alone: the base is sent once, each adapter is folded into it here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from rlctl.errors import RlctlError
from rlctl.keys.dtypes import torch_dtype
from rlctl.keys.families import Experts
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.merge import Merger
from rlctl.keys.lora.merge_plan import MergePlan, plan_merge
from rlctl.keys.lora.names import Part, parse_key
from rlctl.rollout.base import WAKE_TAGS, LoadReport, RolloutEngine
from rlctl.sync.member import described
from rlctl.sync.tensor_meta import TensorMeta

Named = tuple[str, torch.Tensor]


class AdapterUpdates:
    """An engine that takes adapters; a ``Replica`` of weight syncs.

    Of the base, the tensors that the adapter sits on are kept as they were sent, in host memory. Every adapter is
    added to those, never to what the engine holds: an update that comes twice, or after others, counts once. With a
    base in float32 the engine's weights equal those of a merged update bit for bit.

    Args:
        engine: holds nothing of its own, or anything: the base is written over it.
        config: of the adapters that will come.
        experts: how the base names and stores its experts; needed where they have an adapter.
    """

    def __init__(self, engine: RolloutEngine, config: AdapterConfig, *, experts: Experts | None = None) -> None:
        self._engine = engine
        self._config = config
        self._experts = experts
        self._kept: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._adapter: dict[str, torch.Tensor] = {}
        self.replica = engine.replica

    @property
    def holds_base(self) -> bool:
        """Whether an adapter can come alone: the engine holds a whole base, or one with an adapter in it."""
        return bool(self._shapes) and self._engine.version is not None

    def load_weights(self, stream: Iterable[Named], version: int) -> LoadReport:
        """Load a base, or an adapter, or both, the base first; see ``load_base`` and ``load_adapter``."""
        adapter: list[Named] = []
        rest = iter(stream)
        first = next(rest, None)
        whole = chain([] if first is None else [first], rest)
        if first is None or not _is_base(first[0]):
            return self.load_adapter(whole, version)
        base = self.load_base(_until_adapter(whole, adapter), version)
        if not base.complete or not adapter:
            return base
        report = self.load_adapter(chain(adapter, rest), version)
        return LoadReport([*base.loaded, *report.loaded], report.unknown, report.untouched)

    def load_base(self, stream: Iterable[Named], version: int) -> LoadReport:
        """Load a whole model, as ``RolloutEngine.load_weights``, and keep what adapters are added to."""
        self._kept, self._shapes, self._adapter = {}, {}, {}
        return self._engine.load_weights(self._noted(stream), version)

    def load_adapter(self, stream: Iterable[Named], version: int) -> LoadReport:
        """Bring the engine to the base with this adapter in it.

        Args:
            stream: (name in a PEFT file, tensor), the whole adapter; a module that is left out has none.
            version: of the weights after it.

        Returns:
            The adapter's names that took effect, and those that did not.

        Raises:
            RlctlError: the engine does not hold a whole base (it slept at level 2, or a load failed); load it again.
            PlanError, UsageError: the adapter does not fit the base; the weights are as they were.
        """
        if not self.holds_base:
            raise RlctlError(f"replica {self.replica} holds no base to add an adapter to", fix="send the base")
        # Copied: what comes may lie in memory that the sender writes to again.
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in stream}
        adapter, plan = self._planned(tensors)
        merger = Merger(adapter, plan)
        self._engine.load_weights(((name, merger.tensor(name, base)) for name, base in self._kept.items()), version)
        unknown = [name for name, _ in adapter.contents.dropped]
        self._adapter = {name: tensor for name, tensor in tensors.items() if name not in unknown}
        return LoadReport(list(self._adapter), unknown, [])

    def weights(self) -> Mapping[str, TensorMeta]:
        """See Replica: of the base."""
        return self._engine.weights()

    def digests(self, names: Iterable[str] | None = None) -> dict[str, list[Any]]:
        """See Replica: what was sent, base and adapter, as long as the engine computes with just that.

        Raises:
            RlctlError: there is no such tensor, or the engine holds something else than base + scale x B @ A.
        """
        wanted = [*self._engine.weights(), *self._adapter] if names is None else list(names)
        own = [name for name in wanted if name in self._adapter]
        self._require_sums({*own, *(name for name in wanted if name in self._kept)})
        kept = [name for name in wanted if name in self._kept]
        plain = [name for name in wanted if name not in self._adapter and name not in self._kept]
        metas = self._engine.weights()
        return {
            **{name: described(name, self._adapter[name]) for name in own},
            **{name: described(name, self._kept[name].to(torch_dtype(metas[name].dtype))) for name in kept},
            **self._engine.digests(plain),
        }

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        """See Replica."""
        self._engine.wake(tags)

    def _require_sums(self, names: set[str]) -> None:
        """Raise RlctlError unless the engine holds what base and adapter of these names come to."""
        adapter, plan = self._planned(self._adapter) if self._adapter else (None, MergePlan({}))
        merger = None if adapter is None else Merger(adapter, plan)
        metas = self._engine.weights()
        for name, base in self._kept.items():
            updates = plan.changes[name].updates if name in plan.changes else ()
            parts = {raw for update in updates for raw in (update.module.a, update.module.b, update.module.magnitude)}
            if names.isdisjoint({name, *parts}):
                continue
            due = base if merger is None else merger.tensor(name, base)
            if self._engine.digests([name])[name] != described(name, due.to(torch_dtype(metas[name].dtype))):
                raise RlctlError(f"replica {self.replica} does not hold the sum of base and adapter at {name}")

    def _planned(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Adapter, MergePlan]:
        adapter = Adapter.from_tensors(tensors, self._config)
        return adapter, plan_merge(adapter.contents, self._config, self._shapes, moe=self._experts)

    def _noted(self, stream: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in stream:
            self._shapes[name] = tuple(tensor.shape)
            if self._config.changes(name):
                self._kept[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor


def _is_base(name: str) -> bool:
    return parse_key(name).part is Part.BASE


def _until_adapter(stream: Iterator[Named], first: list[Named]) -> Iterator[Named]:
    """Yield the base's tensors; the adapter's first, if one comes, goes to ``first``."""
    for name, tensor in stream:
        if not _is_base(name):
            first.append((name, tensor))
            return
        yield name, tensor
