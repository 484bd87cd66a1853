"""Which backends a sync bench can measure on this machine, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.traits import BACKEND_TRAITS

ALL = "all"


@dataclass(frozen=True)
class Unavailable:
    """A backend that cannot be measured here, and what to do about it."""

    backend: str
    reason: str
    remedy: str


def choose_backends(
    names: Sequence[str],
    *,
    across: bool = False,
    extras: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    elsewhere: Callable[[Sequence[str]], Sequence[Unavailable]] = lambda _: (),
) -> tuple[list[str], list[Unavailable]]:
    """Return the backends to measure, and those that cannot be.

    Args:
        names: of backends, or ``all``: every one that runs here.
        across: trainers and rollout workers are on two hosts.
        extras: backend -> its own options.
        elsewhere: says which of some backends cannot run on the other host.

    Raises:
        UnavailableError: one that was named cannot run here, with its remedy.
        UsageError: nobody knows a name.
    """
    if not names:
        raise UsageError("no backend is named", where="--backend", fix=f"names, or {ALL}")
    known = list(dict.fromkeys([*BACKEND_TRAITS, *CHECKPOINT_ENGINES.names()]))
    everything = ALL in names
    chosen, absent = list[str](), list[Unavailable]()
    for name in known if everything else dict.fromkeys(names):
        if name not in known:
            raise CHECKPOINT_ENGINES.unknown(name, where="--backend")
        reason = absence(name) or (_absence_across(name, extras.get(name, {})) if across else None)
        if reason is None:
            chosen.append(name)
        else:
            absent.append(reason)
    there = elsewhere(chosen)
    absent += there
    if absent and not everything:
        first = absent[0]
        raise UnavailableError(f"backend {first.backend}: {first.reason}", where="--backend", fix=first.remedy)
    lacking = {reason.backend for reason in there}
    return [name for name in chosen if name not in lacking], absent


def absence(name: str) -> Unavailable | None:
    """Return why a backend cannot be measured on this host, or None when it can."""
    traits = BACKEND_TRAITS.get(name)
    if traits is not None and not traits.in_place and "separate" not in traits.layouts:
        return Unavailable(name, "trainer and rollout share their devices: nothing is sent", "measure a training run")
    if name not in CHECKPOINT_ENGINES.names():
        known = ", ".join(CHECKPOINT_ENGINES.names())
        return Unavailable(name, "not in this version of rlctl", f"choose another: {known}")
    try:
        CHECKPOINT_ENGINES.load(name).available()
    except UnavailableError as error:
        return Unavailable(name, error.message, error.fix or "")
    if traits is not None and "cpu" not in traits.devices:
        devices = " or ".join(traits.devices)
        return Unavailable(
            name, f"it moves weights between {devices} devices; this bench uses the CPU", "see docs/sync-bench.md"
        )
    return None


def _absence_across(name: str, extras: Mapping[str, Any]) -> Unavailable | None:
    traits = BACKEND_TRAITS.get(name)
    if traits is not None and traits.in_place:
        return Unavailable(
            name, "its members have no two sides to be on two hosts", "measure it without --listen and --connect"
        )
    if traits is not None and traits.one_node:
        return Unavailable(
            name, "it moves weights through the memory of one host", "measure it without --listen and --connect"
        )
    if traits is not None and traits.folder and "folder" not in extras:
        return Unavailable(name, "it needs a folder that both hosts see", f"--option {name}.folder=DIR")
    return None
