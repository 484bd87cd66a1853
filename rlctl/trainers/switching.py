"""When the trainer lends its devices to generation between two steps: a rule on what was measured, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rlctl.experience.buffer import GroupBuffer
from rlctl.schema import Config

# Weight of the newest of several measurements.
_NEWEST = 0.5


@dataclass(frozen=True)
class LendInputs:
    """What is known when a step has ended.

    Attributes:
        wanted: groups that the next local update trains.
        ready: groups that it could take now.
        under_way: responses being made, or waiting to be.
        slots: responses that the rollout side's own replicas decode at once.
        standalone: those replicas.
        hybrids: replicas that can be lent.
        rate: groups a second that the standalone replicas finish; None before that was seen.
        cost: seconds that lending and taking back take, together; None before that was seen.
    """

    wanted: int
    ready: int
    under_way: int
    slots: int
    standalone: int
    hybrids: int
    rate: float | None
    cost: float | None

    def figures(self) -> dict[str, float]:
        """Return the inputs as numbers, for the log; what is not known is left out."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: float(value) for name, value in named.items() if value is not None}


class LendDecision(NamedTuple):
    """Whether to lend, why, and the seconds that are expected to be gained, cost not subtracted."""

    lend: bool
    why: str
    gain: float


def decide(inputs: LendInputs) -> LendDecision:
    """Return whether lending pays.

    The next update waits ``shortfall / rate`` seconds for groups. More replicas share that work when there is more
    under way than the standalone ones decode at once; with ``h`` lent ones beside ``s`` the wait is ``s / (s + h)`` of
    what it was. What that saves must exceed the cost of switching twice. What was never measured is tried.
    """
    shortfall = inputs.wanted - inputs.ready
    if not inputs.hybrids:
        return LendDecision(False, "there is nothing to lend", 0.0)
    if shortfall <= 0:
        return LendDecision(False, "the next update does not wait", 0.0)
    if inputs.under_way <= inputs.slots:
        return LendDecision(False, "the replicas decode all at once that is under way", 0.0)
    if inputs.rate is None or inputs.cost is None:
        return LendDecision(True, "to learn what it costs and brings", 0.0)
    share = inputs.hybrids / (inputs.standalone + inputs.hybrids)
    gain = shortfall / inputs.rate * share if inputs.rate else float("inf")
    if gain > inputs.cost:
        return LendDecision(True, "the wait that it saves is longer than the switch", gain)
    return LendDecision(False, "the switch takes longer than the wait that it saves", gain)


@dataclass
class Measured:
    """What earlier steps took: means in which newer steps count more.

    Attributes:
        rate, cost: see LendInputs.
        alone: whether only the standalone replicas have generated since the last step.
    """

    rate: float | None = None
    cost: float | None = None
    alone: bool = True
    _finished: int = field(default=0, repr=False)
    _lending: float = field(default=0.0, repr=False)

    def begin(self, finished: int) -> None:
        """Measure from here: ``finished`` groups have been already."""
        self._finished = finished

    def generated(self, groups: int, seconds: float) -> None:
        """The standalone replicas finished ``groups`` in ``seconds``."""
        if seconds > 0 and groups > 0:
            self.rate = _mean(self.rate, groups / seconds)

    def trained(self, finished: int, seconds: float) -> None:
        """A step was trained, in ``seconds`` of generation; ``finished`` groups have been since the run was started.
        What the standalone replicas did alone tells how fast they are."""
        groups, self._finished = finished - self._finished, finished
        if self.alone:
            self.generated(groups, seconds)
        self.alone = True

    def lent(self, seconds: float) -> None:
        """Lending took ``seconds``."""
        self._lending, self.alone = seconds, False

    def taken_back(self, seconds: float) -> None:
        """Taking back took ``seconds``."""
        self.cost = _mean(self.cost, self._lending + seconds)

    def state(self) -> dict[str, float | None]:
        """Return what a checkpoint holds."""
        return {"rate": self.rate, "cost": self.cost}

    def load(self, state: dict[str, float | None]) -> None:
        """Go on from an earlier ``state()``."""
        self.rate, self.cost = state["rate"], state["cost"]


def lend_inputs(config: Config, buffer: GroupBuffer, hybrids: int, measured: Measured) -> LendInputs:
    """Return what is known now; ``hybrids`` replicas can be lent."""
    placement = config.placement
    with buffer.changed:
        under_way = sum(group.size - len(group.responses) for group in buffer.unfinished())
        ready = len(buffer.finished())
    return LendInputs(
        wanted=config.trainer.prompts_per_step // (config.trainer.parameter_sync_step or 1),
        ready=ready,
        under_way=under_way,
        slots=placement.replicas * config.rollout.max_slots,
        standalone=placement.replicas,
        hybrids=hybrids,
        rate=measured.rate,
        cost=measured.cost,
    )


def finished_groups(buffer: GroupBuffer) -> int:
    """Return how many groups have been finished, those that were evicted not counted."""
    with buffer.changed:
        return buffer.selected + len(buffer.finished())


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _NEWEST) * before + _NEWEST * newest
