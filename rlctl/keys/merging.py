"""Converting and merging an adapter in one go: base tensors that read as what they are after the merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import Finding, UsageError
from rlctl.keys.ahead import DEPTH, ahead
from rlctl.keys.boxes import Box, whole
from rlctl.keys.containers import Container
from rlctl.keys.layout import Ref, TensorInfo
from rlctl.keys.lora import merge_plan
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import read_contents
from rlctl.keys.lora.merge_plan import MergePlan
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.pieces import PiecedTensor
from rlctl.keys.schemes.hf import HEAD
from rlctl.keys.stored_tensors import StoredTensors
from rlctl.keys.tensor_file import TensorEntry

if TYPE_CHECKING:
    import torch

    from rlctl.keys.lora.merge import Merger


@dataclass(frozen=True)
class Merge:
    """An adapter and what it does to a base.

    Args:
        adapter: the adapter's data.
        plan: which base tensors change.
        where: the adapter's folder.
    """

    adapter: Adapter
    plan: MergePlan
    where: Path

    @property
    def notes(self) -> list[str]:
        """What a user should know of the adapter."""
        config, contents = self.adapter.config, self.adapter.contents
        notes = [f"{self.where}: {note}" for note in config.notes]
        if contents.stripped:
            notes.append(f"{self.where}: {contents.stripped} keys stripped of wrapper segments")
        return notes

    def zero_hits(self) -> list[Finding]:
        """Return a finding for every rank or alpha pattern that decides nothing."""
        return self.adapter.config.zero_hit_patterns([module.site for module in self.adapter.contents.modules])


def plan_merge(
    adapter: Adapter, where: Path, base: StoredTensors, spec: ModelSpec, *, base_is_moved: bool, untie: bool
) -> Merge:
    """Plan the merge of ``adapter`` into a base in one of the Hugging Face forms.

    Raises UsageError or PlanError when the adapter does not fit the base; see ``rlctl.keys.lora.merge_plan``.
    """
    shapes = {ref.name: info.shape for ref, info in base.infos.items()}
    made = merge_plan.plan_merge(
        adapter.contents,
        adapter.config,
        shapes,
        moe=spec.moe,
        tied=spec.tied,
        base_is_moved=base_is_moved,
        untie=untie,
    )
    return Merge(adapter, made, where)


class MergedTensors(StoredTensors):
    """The tensors of a base after a merge. Merged ones are made when they are read, in float32, and cast once.

    Args:
        base: the base, in one of the Hugging Face forms.
        merge: from ``plan_merge``.
        dtype: safetensors code of the merged tensors, that of their base when None.
    """

    def __init__(self, base: StoredTensors, merge: Merge, dtype: str | None) -> None:
        super().__init__({}, base.infos)
        self._base, self._merge, self._dtype = base, merge, dtype
        self._merger: Merger | None = None
        self._maker = ThreadPoolExecutor(1)
        self._last: tuple[Ref, torch.Tensor] | None = None
        self.sources = dict(base.infos)
        self._new_head = Ref(HEAD) if merge.plan.new_head is not None else None
        for ref, info in base.infos.items():
            if merge.plan.touches(ref.name):
                self.infos[ref] = TensorInfo(info.shape, dtype or info.dtype)
        if self._new_head is not None:
            info = base.infos[Ref(merge.plan.embedding)]
            self.infos[self._new_head] = TensorInfo(info.shape, dtype or info.dtype)

    def entry(self, ref: Ref) -> TensorEntry | None:
        """Return the one stretch that holds a tensor; a merged one lies nowhere yet."""
        return None if self._changed(ref) else self._base.entry(ref)

    def files(self) -> list[Path]:
        """Return the files of the base."""
        return self._base.files()

    def read(self, ref: Ref, box: Box) -> torch.Tensor:
        """Return a region of a tensor as it is after the merge."""
        if not self._changed(ref):
            return self._base.read(ref, box)
        if self._last is None or self._last[0] != ref:
            self._last = None  # let the old one go before the new one comes
            self._last = (ref, self._merged(ref))
        return self._last[1][tuple(span.slice for span in box)]

    def pieces(self, ref: Ref) -> Iterator[torch.Tensor] | None:
        """Return the runs of a merged tensor whose base lies in one stretch of a file, made ahead in a thread."""
        if ref == self._new_head or not self._changed(ref) or self._base.entry(ref) is None:
            return None
        return ahead(self._runs(ref, ring=DEPTH + 1), self._maker)

    def finish(self) -> None:
        """Raise CheckError when nothing was changed by the merge."""
        if self._merger is not None:
            self._merger.finish()

    def close(self) -> None:
        """Close the base and the adapter."""
        self._last = None
        self._maker.shutdown()
        self._base.close()
        self._merge.adapter.close()

    def _changed(self, ref: Ref) -> bool:
        return ref == self._new_head or self._merge.plan.touches(ref.name)

    def _made(self) -> Merger:
        from rlctl.keys.dtypes import torch_dtype
        from rlctl.keys.lora.merge import Merger

        if self._merger is None:
            dtype = torch_dtype(self._dtype) if self._dtype else None
            self._merger = Merger(self._merge.adapter, self._merge.plan, dtype=dtype)
        return self._merger

    def _runs(self, ref: Ref, *, ring: int = 1) -> Iterator[torch.Tensor]:
        def read(first: int, out: torch.Tensor) -> None:
            self._base.fill(ref, out, first)

        return self._made().pieces(ref.name, self.sources[ref], read, ring=ring)

    def _merged(self, ref: Ref) -> torch.Tensor:
        import torch

        from rlctl.keys.dtypes import torch_dtype

        if ref == self._new_head:
            embedding = Ref(self._merge.plan.embedding)
            return self._made().head(self._base.read(embedding, whole(self.sources[embedding].shape)))
        info = self.sources[ref]
        if self._base.entry(ref) is not None:
            # The same runs as in ``pieces``: other blocks would round a few sums otherwise, and a check would see it.
            out = torch.empty(self.infos[ref].shape, dtype=torch_dtype(self.infos[ref].dtype))
            rest = out.view(-1)
            for run in self._runs(ref):
                rest[: run.numel()].copy_(run.view(-1))
                rest = rest[run.numel() :]
            return out
        base = self._base.read(ref, whole(info.shape))
        return self._made().tensor(ref.name, base, out=base if self.infos[ref] == info else None)


def adapter_in_model(
    tensors: Mapping[Ref, TensorEntry | PiecedTensor], container: Container, folder: Path | None
) -> Adapter:
    """Return the adapter that lies among the tensors of a model inside PEFT.

    Args:
        tensors: those that are the adapter's.
        container: where they were found; an adapter_config.json may lie beside the model's configuration.
        folder: the folder of the adapter_config.json, where the user names it.

    Raises UsageError when there is no configuration: rank and alpha are in no tensor.
    """
    homes = [folder] if folder else [*container.config_folders, container.path / "lora_adapter"]
    home = next((home for home in homes if (home / "adapter_config.json").is_file()), None)
    if home is None:
        fix = "give the folder that holds it with --adapter"
        raise UsageError(
            "no adapter_config.json: rank and alpha are needed", where=str(folder or container.path), fix=fix
        )
    config = AdapterConfig.parse(home)
    stored = StoredTensors.of(tensors)

    @lru_cache(maxsize=4)
    def load(name: str) -> torch.Tensor:
        ref = Ref(name)
        return stored.read(ref, whole(stored.infos[ref].shape))

    shapes = {ref.name: info.shape for ref, info in stored.infos.items()}
    return Adapter(config, read_contents(shapes, config), load, stored.close)
