"""What one call of ``rlctl topology`` looks at, put together."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from rlctl.errors import UsageError
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.rules.outcome import Outcome
from rlctl.hardware.survey import Survey
from rlctl.hardware.visible_devices import seen_graph
from rlctl.ops.environment_report import EnvironmentReport, environment_report
from rlctl.ops.topology_checks import Surroundings, run_checks, surroundings_here
from rlctl.ops.topology_plan import TopologyPlan
from rlctl.ops.topology_sources import here, read_dump, read_request, require_devices, topology_document
from rlctl.ops.topology_summary import PlanSummary, summarise


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        dump: a file with a dump, "-", or None for this machine.
        profile, model, backend, overrides: a run to lay out.
        check: whether the rules run; ``child``: the value that a child is given, to be checked too.
        require_gpus: whether GPUs must be here.
        environment: whether versions, limits and variables are wanted too.
    """

    dump: str | None = None
    profile: str | None = None
    model: str | None = None
    backend: str | None = None
    overrides: tuple[str, ...] = ()
    check: bool = False
    child: str | None = None
    require_gpus: bool = False
    environment: bool = False


@dataclass(frozen=True)
class View:
    """What was found.

    Attributes:
        source: where the node comes from.
        graph: the node; None when only a profile is looked at and this machine has no GPU.
        machine: this machine, when it is what was asked for.
        plan: of a profile; None without one, or when it cannot be laid out and the checks say why.
        checks: outcomes of the rules.
        notes: what is to be said.
        environment: versions, limits and variables, when they were asked for.
    """

    source: str
    graph: NodeGraph | None
    machine: Survey | None
    plan: TopologyPlan | None
    checks: list[Outcome]
    notes: tuple[str, ...] = ()
    environment: EnvironmentReport | None = None

    def summary(self) -> PlanSummary:
        """Return the plan in few lines."""
        assert self.plan is not None
        return summarise(self.plan)

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        machine = {"machine": self.machine.document()} if self.machine is not None else {}
        environment = {"environment": self.environment.document()} if self.environment is not None else {}
        document = {**topology_document(self.source, self.graph, self.plan, self.checks), **machine, **environment}
        if self.machine is not None and self.machine.machine.kind == "npu":
            document["devices"] = [{"label": f"NPU{d.index}", **asdict(d)} for d in self.machine.machine.devices]
        return document


def look(asked: Asked) -> View:
    """Look at what was asked for.

    Raises:
        UsageError: a dump, a profile or a model that cannot be used.
        UnavailableError: GPUs were asked for and there are none.
    """
    dump = read_dump(asked.dump) if asked.dump is not None else None
    survey = here() if dump is None or asked.require_gpus else None
    if asked.require_gpus:
        assert survey is not None
        require_devices(survey)
    graph = dump if dump is not None or survey is None else survey.graph
    request = None
    if asked.profile is not None:
        request = read_request(asked.profile, model=asked.model, backend=asked.backend, overrides=asked.overrides)
    checks: list[Outcome] = []
    if asked.check:
        around = Surroundings(dump) if dump is not None else _here(survey)
        resolution, model = (request.resolution, request.model) if request is not None else (None, None)
        checks = run_checks(around, resolution, model, child=asked.child)
    plan = None
    if request is not None:
        try:
            seen = graph if survey is None or dump is not None else seen_graph(survey.graph, _visible())
            plan = request.plan(seen)
        except UsageError:
            # A layout that cannot be is one of the checks; without them it is the answer.
            if not any(outcome.status == "fail" for outcome in checks):
                raise
    whole = request is None or asked.check or asked.environment
    shown = survey if asked.dump is None and whole else None
    source = asked.dump or ("this machine" if shown is not None else "the profile")
    notes = request.notes if request is not None else ()
    environment = environment_report() if asked.environment else None
    there = graph if graph is not None and graph.labels else None
    return View(source, there, shown, plan, checks, notes, environment)


def _visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _here(survey: Survey | None) -> Surroundings:
    assert survey is not None
    addressed = tuple(interface.name for interface in survey.interfaces if interface.addresses)
    return surroundings_here(survey.graph, addressed, survey.machine)
