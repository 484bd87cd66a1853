"""What must hold between the keys of ``task``. Each rule is one small pure function."""

from __future__ import annotations

from collections import Counter

from rlctl.errors import Finding
from rlctl.schema import Config
from rlctl.schema.work import TaskConfig
from rlctl.trainers.rules import Rule

_OF_A_MEMBER = ("name", "verifier", "step", "tolerance", "prompt_field", "answer_field", "held_out")


def mixture_stands_alone(config: Config) -> Finding | None:
    if not config.task.mixture:
        return None
    default = TaskConfig()
    changed = [name for name in _OF_A_MEMBER if getattr(config.task, name) != getattr(default, name)]
    if changed:
        what, fix = f"task.{changed[0]} is set beside task.mixture, whose members have their own", "give it to a member"
        return Finding(what, f"task.{changed[0]}", fix)
    if config.task.epochs is not None:
        return Finding("a mixture has no end, so it has no epochs", "task.epochs", "set run.steps instead")
    return None


def members_are_told_apart(config: Config) -> Finding | None:
    counts = Counter(member.name for member in config.task.mixture)
    twice = [name for name, count in counts.items() if count > 1]
    if not twice:
        return None
    return Finding(
        f"{twice[0]} is in the mixture more than once", "task.mixture", "name it once and add up its weights"
    )


TASK: tuple[Rule, ...] = (
    Rule("a mixture says by itself what is trained", mixture_stands_alone),
    Rule("the members of a mixture are told apart", members_are_told_apart),
)
