"""JSON objects out of untrusted files: bounded, with every failure as a readable error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.keys.tensor_file import read_whole

MAX_JSON_BYTES = 256 << 20  # the index of the largest public checkpoint is under 20 MiB


class JsonError(RlctlError):
    """A file or a header that should hold one JSON object does not."""


def parse_object(data: bytes | bytearray | memoryview, *, where: str) -> dict[str, Any]:
    """Return the JSON object in ``data`` (UTF-8). Duplicate keys, NaN and anything but an object are refused."""
    try:
        value = json.loads(bytes(data).decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 text (byte {error.start})", where=where) from error
    except json.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error.msg}", where=f"{where}:{error.lineno}") from error
    except RecursionError as error:
        raise JsonError("JSON is nested too deeply", where=where) from error
    except ValueError as error:  # raised by the two hooks, and by integers of absurd length
        raise JsonError(f"not valid JSON: {error}", where=where) from error
    if not isinstance(value, dict):
        raise JsonError(f"holds a JSON {type(value).__name__}, not an object", where=where)
    return value


def read_object(path: Path, *, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in the file ``path``, which may be at most ``limit`` bytes long.

    Raises JsonError, or TensorFileError when it is no readable regular file.
    """
    return parse_object(read_whole(path, limit=limit), where=str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
