"""rlctl: train, sync, plan and replay LLM reinforcement learning runs.

The names below load on first use, so that ``import rlctl`` costs nothing on a login node.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "HybridEngine": "rlctl.hybrid.engine",
    "ParameterSynchronizer": "rlctl.trainers.synchronizer",
    "get_trainer_cls": "rlctl.trainers",
    "register_trainer": "rlctl.trainers",
}

__all__ = ["HybridEngine", "ParameterSynchronizer", "__version__", "get_trainer_cls", "register_trainer"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rlctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
