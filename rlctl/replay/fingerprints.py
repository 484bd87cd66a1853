"""Whether a step is computed here as it was where it was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.replay.findings import Difference

OF_THE_RUN = ("device", "threads", "deterministic", "dtype", "activation_dtype")
"""What the configuration decides: where it differs, the record is not of this configuration."""
OF_THE_MACHINE = ("packages", "cpu", "cpu_capability", "devices")
"""What the last bits of a number depend on, and a configuration cannot bring back."""


def of_another_run(told: Mapping[str, Any], here: Mapping[str, Any]) -> Difference | None:
    """Return the first thing that the configuration decides and that was otherwise when a step was recorded."""
    for key in OF_THE_RUN:
        if key in told and told[key] != here.get(key):
            numbers = isinstance(told[key], int) and isinstance(here.get(key), int)
            return Difference("fingerprint", key, float(abs(told[key] - here[key])) if numbers else None)
    return None


def of_another_machine(told: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return how this machine differs from the one of the record, "" when it does not."""
    found = []
    for key in OF_THE_MACHINE:
        if key not in told or told[key] == here.get(key):
            continue
        if isinstance(told[key], Mapping):
            names = [name for name, value in told[key].items() if here[key].get(name) != value]
            found += [f"{name} {told[key][name]}, here {here[key].get(name, 'absent')}" for name in names]
        else:
            found.append(f"{key.replace('_', ' ')} {_words(told[key])}, here {_words(here.get(key))}")
    return "; ".join(found)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
