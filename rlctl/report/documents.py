"""The JSON document of a command."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any

from rlctl import __version__
from rlctl.errors import FindingsError, RlctlError


def command_document(command: str, fields: Mapping[str, Any]) -> str:
    """Return the text of one command's result: ``fields`` under the schema ``rlctl.<command>/1``."""
    return _text({**_head(f"rlctl.{command}/1"), **fields})


def error_document(command: str, error: BaseException, exit_code: int) -> str:
    """Return the text that stands in the place of a result when a command failed (schema ``rlctl.error/1``)."""
    described: dict[str, Any] = {"message": str(error), "where": None, "fix": None}
    if isinstance(error, RlctlError):
        described = {"message": error.message, "where": error.where, "fix": error.fix}
    if isinstance(error, FindingsError):
        described["findings"] = [dataclasses.asdict(finding) for finding in error.findings]
    return _text({**_head("rlctl.error/1"), "command": command, "exit_code": exit_code, "error": described})


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it. What JSON cannot say (NaN, infinities) becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if hasattr(value, "__struct_fields__"):  # of msgspec
        return plain({name: getattr(value, name) for name in value.__struct_fields__})
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if hasattr(value, "item"):
        # A scalar of numpy or torch.
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} has no place in a JSON document")


def _head(schema: str) -> dict[str, Any]:
    return {
        "schema": schema,
        "rlctl_version": __version__,
        "host": socket.gethostname(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _text(document: dict[str, Any]) -> str:
    # ASCII only: the same bytes whatever the locale, and lone surrogates of odd file names stay readable.
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"
