"""The lists of interfaces and cards that NCCL takes: prefixes, ``=`` exact names, ``^`` all but these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NameFilter:
    """A value such as ``^=docker0`` or ``mlx5_0:1,mlx5_1``.

    Attributes:
        names: without their ports.
        exact: names are whole ones, not beginnings.
        exclude: everything but these.
    """

    names: tuple[str, ...]
    exact: bool = False
    exclude: bool = False

    @classmethod
    def parse(cls, value: str) -> NameFilter | None:
        """Return the filter of a value; None for one of less than two characters, which NCCL passes over."""
        if len(value) < 2:
            return None
        exclude = value.startswith("^")
        rest = value[1:] if exclude else value
        exact = rest.startswith("=")
        names = [part.partition(":")[0] for part in rest[exact:].split(",")]
        return cls(tuple(name for name in names if name), exact, exclude)

    def matches(self, name: str) -> bool:
        """Whether NCCL would take a device of this name. An empty list stands for all names."""
        hit = not self.names or any(name == n if self.exact else name.startswith(n) for n in self.names)
        return hit != self.exclude

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` that match, in their order."""
        return [name for name in names if self.matches(name)]

    def surprises(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return each listed name that is a device's whole name -> other devices that begin with it."""
        if self.exact:
            return {}
        more = {n: [name for name in names if name.startswith(n) and name != n] for n in self.names if n in names}
        return {name: others for name, others in more.items() if others}


def default_interfaces(names: Sequence[str]) -> list[str]:
    """Return what NCCL takes when nothing is set: ``ib*``, else all but docker and loopback, else those in turn."""
    kinds = (
        [n for n in names if n.startswith("ib")],
        [n for n in names if not n.startswith(("docker", "lo"))],
        [n for n in names if n.startswith("docker")],
        [n for n in names if n.startswith("lo")],
    )
    return next((kind for kind in kinds if kind), [])
