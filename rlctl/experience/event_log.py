"""Writing and reading ``events.jsonl``: append only, one event a line."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from rlctl.experience.events import AnyEvent, Event, RunStarted

Listener = Callable[[Event], None]

MOST_LINE = 64 << 20
"""Bytes of a line that is read; the longest that a run writes are far below."""

_decoder = msgspec.json.Decoder(AnyEvent)

# Bytes of lines that wait to be written and counted into the digest in one go.
_HELD = 1 << 16


class EventLog:
    """The one place where events go.

    Args:
        path: file to append to; None keeps events for the listeners only.
        attempt: number stamped on every event.
        clock: seconds since the epoch.

    Any thread may emit: the numbers, the lines and what listeners hear have one order. A listener must not wait for
    another thread that emits.

    Lines reach the disk on ``flush`` (the trainer calls it at every step and before a checkpoint is published) and on
    ``close``.
    """

    def __init__(self, path: Path | None, *, attempt: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._attempt = attempt
        self._clock = clock
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()  # a listener may emit
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = None
        self._lines = bytearray()
        self._digest = hashlib.sha256()
        self.next_seq = 0
        if path is not None:
            self.next_seq = _close_last_line(path)
            self._file = path.open("ab")
        self._cut = self.next_seq

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with every later event."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Stamp, write and pass on one event."""
        with self._lock:
            event.seq, event.time, event.attempt = self.next_seq, self._clock(), self._attempt
            self.next_seq += 1
            if self._file is not None:
                self._encoder.encode_into(event, self._lines, -1)
                self._lines += b"\n"
                if len(self._lines) >= _HELD:
                    self._pass_on(self._file)
            for listener in self._listeners:
                listener(event)

    def cut(self) -> tuple[int, int, str]:
        """Return the numbers of the first and the last event since the cut before, or since this attempt began, and the
        SHA-256 of their lines, which have reached the operating system; a range without any has a last number below
        its first."""
        with self._lock:
            self.flush()
            found = (self._cut, self.next_seq - 1, self._digest.hexdigest())
            self._cut, self._digest = self.next_seq, hashlib.sha256()
            return found

    def flush(self) -> None:
        """Hand every line to the operating system."""
        with self._lock:
            if self._file is not None:
                self._pass_on(self._file)
                self._file.flush()

    def close(self) -> None:
        """Flush and close; later events reach listeners only."""
        with self._lock:
            if (file := self._file) is not None:
                self._file = None
                with file:
                    self._pass_on(file)

    def _pass_on(self, file: BinaryIO) -> None:
        lines, self._lines = self._lines, bytearray()
        self._digest.update(lines)
        file.write(lines)


def _close_last_line(path: Path) -> int:
    """Return the number of lines, ending a line that a killed process left open."""
    if not path.exists():
        return 0
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    if last != b"\n":
        with path.open("ab") as file:
            file.write(b"\n")
        count += 1
    return count


@dataclass
class EventFile:
    """What ``read_events`` found.

    Attributes:
        events: all that could be read, in file order.
        faults: line number (from 1) and reason of each line that could not.
        cut: whether the last of the faults is that of a last line without an end.
    """

    events: list[Event] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    cut: bool = False


def read_events(path: Path) -> EventFile:
    """Read an event file; a line that is cut or foreign is reported by number and the rest is used."""
    found = EventFile()
    with path.open("rb") as file:
        for number in itertools.count(1):
            if not (line := file.readline(MOST_LINE + 1)):
                break
            if len(line) > MOST_LINE:
                found.faults.append((number, f"longer than {MOST_LINE} bytes; nothing behind it was read"))
                break
            try:
                found.events.append(_decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                found.faults.append((number, str(error)))
                found.cut = not line.endswith(b"\n")
    return found


def lineage(events: list[Event]) -> Iterator[Event]:
    """Yield the events that led to the final parameters, leaving out work that a later attempt did again."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted) and event.from_seq >= 0:
            kept = [e for e in kept if e.seq <= event.from_seq]
        elif isinstance(event, RunStarted):
            kept = []
        kept.append(event)
    yield from kept
