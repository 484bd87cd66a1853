"""What a task is: prompts by number, a held-out set, and a reward for a response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rlctl.errors import UsageError
from rlctl.tasks.numbers import TOLERANCE

Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        index: what ``Task.sample`` was called with; of a held-out prompt, its position among those.
        prompt: the prompt as plain text.
        answer: what the verifier compares with.
        group: label by which an evaluation is broken down ("k=7"), or "".
        messages: the prompt as a chat, when it is more than one user message.
        source: where it stands (``file:line``), for messages to people, or "".
        task: name of its task among those of a mixture, or "".
        token_ids: the prompt as a tokenizer gave it, where that is fixed; ``prompt`` is then not looked at.
    """

    index: int
    prompt: str
    answer: str
    group: str = ""
    messages: list[Message] | None = None
    source: str = ""
    task: str = ""
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Score:
    """What a response earned.

    Attributes:
        index: ``Sample.index`` of the prompt.
        reward: the reward; 0.0 when scoring failed.
        failed: why scoring failed ("timeout", "raised: ...", "died: ...", "not a number: ..."), or None.
        metrics: further numbers about the response, for averages.
        observation: of a conversation that goes on, what the model is told; None ends it.
    """

    index: int
    reward: float
    failed: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    observation: str | None = None


@dataclass(frozen=True)
class TaskOptions:
    """What a user may set about a task; see ``load_task`` for the meaning."""

    verifier: str | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    held_out: float = 0.1
    seed: int = 0
    tolerance: float = TOLERANCE
    step: str | None = None

    def refuse(self, task: str, *names: str) -> None:
        """Raise UsageError if one of the options ``names`` was changed although ``task`` has no use for it."""
        default = TaskOptions()
        changed = [name for name in names if getattr(self, name) != getattr(default, name)]
        if changed:
            listed = ", ".join(f"task.{name}" for name in changed)
            raise UsageError(f"task {task!r} does not use {listed}", where=f"task.{changed[0]}", fix="leave it unset")


class Task(ABC):
    """A source of prompts with a verifiable reward. Everything is deterministic; a task holds no random state.

    Attributes:
        name: how users call it.
        digest: changes when the prompts or answers change; a resumed run compares it.
        verifier: reference (``module:function`` or ``file.py:function``) to code that must not run in this process
            because nobody here vouches for it; ``RewardScorer`` runs it in a child. None: ``score`` may be called
            directly.
        stepper: the same for a function that takes the steps of conversations; None for a task without one.
    """

    name: str
    digest: str
    verifier: str | None = None
    stepper: str | None = None

    @classmethod
    @abstractmethod
    def create(cls, name: str, options: TaskOptions) -> Task:
        """Build the task that a user calls ``name``. Raises UsageError for options that do not apply."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of training prompts; None for an endless task."""

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Return training prompt ``index``: below ``size``, or any 64-bit number for an endless task."""

    @property
    def several_turns(self) -> bool:
        """Whether what the model says may be answered."""
        return self.stepper is not None

    def prompts(self) -> Iterator[Sample]:
        """Yield every training prompt of a finite task; none of an endless one."""
        return (self.sample(index) for index in range(self.size or 0))

    @abstractmethod
    def held_out(self, n: int) -> list[Sample]:
        """Return up to ``n`` prompts that no ``sample`` ever is, the same ones each time."""

    @abstractmethod
    def score(self, sample: Sample, response_text: str) -> float:
        """Return the reward of a response."""

    def metrics(self, sample: Sample, response_text: str) -> dict[str, float]:
        """Return further numbers about a response, for averages."""
        return {}


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt belongs to the held-out set: by a hash of its text, so equal prompts are on one side."""
    bits = int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big")
    return bits < share * 2.0**64
