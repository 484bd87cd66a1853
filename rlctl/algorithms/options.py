"""Which settings a registered function takes: those that its signature names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def options_of(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``settings`` that ``function`` takes as keyword arguments."""
    wanted = inspect.signature(function).parameters
    return {name: value for name, value in settings.items() if name in wanted}
