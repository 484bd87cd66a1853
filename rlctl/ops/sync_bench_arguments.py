"""The words of a sync bench's command line, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.units import format_bytes, parse_bytes, parse_duration

_MOST_SIZES = 24
_LEAST_BUCKET = 4 << 10  # smaller ones measure messages, for minutes
_DEFAULT_BEGIN, _DEFAULT_FACTOR = "1MiB", 4.0


def size_of(text: str, where: str) -> int:
    """Return bytes, at least one."""
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where) from error
    if found < 1:
        raise UsageError("must be above 0", where=where)
    return found


def share_of(text: str) -> float:
    """Return the share that ``2%`` or ``0.02`` is."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a share; write 2% or 0.02", where="--change") from error
    if not 0 < share <= 1:
        raise UsageError(f"{text!r} is not above 0 and at most 1", where="--change")
    return share


def seconds_of(text: str, where: str) -> float:
    """Return seconds, above 0."""
    try:
        found = parse_duration(text)
    except ValueError as error:
        raise UsageError(str(error), where=where) from error
    if found <= 0:
        raise UsageError("must be above 0", where=where)
    return found


def ratio_of(value: float | None) -> float | None:
    """Return the ratio of --fail-below."""
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{value:g} is no ratio; write 0.8", where="--fail-below")
    return value


def engine_options(given: Sequence[str], backends: Sequence[str]) -> dict[str, dict[str, str | int]]:
    """Return backend -> its options, of ``BACKEND.NAME=VALUE``; whole numbers are numbers."""
    found = dict[str, dict[str, str | int]]()
    for text in given:
        key, equals, value = text.partition("=")
        backend, _, name = key.partition(".")
        if not (equals and backend and name and value):
            raise UsageError(
                f"{text!r} is not BACKEND.NAME=VALUE", where="--option", fix="such as mooncake.protocol=rdma"
            )
        if backend not in backends and "all" not in backends:
            raise UsageError(
                f"an option of {backend}, which is not measured", where="--option", fix="name it by --backend"
            )
        if not _is_text(text):
            raise UsageError(f"{text!r} is not text in the locale's encoding", where="--option", fix="LC_ALL=C.UTF-8")
        if name == "folder" and not Path(value).is_dir():
            raise UsageError(f"there is no folder {value}", where="--option")
        found.setdefault(backend, {})[name] = int(value) if value.isascii() and value.isdigit() else value
    return found


def _is_text(word: str) -> bool:
    """Whether a word of the command line was decoded without a remainder: lone surrogates stand for odd bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def bucket_sizes(listed: str | None, begin: str | None, end: str | None, factor: float | None) -> list[int]:
    """Return the sizes of buckets to measure: those listed, or begin, begin x factor, ... up to end."""
    if begin is None and end is None and factor is None:
        return list(dict.fromkeys(_bucket(part, "--bucket") for part in (listed or "64MiB").split(",")))
    if listed is not None:
        raise UsageError("--bucket lists sizes, and -b, -e, -f make them: take one of both", where="--bucket")
    if end is None:
        raise UsageError("a sweep needs its end", where="-e", fix="such as -b 1MiB -e 256MiB -f 4")
    step = _DEFAULT_FACTOR if factor is None else factor
    if not 1 < step < math.inf:
        raise UsageError(f"{step:g} must be above 1", where="-f")
    size, last = _bucket(begin or _DEFAULT_BEGIN, "-b"), size_of(end, "-e")
    if size > last:
        raise UsageError(f"it begins at {format_bytes(size)} and ends at {format_bytes(last)}", where="-b")
    sizes = [size]
    while (size := max(round(size * step), size + 1)) <= last:
        sizes.append(size)
        if len(sizes) > _MOST_SIZES:
            raise UsageError(f"more than {_MOST_SIZES} sizes of a bucket", where="-f", fix="a larger factor")
    return sizes


def _bucket(text: str, where: str) -> int:
    found = size_of(text, where)
    if found < _LEAST_BUCKET:
        raise UsageError(f"a bucket of {found} bytes is too small", where=where, fix="at least 4KiB")
    return found


def require_file(path: Path | None, where: str) -> None:
    """Raise UsageError when there is no file at ``path``."""
    if path is not None and not path.is_file():
        raise UsageError(f"{path} is {'a folder' if path.is_dir() else 'not there'}", where=where)
