"""Tasks by name, or by the path of a data file."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import UsageError
from rlctl.registry import Registry
from rlctl.tasks.base import Task, TaskOptions
from rlctl.tasks.numbers import TOLERANCE

TASKS: Registry[type[Task]] = Registry(
    "task",
    {"cycle": "rlctl.tasks.cycle:CycleTask", "two_turn": "rlctl.tasks.two_turn:TwoTurnTask"},
    group="rlctl.tasks",
    base="rlctl.tasks.base:Task",
)

FILES: Registry[type[Task]] = Registry(
    "data file",
    {".jsonl": "rlctl.tasks.jsonl:JsonlTask", ".parquet": "rlctl.tasks.parquet:ParquetTask"},
    base="rlctl.tasks.base:Task",
)
FAMILIES: Registry[type[Task]] = Registry(
    "task family",
    {"reasoning_gym": "rlctl.tasks.reasoning_gym:ReasoningGymTask", "hub": "rlctl.tasks.hub:HubTask"},
    base="rlctl.tasks.base:Task",
)
"""Many tasks each, called ``family:name``."""


def load_task(
    name: str,
    *,
    verifier: str | None = None,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    held_out: float = 0.1,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    step: str | None = None,
) -> Task:
    """Return the task called ``name``, or the one in the data file at that path.

    Args:
        name: a name in TASKS, ``family:name`` with a family in FAMILIES, or the path of a file.
        verifier: built-in verifier, ``module:function`` or ``file.py:function``; for data files.
        prompt_field: field of a line that holds the prompt.
        answer_field: field of a line that holds the answer.
        held_out: share of a data file that is kept for evaluation, by a hash of the prompt.
        tolerance: relative difference up to which two numbers are equal to the verifier ``numeric``.
        step: ``module:function`` or ``file.py:function`` that takes the steps of conversations; for data files, instead
            of a verifier.
        seed: the run's, for tasks that make up their prompts once. (The order of prompts is the cursor's.)

    Raises:
        UsageError: no such task or file, an option that does not apply, or faults in the file: all of them.
    """
    options = TaskOptions(verifier, prompt_field, answer_field, held_out, seed, tolerance, step)
    if name in TASKS.names():
        return TASKS.load(name).create(name, options)
    family, colon, _ = name.partition(":")
    if colon and family in FAMILIES.names():
        return FAMILIES.load(family).create(name, options)
    suffix = Path(name).suffix
    if suffix in FILES.names():
        return FILES.load(suffix).create(name, options)
    if suffix or "/" in name or Path(name).exists():
        known = ", ".join(f"*{kind}" for kind in FILES.names())
        raise UsageError(f"{name} is no data file", where="task.name", fix=f"one of {known}")
    raise TASKS.unknown(name, where="task.name")
