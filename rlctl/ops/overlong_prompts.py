"""Prompts that are longer than the run takes, by the policy that the configuration states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlctl.errors import UsageError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Noted
from rlctl.schema import Config
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.chat import Chat
from rlctl.tasks.fitting import FittingTask
from rlctl.tasks.mixture import MixtureTask
from rlctl.tasks.prompts import check_prompts, fits


def fitting_prompts(
    config: Config, task: Task, tokenizer: Any, chat: Chat, events: EventLog
) -> tuple[Task, list[Sample]]:
    """Return the task as it is trained on and the held-out prompts; tell how many prompts are cut or left out.

    Raises:
        FindingsError: prompts that cannot be used, each with its place.
        UsageError: no prompt is left.
    """
    longest, policy = config.task.max_prompt_tokens, config.task.overlong_prompts
    wanted = config.run.validate_prompts
    held_out = task.held_out(wanted) if wanted else []
    told = ""
    if policy == "drop":
        every = len(held_out)
        fitted = _fitting(task, partial(fits, tokenizer, max_prompt_tokens=longest, chat=chat), longest)
        held_out = fitted.held_out(wanted) if wanted else []
        if gone := _dropped(fitted) + every - len(held_out):
            told = f"{gone} prompts are longer than {longest} tokens and left out"
        task = fitted
    longer = check_prompts(task, tokenizer, longest, held_out, truncate=policy == "truncate", chat=chat)
    if longer:
        told = f"{longer} prompts are longer than {longest} tokens and cut to their end"
    if told:
        events.emit(Noted(message=told))
    return task, held_out


def _fitting(task: Task, keep: Callable[[Sample], bool], longest: int) -> Task:
    if isinstance(task, MixtureTask):
        return task.each(lambda member: _fitting(member, keep, longest))
    fitted = FittingTask(task, keep)
    if fitted.size == 0:
        raise UsageError(
            f"all {fitted.dropped} prompts of {task.name} are longer than {longest} tokens and left out",
            where="task.max_prompt_tokens",
            fix="raise it, or set task.overlong_prompts=truncate",
        )
    return fitted


def _dropped(task: Task) -> int:
    if isinstance(task, MixtureTask):
        return sum(_dropped(member.task) for member in task.members.values())
    return task.dropped if isinstance(task, FittingTask) else 0
