"""The task of a run, or its several tasks, from the configuration."""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.schema import Config
from rlctl.schema.work import MixtureMember, TaskConfig
from rlctl.tasks.base import Task
from rlctl.tasks.mixture import Member, MixtureTask
from rlctl.tasks.registry import load_task


def load_tasks(config: Config) -> Task:
    """Return the task of a run, a ``MixtureTask`` when it has several. Raises UsageError or UnavailableError."""
    if not config.task.mixture:
        return _load(config.task, config.run.seed)
    members = []
    for number, member in enumerate(config.task.mixture, 1):
        try:
            members.append(Member(_load(member, config.run.seed), member.weight))
        except UsageError as error:
            # The task speaks of its keys as if it were alone.
            if error.where is not None and error.where.startswith("task."):
                error.where = f"task.mixture, item {number}: {error.where.removeprefix('task.')}"
            raise
    return MixtureTask(members)


def _load(section: TaskConfig | MixtureMember, seed: int) -> Task:
    return load_task(
        section.name,
        verifier=section.verifier,
        prompt_field=section.prompt_field,
        answer_field=section.answer_field,
        held_out=section.held_out,
        seed=seed,
        tolerance=section.tolerance,
        step=section.step,
    )
