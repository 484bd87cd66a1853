"""Reading what ``nvidia-smi topo -m`` printed, as people paste it: with or without colours, tabs or spaces, a prompt
before it, ``nvidia-smi -L`` beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rlctl.errors import UsageError
from rlctl.hardware.cpu_list import parse_list
from rlctl.hardware.link_graph import Gpu, Link, MigDevice, Nic, NodeGraph

# Colours and underlines; pasted through a browser they come without their escape character.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Za-z0-9]|\[\d*(?:;\d+)*m")
_GPU = re.compile(r"GPU\d{1,4}")
# A device's name in the head or before a row: letters, then a number somewhere (NIC0, mlx5_0, bnxt_re1, rdmap16s27).
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]*\d[A-Za-z0-9_.:/-]*")
_TITLES = (("CPU", "Affinity"), ("NUMA", "Affinity"), ("GPU", "NUMA", "ID"))
_LEGEND = re.compile(r"\s*([A-Za-z]\w*\d)\s*[:=]\s*([A-Za-z]\S*)\s*")
_LISTED = re.compile(r"\s*GPU (\d{1,4}): (.+?) \(UUID: (GPU-\S+?)\)\s*")
_LISTED_MIG = re.compile(r"\s*MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-\S+?)\)\s*")
#: Characters of the longest text that is looked at.
LONGEST = 1 << 20


class DumpError(UsageError):
    """A dump that cannot be read, with the line and what was expected there."""


@dataclass
class _Head:
    line: int
    devices: list[str]
    titles: list[str]


@dataclass
class _Row:
    line: int
    links: list[Link]
    affinity: dict[str, str]


@dataclass
class _Reading:
    """What has been read so far."""

    name: str
    head: _Head | None = None
    rows: dict[str, _Row] = field(default_factory=dict)
    legend: dict[str, str] = field(default_factory=dict)
    listed: dict[int, tuple[str, str]] = field(default_factory=dict)
    mig: dict[int, list[MigDevice]] = field(default_factory=dict)

    def fail(self, line: int, message: str, expected: str) -> DumpError:
        return DumpError(message, where=f"{self.name}:{line}", fix=f"expected: {expected}")


def parse_topo(text: str, name: str = "dump") -> NodeGraph:
    """Return the node that a dump describes.

    Args:
        text: the dump; ANSI codes, code fences, prompts and blank lines around the table do no harm.
        name: of the file, for messages.

    Raises:
        DumpError: there is no table, it is cut or torn, or its two halves disagree.
    """
    if len(text) > LONGEST:
        raise DumpError(
            f"more than {LONGEST} characters are no topology dump", where=name, fix="give the output of one node"
        )
    reading = _Reading(name)
    for number, line in _lines(text):
        _read(reading, number, line)
    if reading.head is None:
        raise DumpError(
            "no table of devices in it",
            where=name,
            fix="expected: the output of nvidia-smi topo -m, whose head reads GPU0 GPU1 ... CPU Affinity",
        )
    missing = [device for device in reading.head.devices if device not in reading.rows]
    if missing:
        last = max((row.line for row in reading.rows.values()), default=reading.head.line)
        raise reading.fail(
            last, f"the table ends here without {', '.join(missing)}", "a row for each device of the head"
        )
    return _graph(reading)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_ESCAPE.sub("", text).split("\n"), 1):
        plain = re.sub(r"^(> ?)+", "", line.rstrip("\r").lstrip("\ufeff"))  # a quotation
        if plain.strip():
            yield number, plain


def _read(reading: _Reading, number: int, line: str) -> None:
    words = line.split()
    if (listed := _LISTED.fullmatch(line)) is not None:
        reading.listed[int(listed[1])] = (listed[2], listed[3])
    elif (part := _LISTED_MIG.fullmatch(line)) is not None and reading.listed:
        reading.mig.setdefault(max(reading.listed), []).append(MigDevice(part[1], part[2]))
    elif _is_row(reading, words):
        _read_row(reading, number, line)
    elif _is_head(words):
        _read_head(reading, number, words)
    elif reading.rows and (named := _LEGEND.fullmatch(line)) is not None:
        _read_name(reading, number, named[1], named[2])


def _is_row(reading: _Reading, words: list[str]) -> bool:
    if len(words) < 2 or _DEVICE.fullmatch(words[0]) is None:
        return False
    awaited = reading.head is not None and words[0] in reading.head.devices and words[0] not in reading.rows
    return awaited or _is_link(words[1])


def _is_head(words: list[str]) -> bool:
    if _GPU.fullmatch(words[0]) is None:
        return False
    # Not a sentence about a GPU.
    return len(words) == 1 or words[1] in ("CPU", "NUMA", "GPU") or _DEVICE.fullmatch(words[1]) is not None


def _is_link(word: str) -> bool:
    try:
        Link.parse(word)
    except ValueError:
        return False
    return True


def _read_head(reading: _Reading, number: int, words: list[str]) -> None:
    if reading.head is not None:
        raise reading.fail(
            number,
            f"a second head (the first is on line {reading.head.line}), or a row without links",
            "one dump in a file; rlctl topology --merge compares nodes",
        )
    devices, titles, at = [], [], 0
    while at < len(words):
        title = next((t for t in _TITLES if tuple(words[at : at + len(t)]) == t), None)
        if title is not None:
            titles.append(" ".join(title))
            at += len(title)
        elif not titles and _DEVICE.fullmatch(words[at]):
            devices.append(words[at])
            at += 1
        else:
            rest = " ".join(words[at:])
            raise reading.fail(
                number,
                f"the head reads {rest[:60]!r} after {(titles or devices)[-1]}, as if the line was cut or torn",
                "names of devices, then CPU Affinity, NUMA Affinity and GPU NUMA ID or none of them",
            )
    twice = {d for d in devices if devices.count(d) > 1} | {t for t in titles if titles.count(t) > 1}
    if twice:
        raise reading.fail(number, f"the head names {', '.join(sorted(twice))} twice", "each device once")
    reading.head = _Head(number, devices, titles)


def _read_row(reading: _Reading, number: int, line: str) -> None:
    head, label = reading.head, line.split()[0]
    if head is None:
        raise reading.fail(number, f"a row of {label} before any head", "the line GPU0 GPU1 ... CPU Affinity above it")
    if label in reading.rows:
        raise reading.fail(
            number, f"a second row of {label} (the first is on line {reading.rows[label].line})", "one row a device"
        )
    if label not in head.devices:
        raise reading.fail(number, f"a row of {label}, which the head does not name", f"one of {_few(head.devices)}")
    count = len(head.devices)
    cells = _cells(line)
    if len(cells) < count:
        raise reading.fail(
            number, f"{len(cells)} cells for {count} devices", f"a link for each of {_few(head.devices)}"
        )
    links = []
    for device, cell in zip(head.devices, cells, strict=False):
        try:
            links.append(Link.parse(cell))
        except ValueError as error:
            raise reading.fail(number, f"from {label} to {device}: {error}", "a link in each cell") from None
    if links[head.devices.index(label)].kind != "X" or sum(link.kind == "X" for link in links) != 1:
        raise reading.fail(number, f"the X of {label} is not in its own column", "X under the device itself alone")
    reading.rows[label] = _Row(number, links, _affinity(reading, number, cells[count:]))


def _cells(line: str) -> list[str]:
    if "\t" in line:
        cells = [cell.strip() for cell in line.strip().split("\t")]
        # An empty cell keeps its place; runs of spaces inside of one are columns that a terminal had made.
        return [part for cell in cells[1:] for part in (cell.split() or [""])]
    return line.split()[1:]


def _affinity(reading: _Reading, number: int, cells: list[str]) -> dict[str, str]:
    assert reading.head is not None
    titles = reading.head.titles
    while cells and not cells[-1]:
        cells = cells[:-1]
    if len(cells) > len(titles):
        cells = [cell for cell in cells if cell]  # nvidia-smi puts two tabs before GPU NUMA ID
    if len(cells) > len(titles):
        raise reading.fail(
            number,
            f"{len(cells)} values ({_few(cells)}) behind the links, and the head has {len(titles)} titles for them",
            f"values for {' and '.join(titles) or 'nothing'}; a head that lacks titles was cut",
        )
    found = dict(zip(titles, cells, strict=False))
    for title, value in found.items():
        try:
            parse_list(value)
        except ValueError as error:
            raise reading.fail(number, f"{title}: {error}", "a list such as 0-47,96-143, or N/A") from None
    return found


def _read_name(reading: _Reading, number: int, label: str, name: str) -> None:
    assert reading.head is not None
    if label.startswith("NIC") and label not in reading.head.devices:
        raise reading.fail(number, f"the legend names {label}, and the head does not", "the whole table above it")
    if label in reading.legend and reading.legend[label] != name:
        raise reading.fail(number, f"the legend names {label} twice", "each card once")
    if label in reading.head.devices:
        reading.legend[label] = name


def _graph(reading: _Reading) -> NodeGraph:
    head = reading.head
    assert head is not None
    links: dict[tuple[str, str], Link] = {}
    for label, row in reading.rows.items():
        for other, link in zip(head.devices, row.links, strict=True):
            back = links.get((other, label))
            if back is not None and back != link:
                raise reading.fail(
                    row.line,
                    f"{label} to {other} is {link} here and {back} on line {reading.rows[other].line}",
                    "the same link both ways; paste the table whole",
                )
            if label != other:
                links[label, other] = link
    gpus = [_gpu(reading, label) for label in head.devices if _GPU.fullmatch(label)]
    nics = [Nic(label, reading.legend.get(label, label)) for label in head.devices if not _GPU.fullmatch(label)]
    return NodeGraph(tuple(gpus), tuple(nics), links)


def _gpu(reading: _Reading, label: str) -> Gpu:
    affinity = reading.rows[label].affinity
    gpu = Gpu(
        label,
        cpus=parse_list(affinity.get("CPU Affinity", "")),
        numa=parse_list(affinity.get("NUMA Affinity", "")),
        own_numa=parse_list(affinity.get("GPU NUMA ID", "")),
    )
    index = int(label.removeprefix("GPU"))
    if index not in reading.listed:
        return gpu
    name, uuid = reading.listed[index]
    mig = tuple(reading.mig.get(index, ()))
    return replace(gpu, name=name, uuid=uuid, mig=mig, mig_mode=bool(mig))


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
