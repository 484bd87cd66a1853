"""What a run that came to its end leaves beside its records: the digests of its other files.

``records/SHA256SUMS`` names them from the run folder, where ``sha256sum -c records/SHA256SUMS`` checks them too. Logs,
pictures and what trackers keep are not among them; ``config.json`` is held against the records themselves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rlctl.experience.records.manifest import END, FINAL, PINS, RECORDS, SUMS
from rlctl.experience.records.writing import replace

_FILES = ("env.json", "metrics.jsonl", "result.json", f"{RECORDS}/{PINS}", f"{RECORDS}/{END}")
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def seal(run: Path) -> None:
    """Note the digests of what the run in folder ``run`` ends with. Raises OSError."""
    files = [run / name for name in _FILES if (run / name).is_file()]
    files += sorted(path for path in (run / FINAL).rglob("*") if path.is_file())
    lines = [f"{_sha256(path)}  {path.relative_to(run).as_posix()}\n" for path in files]
    replace(run / RECORDS / SUMS, "".join(lines).encode())


def unseal(run: Path) -> None:
    """The run goes on: its files change. Raises OSError."""
    (run / RECORDS / SUMS).unlink(missing_ok=True)


def broken_seals(run: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that is not what it was at the run's end, and how; nothing where the run did not come to one.

    A ``final`` folder that was removed as a whole is no fault.
    """
    sums = run / RECORDS / SUMS
    if not sums.is_file():
        return
    whole = (run / FINAL).is_dir()
    *lines, rest = sums.read_bytes().decode(errors="replace").split("\n")  # \v and its like end no line
    if rest:
        yield sums, "its last line is cut"
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        name = None if match is None else PurePosixPath(match[2])
        if match is None or name is None or name.is_absolute() or ".." in name.parts:
            yield sums, f"line {number} names no file of the run and its digest"
            continue
        path = run / name
        if not path.is_file():
            if whole or name.parts[0] != FINAL:
                yield path, f"it is named in {RECORDS}/{SUMS} and is gone"
        elif _sha256(path) != match[1]:
            yield path, f"its bytes are not those that {RECORDS}/{SUMS} names"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
