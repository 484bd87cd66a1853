"""How nodes differ, from what ``rlctl topology --json`` said on each of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.hardware.rules.name_filter import NameFilter, default_interfaces
from rlctl.hardware.rules.network import CARDS, SOCKETS
from rlctl.keys.json_file import read_object

_ABSENT = "-"


@dataclass(frozen=True)
class Variant:
    """One value and the nodes that have it."""

    value: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on every node, the most common value first."""

    what: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Merge:
    """The nodes, how many things were compared, and what differs."""

    nodes: tuple[str, ...]
    compared: int
    differences: tuple[Difference, ...]

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def merge(files: Sequence[str]) -> Merge:
    """Compare the documents in ``files``.

    Raises:
        UsageError: fewer than two of them, one that cannot be read, or that is no such document.
    """
    if len(files) < 2:
        fix = "save one on each node: rlctl topology --env --json > $(hostname).json"
        raise UsageError("--merge needs the documents of two nodes or more", where="--merge", fix=fix)
    documents = [_read(file) for file in files]
    hosts = [str(document.get("host", file)) for document, file in zip(documents, files, strict=True)]
    names = hosts if len(set(hosts)) == len(hosts) else [Path(file).name for file in files]
    names = names if len(set(names)) == len(names) else list(files)
    facts = [facts_of(document) for document in documents]
    found = []
    whats = list(dict.fromkeys(what for one in facts for what in one))
    for what in whats:
        holders: dict[str, list[str]] = {}
        for name, one in zip(names, facts, strict=True):
            holders.setdefault(one.get(what, _ABSENT), []).append(name)
        if len(holders) > 1:
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            found.append(Difference(what, tuple(Variant(value, tuple(nodes)) for value, nodes in ordered)))
    return Merge(tuple(names), len(whats), tuple(found))


def _read(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise UsageError("no such file", where=file, fix="save one with: rlctl topology --env --json > node.json")
    document = read_object(Path(file))
    if document.get("schema") != "rlctl.topology/1" or not isinstance(document.get("devices"), list):
        raise UsageError(
            "this is not what rlctl topology --json printed", where=file, fix="rlctl topology --env --json"
        )
    return document


def facts_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return what of a document should be the same on every node, as text by name.

    Ids, addresses and what changes from minute to minute are left out.
    """
    machine, environment = _object(document, "machine"), _object(document, "environment")
    found: dict[str, str] = {}
    for name in ("cores", "memory", "kind", "architecture", "kernel", "driver", "cuda"):
        if name in machine:
            found[name] = _text(machine[name])
    for node in _objects(machine, "numa"):
        found[f"NUMA node {node.get('index')}"] = f"cpus {node.get('cpus')}, {node.get('memory')} bytes"
    kinds = Counter(f"{d.get('name')} ({d.get('memory')} bytes)" for d in _objects(document, "devices"))
    found["GPUs"] = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none"
    for device in _objects(document, "devices"):
        mig = [str(part.get("profile")) for part in _objects(device, "mig")]
        found[f"{device.get('label')} affinity"] = f"cpus {device.get('cpus')}, NUMA {_text(device.get('numa'))}"
        if mig or device.get("mig_mode"):
            found[f"{device.get('label')} MIG"] = ", ".join(mig) or "on, no devices"
    for nic in _objects(document, "nics"):
        kind = _word(nic.get("rdma"), "RDMA", "Ethernet", "card")
        state = _word(nic.get("up"), "up", "down", "state unknown")
        speed, numa = _text(nic.get("gbit_s")), _text(nic.get("numa"))
        found[f"card {nic.get('name')}"] = f"{kind}, {speed} Gbit/s, NUMA {numa}, {state}"
    for link in _objects(document, "links"):
        found[f"link {link.get('a')} - {link.get('b')}"] = _text(link.get("type"))
    found |= _environment(environment)
    found |= _chosen(document, machine, environment)
    return found


def _environment(environment: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text(environment[name]) for name in ("python", "system") if name in environment}
    for section, title in (("packages", "package"), ("variables", "variable"), ("nccl_conf", "nccl.conf")):
        found |= {f"{title} {name}": _text(value) for name, value in _object(environment, section).items()}
    host = _object(environment, "host")
    found |= {f"library {name}": _text(there) for name, there in _object(host, "libraries").items()}
    found |= {name: _text(value) for name, value in host.items() if name != "libraries"}
    return found


def _chosen(document: Mapping[str, Any], machine: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """Return which interfaces and cards NCCL's variables choose: the same words may choose others elsewhere."""
    if not environment:
        return {}
    variables = {**_object(environment, "nccl_conf"), **_object(environment, "variables")}
    names = [str(i.get("name")) for i in _objects(machine, "interfaces") if i.get("addresses")]
    sockets = NameFilter.parse(str(variables.get(SOCKETS, "")))
    taken = sockets.choose(names) if sockets is not None else default_interfaces(names)
    found = {"interfaces that NCCL takes": ", ".join(taken) or "none"}
    cards = [str(nic.get("name")) for nic in _objects(document, "nics") if nic.get("rdma")]
    hcas = NameFilter.parse(str(variables.get(CARDS, "")))
    if cards:
        found["cards that NCCL takes"] = ", ".join(hcas.choose(cards) if hcas is not None else cards) or "none"
    return found


def _object(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def _objects(holder: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = holder.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _word(value: Any, yes: str, no: str, unknown: str) -> str:
    return yes if value is True else no if value is False else unknown


def _text(value: Any) -> str:
    if value is None:
        return _ABSENT
    return value if isinstance(value, str) else json.dumps(value)
