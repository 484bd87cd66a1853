"""Where ``rlctl topology`` takes its things from: this machine, a saved dump, a profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import UnavailableError, UsageError
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.rules.outcome import Outcome
from rlctl.hardware.survey import Survey, survey
from rlctl.hardware.topo_dump import LONGEST, parse_topo
from rlctl.ops.planned_model import PlannedModel, planned_model
from rlctl.ops.profile_choice import AUTO, choose_profile
from rlctl.ops.resolve import Resolution, resolve
from rlctl.ops.topology_plan import TopologyPlan, plan_topology
from rlctl.schema import Config

_CODES = {"float32": "F32", "bfloat16": "BF16"}


def here() -> Survey:
    """Return what this machine has."""
    return survey()


def read_dump(source: str) -> NodeGraph:
    """Return the node of a dump: a file, or ``-`` for stdin.

    Raises:
        UsageError: it cannot be read, or is no dump.
    """
    if source == "-":
        return parse_topo(sys.stdin.buffer.read(LONGEST + 1).decode("utf-8", "replace"), "stdin")
    path = Path(source)
    if not path.exists() or path.is_dir():
        what = "a folder, not a dump" if path.is_dir() else "no such file"
        raise UsageError(what, where=source, fix="save one with: nvidia-smi topo -m > topo.txt")
    with path.open("rb") as file:  # a pipe as well: --from <(ssh node17 nvidia-smi topo -m)
        return parse_topo(file.read(LONGEST + 1).decode("utf-8", "replace"), source)


def require_devices(found: Survey) -> None:
    """Raise UnavailableError when the machine shows no device to train on."""
    if found.graph.gpus or found.machine.devices:
        return
    raise UnavailableError(
        f"no GPU or NPU here: {'; '.join(found.graph.notes) or 'the driver shows none'}",
        where="--require-gpus",
        fix="run it on a node that has some, or read a dump of one with --from",
    )


@dataclass(frozen=True)
class Request:
    """A profile that was asked for.

    Attributes:
        profile: its name.
        resolution: its configuration, with keys and backend of the command line.
        model: what is sent; None when the profile's own model is not known here.
        notes: what is to be said about it.
    """

    profile: str
    resolution: Resolution
    model: PlannedModel | None
    notes: tuple[str, ...]

    def plan(self, graph: NodeGraph | None = None) -> TopologyPlan:
        """Return the plan, on a node as it is if one is given that has as many GPUs as the profile wants."""
        config = self.resolution.config
        fits = graph is not None and len(graph.gpus) >= config.cluster.devices_per_node
        return plan_topology(self.profile, config, self.model, graph if fits else None)


def read_request(
    profile: str, *, model: str | None = None, backend: str | None = None, overrides: Sequence[str] = ()
) -> Request:
    """Load a profile and find the model.

    A model that the profile names and nobody knows here leaves the flows out; one that was asked for must be known.

    Raises:
        UsageError: profile, keys or model cannot be used.
    """
    notes = []
    if profile == AUTO:
        choice = choose_profile()
        profile = choice.name
        notes.append(f"profile {profile}: {choice.why}")
    resolution = resolve(profile, overrides=overrides, flags={"--backend": backend})
    found = _model(resolution.config, model, notes)
    return Request(profile, resolution, found, tuple(notes))


def _model(config: Config, asked: str | None, notes: list[str]) -> PlannedModel | None:
    code = _CODES[config.model.dtype]
    if asked is not None:
        return planned_model(asked, code)
    try:
        return planned_model(config.model.path, code, where="model.path")
    except UsageError as error:
        notes.append(f"{error.message}; no weights are planned, give --model")
        return None


def topology_document(
    source: str,
    graph: NodeGraph | None = None,
    plan: TopologyPlan | None = None,
    checks: Sequence[Outcome] = (),
) -> dict[str, Any]:
    """Return what is known as plain data; every list is there, if only empty."""
    empty: dict[str, Any] = {name: [] for name in ("devices", "nics", "links", "placement", "flows")}
    return {
        "source": source,
        **empty,
        **(graph.document() if graph is not None else {}),
        **(plan.document() if plan is not None else {}),
        "checks": [asdict(outcome) for outcome in checks],
    }
