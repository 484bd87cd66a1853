"""An adapter with its data: opened from a folder, or taken out of a model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlctl.errors import UsageError
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.lora.arithmetic import LowRank, embedding_delta, expert_pair, experts_delta, linear_delta
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import Contents, LoraModule, read_contents
from rlctl.keys.lora.sites import Update

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter.

    Args:
        config: its configuration.
        contents: its layers and whole tensors, by name.
        load: returns the tensor of a raw name, not to be changed; only the last few are held in memory.
        close: closes the files behind ``load``; leaving a ``with`` block does it.
    """

    config: AdapterConfig
    contents: Contents
    load: Callable[[str], Tensor]
    close: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def open(cls, folder: Path | str) -> Adapter:
        """Open a folder with ``adapter_config.json`` and ``adapter_model.safetensors``; tensors are read on demand.

        Raises UsageError, FindingsError, JsonError or PlanError for a folder that is no sound adapter.
        """
        checkpoint = Checkpoint.open(folder)
        if checkpoint.kind != "adapter":
            raise UsageError("no adapter_config.json here", where=str(folder), fix="give the adapter's folder")
        checkpoint.check()
        config = AdapterConfig.parse(Path(folder))
        shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
        # Experts are taken out of their stacks one by one: the last two stacks stay at hand.
        load = lru_cache(maxsize=4)(checkpoint.tensor)
        return cls(config, read_contents(shapes, config), load, checkpoint.close)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], config: AdapterConfig, *, adapter: str | None = None
    ) -> Adapter:
        """Take an adapter out of named tensors: of an adapter file, or of a model with adapters in it.

        ``adapter`` is the one to take where there are several; its only one, or ``default``, when None.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(config, read_contents(shapes, config, adapter=adapter), tensors.__getitem__)

    def pair(self, module: LoraModule, source: int | None = None) -> tuple[Tensor, Tensor]:
        """Return A and B of a layer, or of expert ``source`` of a stack, as they are stored."""
        a, b = self.load(module.a), self.load(module.b)
        return (a, b) if source is None else expert_pair(a, b, source, module.experts)

    def delta(self, module: LoraModule, *, transposed: bool = False) -> Tensor:
        """Return what the layer adds to its weight (before DoRA's norm), float32: (out, in), (vocab, width) for an
        embedding, (E, out, in) for a stack; ``transposed`` for weights stored (in, out)."""
        a, b = self.pair(module)
        scale = module.scaling.value
        if module.kind == "experts":
            return experts_delta(a, b, scale, module.experts, transposed=transposed)
        if module.kind == "embedding":
            return embedding_delta(a, b, scale)
        return linear_delta(a, b, scale, transposed=transposed)

    def low_rank(self, update: Update) -> LowRank:
        """Return the data of one planned update, in float32."""
        a, b = self.pair(update.module, update.source)
        if update.half is not None:
            b = b.chunk(2)[update.half]
        a, b = a.float(), b.float()
        left, right = (a.T, b.T) if update.transposed else (b, a)
        return LowRank(left, right, update.module.scaling.value, update.expert, update.row)

    def idle_modules(self) -> list[str]:
        """Return the layers whose A or B is zero throughout: loaded, they do nothing."""
        return [
            module.site
            for module in self.contents.modules
            if not (self.load(module.a).any() and self.load(module.b).any()) and module.magnitude is None
        ]
