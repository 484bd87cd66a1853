"""Writing an adapter on its own, for PEFT or for vLLM, out of an adapter's folder or out of a model inside PEFT."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.keys.checkpoint import Checkpoint, is_adapter
from rlctl.keys.conversion import Advance, Conversion, Prepared
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.export import AdapterTarget, entries, export_adapter, for_target
from rlctl.keys.merging import adapter_in_model
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.named import Named, open_names
from rlctl.keys.plan import PlanError
from rlctl.keys.shard_layout import TensorShape

_FORMS: dict[str, AdapterTarget] = {"peft": "peft-file", "vllm-lora": "vllm-lora"}


@dataclass
class PreparedAdapter(Prepared):
    """A planned export of an adapter.

    Args:
        conversion: what was asked for.
        adapter: as it was found.
        ready: as the target wants it.
        named: the files it was found in, None for the folder of an adapter.
        spec: the base model, where its configuration is at hand.
    """

    conversion: Conversion
    adapter: Adapter
    ready: Adapter
    named: Named | None
    spec: ModelSpec | None

    @property
    def form(self) -> AdapterTarget:
        """The target's name in the LoRA room."""
        return _FORMS[self.conversion.to]

    @cached_property
    def targets(self) -> list[TensorShape]:
        """Name, dtype and shape of every tensor that would be written."""
        from rlctl.keys.tensor_values import shape_of

        return [shape_of(name, tensor) for name, tensor in entries(self.ready, self.form)]

    @property
    def source_scheme(self) -> str:
        return "peft-in-model" if self.adapter.contents.in_model else "peft"

    @property
    def why(self) -> list[str]:
        count = len(self.adapter.contents.modules)
        if self.named is None:
            return ["adapter_config.json describes an adapter", f"{count} adapted layers"]
        return [self.named.container.why, f"{count} adapted layers among the names of a model inside PEFT"]

    @property
    def findings(self) -> list[Finding]:
        return self.named.findings if self.named else []

    @property
    def notes(self) -> list[str]:
        notes = [*(self.named.notes if self.named else ()), *self.adapter.config.notes]
        stripped = self.adapter.contents.stripped
        return [*notes, f"{stripped} keys stripped of wrapper segments"] if stripped else notes

    @cached_property
    def warnings(self) -> list[str]:  # computed once: it reads every tensor
        modules = [module.site for module in self.adapter.contents.modules]
        idle = self.adapter.idle_modules()
        found = [str(finding) for finding in self.adapter.config.zero_hit_patterns(modules)]
        if idle:
            found.append(f"{len(idle)} of {len(modules)} adapted layers do nothing (A or B is zero): {idle[0]}")
        return found

    @property
    def counts(self) -> dict[str, int]:
        transforms = Counter(row["transforms"][0] for row in self.rows())
        return {
            "converted": len(self.targets),
            "renamed": transforms["rename"],
            "split": transforms["unstack"],
            "fused": 0,
            "merged": 0,
            "dropped": len(self.dropped),
            "unknown": 0,
        }

    @property
    def dropped(self) -> list[tuple[str, str]]:
        base = [(str(ref), "base weight") for ref in self.named.base] if self.named else []
        return [*self.adapter.contents.dropped, *base]

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    def rows(self) -> Iterator[dict[str, Any]]:
        raw = [*_names(self.adapter), *self.adapter.contents.saved.values()]
        apart = len(raw) != len(self.targets)  # stacked experts were taken apart
        for index, target in enumerate(self.targets):
            source = None if apart else raw[index]
            yield {
                "target": target.name,
                "sources": [source] if source else [],
                "shape": list(target.shape),
                "dtype": target.dtype,
                "transforms": ["unstack" if apart else "copy" if source == target.name else "rename"],
            }

    def write(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        verify: bool = False,
        durable: bool = True,
        advance: Advance = lambda _: None,
    ) -> dict[str, Any]:
        self.check()
        start = time.monotonic()
        with self.adapter:
            export_adapter(
                self.adapter,
                target,
                self.form,
                spec=self.spec,
                base_is_moved=self.conversion.base_is_moved,
                overwrite=overwrite,
                sources=[self.conversion.source],
                durable=durable,
            )
            advance(self.nbytes)
            if verify:
                self._verify(target)
                advance(self.nbytes)
        return {
            **self.document(),
            "target": str(target),
            "verified": verify,
            "files": ["adapter_config.json"],
            "seconds": time.monotonic() - start,
        }

    def _verify(self, target: Path) -> None:
        """Read the output again and compare every tensor."""
        with Checkpoint.open(target) as written:
            names = [name for name, _ in entries(self.ready, self.form)]
            faults = [name for name in names if name not in written.entries]
            faults += [
                name
                for name, tensor in entries(self.ready, self.form)
                if name in written.entries and not written.tensor(name).equal(tensor)
            ]
        if faults:
            raise PlanError("the output is not what was planned", [Finding("differs in the output", n) for n in faults])


def _names(adapter: Adapter) -> list[str]:
    """Return the raw names of the LoRA tensors in the order in which they are written."""
    return [
        name
        for module in adapter.contents.modules
        for name in (module.a, module.b, module.magnitude, module.bias)
        if name is not None
    ]


def prepare_adapter(conversion: Conversion) -> PreparedAdapter:
    """Open the adapter that is asked for; see ``rlctl.keys.convert.prepare``."""
    source = conversion.source
    if conversion.merge or conversion.dtype:
        what = "--merge" if conversion.merge else "--dtype"
        raise UsageError(f"does not go with --to {conversion.to}", where=what)
    if is_adapter(source):
        named, adapter = None, Adapter.open(source)
        homes = [source]
    else:
        named = open_names(source)
        if not named.adapter:
            raise UsageError("holds no adapter", where=str(source), fix="name the folder of an adapter")
        adapter = adapter_in_model(named.adapter, named.container, conversion.adapter)
        homes = named.container.config_folders
    spec = _spec([*([conversion.base] if conversion.base else []), *homes])
    ready = for_target(adapter, _FORMS[conversion.to], spec=spec, base_is_moved=conversion.base_is_moved)
    return PreparedAdapter(conversion, adapter, ready, named, spec)


def _spec(homes: list[Path]) -> ModelSpec | None:
    home = next((home for home in homes if (home / "config.json").is_file()), None)
    return ModelSpec.from_folder(home) if home else None
