"""Packages that only some tasks need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlctl.errors import UnavailableError


def need(module: str, package: str, what: str) -> Any:
    """Import ``module``. Raises UnavailableError, naming ``package`` and ``what`` needs it, if it is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise UnavailableError(
            f"{what} needs the package {package}, which is not installed",
            where="task",
            fix=f"pip install {package}, or pip install 'rlctl[tasks]'",
        ) from error
