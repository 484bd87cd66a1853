"""Responses that were made before, by group, and the faults that keep them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.experience.segments import FinishReason, Segment

NAME = "recorded"
WHERE = "rollout.engine"
SHOWN = 20


@dataclass(frozen=True)
class Trajectory:
    """One response, whole: all turns and the observations between them.

    Attributes:
        segments: its tokens, in order.
        reward: what it earned.
        finish_reason: why it ended.
        observations: what lies between its turns, as text.
        place: where it stands, for messages to people.
    """

    segments: Sequence[Segment]
    reward: float
    finish_reason: FinishReason = "stop"
    observations: Sequence[str] = ()
    place: str = ""

    @property
    def token_ids(self) -> list[int]:
        """All ids, in order."""
        return [token for segment in self.segments for token in segment.token_ids]


@dataclass
class Group:
    """The responses of one prompt."""

    prompt_ids: list[int]
    trajectories: list[Trajectory] = field(default_factory=list)
    label: str = ""
    task: str = ""
    place: str = ""


@dataclass(frozen=True)
class Limits:
    """What a run can take.

    Attributes:
        vocab_size: of the model.
        samples: responses of a prompt.
        max_prompt_tokens, max_new_tokens: longest prompt and response.
    """

    vocab_size: int
    samples: int
    max_prompt_tokens: int
    max_new_tokens: int


def faults_of(groups: Sequence[Group], limits: Limits) -> Iterator[Finding]:
    """Yield what keeps whole groups from being trained in a run."""
    for group in groups:
        if not group.prompt_ids:
            yield Finding("the prompt has no tokens", group.place)
        if len(group.prompt_ids) > limits.max_prompt_tokens:
            yield Finding(
                f"the prompt has {len(group.prompt_ids)} tokens, over task.max_prompt_tokens="
                f"{limits.max_prompt_tokens}",
                group.place,
                "raise it, or leave the group out",
            )
        yield from _foreign(group.prompt_ids, "prompt", group.place, limits.vocab_size)
        if len(group.trajectories) != limits.samples:
            yield Finding(
                f"the group has {len(group.trajectories)} responses, and a prompt of this run has {limits.samples}",
                group.place,
                "set rollout.samples_per_prompt to what the groups have, or leave the group out",
            )
        for trajectory in group.trajectories:
            ids = trajectory.token_ids
            yield from _foreign(ids, "response", trajectory.place, limits.vocab_size)
            if len(ids) > limits.max_new_tokens:
                yield Finding(
                    f"the response has {len(ids)} tokens, over rollout.max_new_tokens={limits.max_new_tokens}",
                    trajectory.place,
                    "raise it, or leave the group out",
                )


def require_usable(groups: Sequence[Group], findings: Sequence[Finding], source: str) -> None:
    """Raise FindingsError for faults, and UsageError where there is nothing."""
    if findings:
        raise FindingsError(f"the responses of {source} cannot be trained", findings, limit=SHOWN)
    if not groups:
        raise UsageError(f"{source} holds no responses", where=WHERE)


def _foreign(ids: Sequence[int], what: str, place: str, vocab_size: int) -> Iterator[Finding]:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            yield Finding(
                f"token {position} of the {what} is {token}, and the model's vocabulary has {vocab_size}",
                place,
                "it was made with another tokenizer: take the model that made it",
            )
            return
