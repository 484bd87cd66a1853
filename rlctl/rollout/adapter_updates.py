"""Weight updates that carry a LoRA adapter alone: the base is sent once, each adapter is folded into it here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rlctl.errors import RlctlError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.merge import Merger
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.rollout.base import LoadReport, RolloutEngine


class AdapterUpdates:
    """An engine that takes adapters.

    Of the base, the tensors that the adapter sits on are kept as they were sent, in host memory. Every adapter is
    added to those, never to what the engine holds: an update that comes twice, or after others, counts once. With a
    base in float32 the engine's weights equal those of a merged update bit for bit.

    Args:
        engine: holds nothing of its own, or anything: the base is written over it.
        config: of the adapters that will come.
    """

    def __init__(self, engine: RolloutEngine, config: AdapterConfig) -> None:
        self._engine = engine
        self._config = config
        self._kept: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def load_base(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
        """Load a whole model, as ``RolloutEngine.load_weights``, and keep what adapters are added to."""
        self._kept, self._shapes = {}, {}
        return self._engine.load_weights(self._noted(stream), version)

    def load_adapter(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
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
        if not self._shapes or self._engine.version is None:
            raise RlctlError(f"replica {self._engine.replica} holds no base to add an adapter to", fix="send the base")
        # Copied: what comes may lie in memory that the sender writes to again.
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in stream}
        adapter = Adapter.from_tensors(tensors, self._config)
        plan = plan_merge(adapter.contents, self._config, self._shapes)
        merger = Merger(adapter, plan)
        self._engine.load_weights(((name, merger.tensor(name, base)) for name, base in self._kept.items()), version)
        unknown = [name for name, _ in adapter.contents.dropped]
        return LoadReport([name for name in tensors if name not in unknown], unknown, [])

    def _noted(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            self._shapes[name] = tuple(tensor.shape)
            path, _, leaf = name.rpartition(".")
            if leaf == "weight" and self._config.targets(path):
                self._kept[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor
