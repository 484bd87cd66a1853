"""CUDA_VISIBLE_DEVICES as the CUDA runtime and PyTorch read it, and what a child process must be given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlctl.hardware.link_graph import Gpu, NodeGraph

_NUMBER = re.compile(r"[+-]?[0-9]*")
Entry = int | str


@dataclass(frozen=True)
class Visible:
    """What a value lets a process see.

    Attributes:
        entries: indices, or unique ids (possibly shortened) of GPUs or MIG devices; None shows every device.
        notes: what is odd about the value, as (message, whether devices are lost by it).
    """

    entries: tuple[Entry, ...] | None
    notes: tuple[tuple[str, bool], ...] = ()

    @property
    def mig(self) -> bool:
        """Whether it names MIG devices."""
        return bool(self.entries) and str((self.entries or ("",))[0]).startswith("MIG-")


def parse_visible(text: str | None) -> Visible:
    """Read a value; None when the variable is not set.

    A value that begins with ``GPU-`` or ``MIG-`` is a list of such ids, any other one of numbers, of each entry as much
    as is a number. The first entry that is neither ends the list; an entry that comes twice empties it.
    """
    if text is None:
        return Visible(None)
    if not text.strip():
        return Visible((), (("it is empty, which hides every device", True),))
    prefix = next((p for p in ("GPU-", "MIG-") if text.startswith(p)), None)
    return _ids(text, prefix) if prefix else _numbers(text)


def _ids(text: str, prefix: str) -> Visible:
    found: list[Entry] = []
    parts = text.split(",")
    for part in parts:
        if part in found:
            return Visible((), ((f"{part} comes twice, which hides every device", True),))
        if not part.startswith(prefix):
            return Visible(tuple(found), (_ends(part, parts, found, f"no {prefix}... id"),))
        found.append(part)
    odd = [
        (f"{part!r} holds a space, which is taken for a part of the id", True) for part in parts if part.strip() != part
    ]
    return Visible(tuple(found), tuple(odd))


_DIGITS = 4000


def _numbers(text: str) -> Visible:
    found: list[Entry] = []
    notes: list[tuple[str, bool]] = []
    parts = text.split(",")
    for part in parts:
        word = part.strip()
        match = _NUMBER.match(word)
        # Python refuses to read more digits; no device has such a number.
        number = int(match[0][:_DIGITS]) if match is not None and match[0] not in ("", "+", "-") else -1
        if number in found:
            return Visible((), ((f"{number} comes twice, which hides every device", True),))
        if number < 0:
            notes.append(_ends(part, parts, found, "no number of a device"))
            break
        if match is not None and match[0] != word:
            lost = re.match(r"\s*[-;:|/ ]\s*[0-9]", word[match.end() :]) is not None
            more = "; lists are written with commas, without ranges" if lost else ""
            notes.append((f"{word!r} is read as {number}{more}", lost))
        found.append(number)
    return Visible(tuple(found), tuple(notes))


def _ends(part: str, parts: Sequence[str], found: Sequence[Entry], what: str) -> tuple[str, bool]:
    left = len(parts) - len(found)
    return f"{part.strip()[:40]!r} is {what}: it and what is behind it ({left} of {len(parts)} entries) is hidden", True


def resolve_visible(visible: Visible, gpus: Sequence[Gpu]) -> list[str]:
    """Return the unique ids (labels where a GPU has none) of the devices that are seen, in order.

    The first entry that names no device, or more than one, ends the list; one device named twice empties it.
    """
    known = [gpu.uuid or gpu.label for gpu in gpus]
    parts = [part.uuid for gpu in gpus for part in gpu.mig]
    if visible.entries is None:
        return known
    found: list[str] = []
    for entry in visible.entries:
        if isinstance(entry, int):
            hits = known[entry : entry + 1]
        else:
            hits = [name for name in (parts if entry.startswith("MIG-") else known) if name.startswith(entry)]
            hits = hits or _old_mig(entry, gpus)
        if len(hits) != 1:
            break
        if hits[0] in found:
            return []
        found.append(hits[0])
    return found


def seen_graph(graph: NodeGraph, text: str | None) -> NodeGraph:
    """Return a node as a process sees it: its GPUs in the order of the value, those that it hides left out.

    A value that shows none of them, or MIG devices, leaves the node as it is: its own rule speaks of that.
    """
    by_id = {gpu.uuid or gpu.label: gpu for gpu in graph.gpus}
    seen = [by_id[name] for name in resolve_visible(parse_visible(text), graph.gpus) if name in by_id]
    return replace(graph, gpus=tuple(seen)) if seen else graph


def _old_mig(entry: str, gpus: Sequence[Gpu]) -> list[str]:
    """Return the device of the form of drivers before 470: ``MIG-GPU-<id>/<instance>/<compute instance>``."""
    match = re.fullmatch(r"MIG-(GPU-[^/]+)/(\d{1,3})/(\d{1,3})", entry)
    owners = [gpu for gpu in gpus if match is not None and gpu.uuid is not None and gpu.uuid.startswith(match[1])]
    return [entry] if len(owners) == 1 else []


def child_value(parent: str | None, local_ids: Sequence[int]) -> str | None:
    """Return what a child must be given so that it sees the parent's devices with these local numbers.

    The variable always counts the node's devices: local number i is entry i of the parent's list. None when the parent
    does not see so many.
    """
    entries = parse_visible(parent).entries
    if entries is None:
        return ",".join(map(str, local_ids))
    if not all(0 <= i < len(entries) for i in local_ids):
        return None
    return ",".join(str(entries[i]) for i in local_ids)
