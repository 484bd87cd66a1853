"""The schema as a flat table: dotted key -> what its value may be."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlctl.schema import Config

Kind = Literal["str", "int", "float", "bool", "choice", "list", "record"]

_SCALARS: dict[Any, Kind] = {str: "str", int: "int", float: "float", bool: "bool"}


@dataclass(frozen=True)
class KeySpec:
    """One key: its dotted path, what it holds and how it is documented.

    ``kind`` is the kind of the value; for a list, ``item`` is the kind of its elements. Elements of kind ``record`` are
    dataclasses, ``record``, whose keys are ``fields``. A key without ``default`` (MISSING) must be given.
    """

    path: str
    kind: Kind
    default: Any
    doc: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    item: Kind | None = None
    record: type | None = None
    fields: tuple[KeySpec, ...] = ()
    unit: str | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None

    @property
    def type_name(self) -> str:
        """The type as a user reads it: ``int``, ``size``, ``duration``, ``one of a, b``."""
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        if self.kind == "list":
            return (
                f"list of {{{', '.join(field.path for field in self.fields)}}}"
                if self.fields
                else f"list of {self.item}"
            )
        named = {"bytes": "size", "seconds": "duration"}.get(self.unit or "")
        return named or {"float": "number"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class SectionSpec:
    """A group of keys."""

    path: str
    doc: str


@lru_cache(maxsize=1)
def key_table() -> dict[str, KeySpec]:
    """Return every key of the configuration, in the order of the schema."""
    return {spec.path: spec for spec in _walk(Config, "") if isinstance(spec, KeySpec)}


@lru_cache(maxsize=1)
def sections() -> dict[str, SectionSpec]:
    """Return every section, nested ones included, in the order of the schema."""
    return {spec.path: spec for spec in _walk(Config, "") if isinstance(spec, SectionSpec)}


def _walk(cls: type, prefix: str) -> typing.Iterator[KeySpec | SectionSpec]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, path = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield SectionSpec(path, field.metadata["doc"])
            yield from _walk(typing.cast("type", hint), path + ".")
        else:
            yield _spec(path, hint, field)


def _spec(path: str, hint: Any, field: dataclasses.Field[Any]) -> KeySpec:
    optional = get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    make = partial(KeySpec, path, default=default, optional=optional, **field.metadata)
    if get_origin(hint) is Literal:
        return make(kind="choice", choices=get_args(hint))
    if get_origin(hint) is not list:
        return make(kind=_SCALARS[hint])
    (inner,) = get_args(hint)
    if not dataclasses.is_dataclass(inner):
        return make(kind="list", item=_SCALARS[inner])
    hints = get_type_hints(inner)
    keys = tuple(_spec(one.name, hints[one.name], one) for one in dataclasses.fields(inner))
    return make(kind="list", item="record", record=typing.cast("type", inner), fields=keys)


def get_value(config: Config, path: str) -> Any:
    """Return the value under a dotted key."""
    node: Any = config
    for name in path.split("."):
        node = getattr(node, name)
    return node


def set_value(config: Config, path: str, value: Any) -> None:
    """Set the value under a dotted key, unchecked."""
    parent, _, name = path.rpartition(".")
    setattr(get_value(config, parent) if parent else config, name, value)


def flatten(config: Config) -> dict[str, Any]:
    """Return dotted key -> value, in the order of the schema."""
    return {path: get_value(config, path) for path in key_table()}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: records become mappings of what is not their default, so that a key that a later
    release adds to them changes nothing about a saved one."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {f.name: item for f in dataclasses.fields(value) if (item := getattr(value, f.name)) != f.default}
