"""Every source merged into one configuration, with the origin of each value and every fault at once.

Lowest to highest: defaults, the mode's defaults, presets, the profile, extra layers, ``--config`` files (a later one
wins), ``RLCTL_SECTION__KEY`` variables, ``key=value`` arguments and dedicated flags. An argument and a flag may both
name a key only if they agree; so may two arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.config.interpolation import has_interpolation, interpolate
from rlctl.config.keytable import KeySpec, flatten, key_table, set_value
from rlctl.config.profiles import is_path, read_profile
from rlctl.config.sources import (
    Entry,
    read_environment,
    read_flags,
    read_mapping,
    read_overrides,
    read_text,
    read_yaml,
)
from rlctl.config.values import ValueFaultError, convert, from_python
from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.registry import suggest
from rlctl.schema import Config

#: Defaults of a mode, given its name and the configuration so far.
ModeDefaults = Callable[[str, Config], Mapping[str, Any]]
#: Named settings that the configuration so far asks for: where they come from -> the values of keys nobody set.
PresetValues = Callable[[Config], Mapping[str, Mapping[str, Any]]]
#: Names that an open key may take.
OpenChoices = Mapping[str, Callable[[], Sequence[str]]]

DEFAULT_ORIGIN = "default"


@dataclass(frozen=True)
class Layer:
    """Values from elsewhere (a resumed run's saved configuration), nested or with dotted keys."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Resolved:
    """The configuration of a run and where each value came from (dotted key -> origin)."""

    config: Config
    origins: Mapping[str, str]
    profile: str | None = None
    notes: tuple[Finding, ...] = field(default=())

    def origin(self, key: str) -> str:
        """Return where the value of ``key`` came from."""
        return self.origins.get(key, DEFAULT_ORIGIN)


def load_config(
    profile: str | None = None,
    *,
    files: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    layers: Sequence[Layer] = (),
    preset_values: PresetValues | None = None,
    mode_defaults: ModeDefaults | None = None,
    open_choices: OpenChoices | None = None,
) -> Resolved:
    """Return the configuration that all sources give together.

    Args:
        profile: name of a shipped profile or path of a file; None reads none.
        files: paths of YAML files; a later one wins.
        env: variables to read; the process's own when None.
        overrides: ``key=value`` arguments.
        flags: dedicated flag (see ``FLAG_KEYS``) -> value or None.
        layers: further mappings, above the profile and below the files.
        preset_values: values of named settings for keys that nobody set, above the mode's; of two, the first wins.
        mode_defaults: values for keys that nobody set or that were set to null, by mode.
        open_choices: for keys whose values other packages may add to: the known names. A value with a colon is
            checked by the part before it.

    Raises:
        FindingsError: every fault of every source.
    """
    findings: list[Finding] = []
    below = _profile_entries(profile, findings)
    for layer in layers:
        below += read_mapping(layer.values, layer.name, findings)
    for path in files:
        text = read_text(path, findings)
        below += read_yaml(text, path, None, findings) if text is not None else []
    below += read_environment(os.environ if env is None else env, findings)
    typed = read_overrides(overrides, findings) + read_flags(flags or {}, findings)
    merged = _merge(below, typed, findings)
    config, origins = _build(merged, findings)
    if open_choices:
        _check_names(config, merged, open_choices, findings)
    if findings:
        raise FindingsError("configuration", findings)
    for origin, values in (preset_values(config) if preset_values is not None else {}).items():
        _fill(config, origins, values, origin)
    if mode_defaults is not None:
        mode = config.trainer.mode
        _fill(config, origins, mode_defaults(mode, config), f"mode {mode}")
    return Resolved(config, origins, profile)


def _profile_entries(profile: str | None, findings: list[Finding]) -> list[Entry]:
    if profile is None:
        return []
    if is_path(profile):
        text = read_text(profile, findings)
        return read_yaml(text, profile, Path(profile).stem, findings) if text is not None else []
    try:
        text = read_profile(profile)
    except UsageError as error:
        findings.append(Finding(error.message, error.where, error.fix))
        return []
    return read_yaml(text, f"{profile}.yaml", profile, findings)


@dataclass(frozen=True)
class _Set:
    """The winning value of a key: converted, or its entry alone while it still holds an interpolation."""

    entry: Entry
    value: Any = None
    pending: bool = False

    def says_the_same_as(self, other: _Set) -> bool:
        if self.pending or other.pending:
            return self.entry.node == other.entry.node
        return bool(self.value == other.value)


def _merge(below: list[Entry], typed: list[Entry], findings: list[Finding]) -> dict[str, _Set]:
    merged: dict[str, _Set] = {}
    for entry in below:
        _take(entry, merged, findings)
    said: dict[str, _Set] = {}
    for entry in typed:
        first = said.get(entry.key)
        taken = _take(entry, merged, findings)
        if taken is None:
            continue
        if first is not None and not first.says_the_same_as(taken):
            message = f"{entry.key}: set twice, differently: {first.entry.origin} and {entry.origin}"
            findings.append(Finding(message, entry.where, "keep one of them"))
        said[entry.key] = taken
    return merged


def _take(entry: Entry, merged: dict[str, _Set], findings: list[Finding]) -> _Set | None:
    if has_interpolation(entry.node):
        merged[entry.key] = _Set(entry, pending=True)
    else:
        try:
            merged[entry.key] = _Set(entry, convert(key_table()[entry.key], entry.node))
        except ValueFaultError as fault:
            findings.append(_fault(entry, fault))
            return None
    return merged[entry.key]


def _fault(entry: Entry, fault: ValueFaultError) -> Finding:
    return Finding(f"{entry.key}: {fault}", entry.where, fault.fix)


def _build(merged: Mapping[str, _Set], findings: list[Finding]) -> tuple[Config, dict[str, str]]:
    config = Config()
    pending = {key for key, item in merged.items() if item.pending}
    for key, item in merged.items():
        if key not in pending:
            set_value(config, key, item.value)
    plain = flatten(config) if pending else {}
    for key in sorted(pending):
        entry, spec = merged[key].entry, key_table()[key]
        try:
            set_value(config, key, convert(spec, interpolate(key, entry.node, plain, pending)))
        except ValueFaultError as fault:
            findings.append(_fault(entry, fault))
    origins = {key: merged[key].entry.origin if key in merged else DEFAULT_ORIGIN for key in key_table()}
    return config, origins


def _check_names(config: Config, merged: Mapping[str, _Set], choices: OpenChoices, findings: list[Finding]) -> None:
    values = flatten(config)
    for key, names in choices.items():
        words = values[key] if isinstance(values[key], list) else [values[key]]
        for value in words:
            if not isinstance(value, str) or value.partition(":")[0] in (known := list(names())):
                continue
            where = merged[key].entry.where if key in merged else DEFAULT_ORIGIN
            near = suggest(value, known)
            hint = f"did you mean {near!r}? " if near else ""
            findings.append(Finding(f"{key}: unknown name {value!r}", where, f"{hint}known: {', '.join(known)}"))


def _fill(config: Config, origins: dict[str, str], values: Mapping[str, Any], origin: str) -> None:
    """Set the keys that nobody set, or that were set to null."""
    for key, value in values.items():
        if key not in key_table():
            raise AssertionError(f"{origin} has a value for {key}, which is no key")
        if origins[key] == DEFAULT_ORIGIN or flatten(config)[key] is None:
            spec: KeySpec = key_table()[key]
            set_value(config, key, convert(spec, from_python(value)))
            origins[key] = origin
