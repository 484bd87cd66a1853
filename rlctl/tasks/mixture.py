"""Several tasks in one run, each with its share of the prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.tasks.base import Sample, Task, TaskOptions
from rlctl.tasks.counter import draw
from rlctl.tasks.cursor import PromptCursor


@dataclass(frozen=True)
class Member:
    """One task of a mixture.

    Attributes:
        task: the task.
        weight: its share of the prompts, relative to the others'; above 0.
    """

    task: Task
    weight: float


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return weights in the same ratio as whole numbers; 0.1 is a tenth, not the nearest binary fraction."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(part.denominator for part in exact))
    return [int(part * scale) for part in exact]


def place(ordinal: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return which member gives the prompt at position ``ordinal`` of the run, and how many it gave before.

    It depends on the position alone. Wherever every member's share of the prompts so far is a whole number, the counts
    are these shares; nowhere are they off by as much as the number of members. Cut off one member after another, each
    by rounding up its share of what the ones before it left.
    """
    rest = sum(weights)
    for number, weight in enumerate(weights):
        before = -(-ordinal * weight // rest)
        if -(-(ordinal + 1) * weight // rest) > before:
            return number, before
        ordinal, rest = ordinal - before, rest - weight
    raise AssertionError("the last member takes all that is left")


class MixtureTask(Task):
    """Prompts of several tasks. It has no end: a finite member is gone through again and again, in a new order each
    time. Index i stands for index ``i // n`` of member ``i % n``.

    Args:
        members: at least one; names are told apart.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = dict(zip(labels(members), members, strict=True))
        self.name = " + ".join(self.members)
        self.weights = whole_weights([member.weight for member in members])
        parts = [(label, member.task.digest) for label, member in self.members.items()]
        self.digest = blake2b(repr((parts, self.weights)).encode(), digest_size=16).hexdigest()
        self._labels = list(self.members)

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> MixtureTask:  # noqa: ARG003
        """Not made by name. Raises UsageError."""
        raise UsageError(f"{name} is no task", where="task.name", fix="list the members under task.mixture")

    @property
    def size(self) -> None:
        """It has no end."""
        return None

    @property
    def several_turns(self) -> bool:
        return any(member.task.several_turns for member in self.members.values())

    def sample(self, index: int) -> Sample:
        inner, number = divmod(index, len(self.members))
        return self.marked(number, self.members[self._labels[number]].task.sample(inner))

    def marked(self, number: int, sample: Sample) -> Sample:
        """Return a sample of member ``number`` as one of the mixture."""
        return replace(sample, index=sample.index * len(self.members) + number, task=self._labels[number])

    def prompts(self) -> Iterator[Sample]:
        for number, member in enumerate(self.members.values()):
            for sample in member.task.prompts():
                yield self.marked(number, sample)

    def held_out(self, n: int) -> list[Sample]:
        """Return up to ``n`` held-out prompts, shared by weight, one of each member at least where ``n`` allows it."""
        least = 1 if n >= len(self.members) else 0
        counts = [least] * len(self.members)
        for ordinal in range(n - least * len(self.members)):
            counts[place(ordinal, self.weights)[0]] += 1
        return [
            self.marked(number, sample)
            for number, member in enumerate(self.members.values())
            for sample in member.task.held_out(counts[number])
        ]

    def score(self, sample: Sample, response_text: str) -> float:
        return self.members[sample.task].task.score(sample, response_text)

    def metrics(self, sample: Sample, response_text: str) -> dict[str, float]:
        return self.members[sample.task].task.metrics(sample, response_text)

    def each(self, change: Callable[[Task], Task]) -> MixtureTask:
        """Return the mixture of the changed members."""
        return MixtureTask([replace(member, task=change(member.task)) for member in self.members.values()])


class MixtureCursor(PromptCursor):
    """Hands out a mixture's prompts: whose turn it is depends on the position, the prompt on how many the member gave
    before, in the order that it would have in a run of its own with a seed of its own."""

    def __init__(self, task: MixtureTask, seed: int, epochs: int | None = None) -> None:
        super().__init__(task, seed, epochs)
        self._mixture = task
        self._cursors = [
            PromptCursor(member.task, draw(seed, number) >> 11) for number, member in enumerate(task.members.values())
        ]

    def at(self, ordinal: int) -> Sample:
        number, position = place(ordinal, self._mixture.weights)
        return self._mixture.marked(number, self._cursors[number].at(position))


def cursor_for(task: Task, seed: int, epochs: int | None = None) -> PromptCursor:
    """Return the cursor of any task; see ``PromptCursor``."""
    return MixtureCursor(task, seed, epochs) if isinstance(task, MixtureTask) else PromptCursor(task, seed, epochs)


def labels(members: Sequence[Member]) -> list[str]:
    """Return what members are called in metrics: their names, of files the part before the suffix if that is enough."""
    names = [member.task.name for member in members]
    short = [Path(name).stem if ":" not in name else name for name in names]
    return [stem if short.count(stem) == 1 else name for stem, name in zip(short, names, strict=True)]


def task_of(task: Task, sample: Sample) -> Task:
    """Return the task that a sample comes from."""
    members: Mapping[str, Member] = task.members if isinstance(task, MixtureTask) else {}
    return members[sample.task].task if sample.task else task
