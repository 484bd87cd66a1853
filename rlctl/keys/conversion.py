"""What a conversion is asked to do, and what is known of it once it is planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import Finding
from rlctl.keys.plan import PlanError
from rlctl.keys.schemes.megatron import Grid

MODEL_TARGETS = ("hf", "hf-fused", "megatron", "vllm")
ADAPTER_TARGETS = ("peft", "vllm-lora")
Advance = Callable[[float], None]


@dataclass(frozen=True)
class Conversion:
    """What is asked for.

    Args:
        source: a folder or file with a model.
        to: one of ``MODEL_TARGETS`` or ``ADAPTER_TARGETS``.
        scheme: the source's scheme, or ``auto``.
        base: a folder with the config.json, where the source has none.
        dtype: safetensors code to cast floating-point tensors to, or None.
        tp, pp, ep: tensor-, pipeline- and expert-parallel sizes of a Megatron target, 1 when None; for another target
            those of a Megatron source that does not say its own.
        modules: ``te`` or ``local``, how a Megatron target names its modules.
        vocab_multiple: Megatron's ``make_vocab_size_divisible_by``.
        max_shard_bytes: limit of a shard, or None for the source's own shards where they fit, else 5 GiB.
        drop_unknown: leave tensors of unknown names out instead of refusing.
        adapter: the folder of an adapter to merge; for a source inside PEFT that of its adapter_config.json, which may
            also lie beside the source.
        merge: fold the adapter in.
        untie: give a tied head a tensor of its own where the adapter tells head and embedding apart.
        base_is_moved: the base is the changed one that PiSSA and its kin trained on.
        map_file: a user's map of the source's names, which then decides instead of ``scheme``.
    """

    source: Path
    to: str
    scheme: str = "auto"
    base: Path | None = None
    dtype: str | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    modules: str = "te"
    vocab_multiple: int = 128
    max_shard_bytes: int | None = None
    drop_unknown: bool = False
    adapter: Path | None = None
    merge: bool = False
    untie: bool = False
    base_is_moved: bool = False
    map_file: Path | None = None

    @property
    def grid(self) -> Grid:
        """How a Megatron target is cut."""
        return Grid(self.tp or 1, self.pp or 1, self.ep or 1, self.modules, self.vocab_multiple)


class Prepared(ABC):
    """A planned conversion: what is there, what will be written, and all that stands in the way. No tensor is read."""

    conversion: Conversion

    @property
    def source(self) -> str:
        """What is converted, for messages."""
        return str(self.conversion.source)

    @property
    @abstractmethod
    def source_scheme(self) -> str:
        """Name of the scheme that was recognised."""

    @property
    @abstractmethod
    def why(self) -> list[str]:
        """What container and scheme of the source were told by."""

    @property
    @abstractmethod
    def findings(self) -> list[Finding]:
        """Every fault of the files, the names and the plan."""

    @property
    @abstractmethod
    def notes(self) -> list[str]:
        """What a user should know but that stands in nobody's way."""

    @property
    @abstractmethod
    def warnings(self) -> list[str]:
        """What stands in the way only under ``--strict``."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """How many tensors are converted, renamed, split, fused, merged, dropped, unknown."""

    @property
    @abstractmethod
    def dropped(self) -> list[tuple[str, str]]:
        """Name and reason of every stored tensor that is left out."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all targets."""

    @abstractmethod
    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield target, sources, shape, dtype and transforms of every tensor that would be written."""

    @abstractmethod
    def write(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        verify: bool = False,
        durable: bool = True,
        advance: Advance = lambda _: None,
    ) -> dict[str, Any]:
        """Run the conversion into the folder ``target``, which appears whole or not at all.

        Args:
            target: the folder to make.
            overwrite: replace a checkpoint that is there.
            verify: read the output again and compare every element with the plan.
            durable: wait until the disk has everything before the folder appears.
            advance: told of bytes as they are done; with ``verify`` each byte counts twice.

        Returns the report: ``document()`` with ``target``, ``seconds``, ``verified``, ``files``. Raises PlanError when
        anything stands in the way or does not hold, UsageError and OutputError for the target folder.
        """

    def check(self, *, strict: bool = False) -> None:
        """Raise PlanError when anything stands in the way; with ``strict`` warnings do."""
        findings = [*self.findings, *(map(Finding, self.warnings) if strict else ())]
        if findings:
            title = f"cannot convert {self.source} from {self.source_scheme} to {self.conversion.to}"
            raise PlanError(title, findings)

    def document(self) -> dict[str, Any]:
        """Return what a report says of the plan."""
        return {
            "source": self.source,
            "source_scheme": self.source_scheme,
            "target_scheme": self.conversion.to,
            "recognised": self.why,
            "counts": self.counts,
            "dropped": [{"name": name, "reason": reason} for name, reason in self.dropped],
            "findings": [{"message": f.message, "where": f.where, "fix": f.fix} for f in self.findings],
            "notes": self.notes,
            "warnings": self.warnings,
            "bytes": self.nbytes,
        }
