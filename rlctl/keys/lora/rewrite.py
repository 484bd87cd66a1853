"""An adapter in another form: other layers, made of its tensors, with a configuration that says the same of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig, Scaling
from rlctl.keys.lora.contents import LoraModule
from rlctl.keys.lora.patterns import is_target

if TYPE_CHECKING:
    from torch import Tensor


def rewritten(adapter: Adapter, modules: Sequence[LoraModule], made: Mapping[str, Callable[[], Tensor]]) -> Adapter:
    """Return an adapter of ``modules``.

    Args:
        adapter: where tensors of other names come from, and the whole tensors.
        modules: the new layers.
        made: name of A or B -> how to make it.
    """

    def load(name: str) -> Tensor:
        return made[name]() if name in made else adapter.load(name)

    contents = replace(adapter.contents, modules=tuple(modules))
    return Adapter(fitted(adapter.config, modules), contents, load, adapter.close)


def fitted(config: AdapterConfig, modules: Sequence[LoraModule]) -> AdapterConfig:
    """Return ``config`` with targets that select ``modules`` and patterns that give each its scaling."""
    parameters = dict.fromkeys(".".join([*m.path.split(".")[-2:], m.parameter]) for m in modules if m.parameter)
    paths = [m.path for m in modules if not m.parameter]
    listed = config.target_modules if isinstance(config.target_modules, tuple) else ()
    targets = [target for target in listed if any(is_target(path, [target]) for path in paths)]
    targets += dict.fromkeys(p.rpartition(".")[2] for p in paths if not is_target(p, targets))
    new = replace(config, target_modules=tuple(targets), target_parameters=tuple(parameters))
    wanted = {m.site: m.scaling for m in modules}
    if all(new.scaling(site) == scaling for site, scaling in wanted.items()):
        return new
    patterns = _patterns(wanted)
    return replace(
        new,
        rank_pattern={key: s.r for key, s in patterns.items() if s.r != config.r},
        alpha_pattern={key: s.alpha for key, s in patterns.items() if s.alpha != config.lora_alpha},
    )


def _patterns(wanted: Mapping[str, Scaling]) -> dict[str, Scaling]:
    """Return one pattern for all sites that differ in numbers only and agree in scaling, else one for each site."""
    groups: dict[str, dict[str, Scaling]] = {}
    for site, scaling in wanted.items():
        general = re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(site))
        groups.setdefault(general, {})[site] = scaling
    patterns = {}
    for general, members in groups.items():
        if len(set(members.values())) == 1:
            patterns[general] = next(iter(members.values()))
        else:
            patterns.update({re.escape(site): scaling for site, scaling in members.items()})
    return patterns
