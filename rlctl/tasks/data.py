"""Tasks whose prompts are rows of somebody's data, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.tasks.base import Sample, Task, TaskOptions, is_held_out
from rlctl.tasks.conversation import opening, score_of, take_step
from rlctl.tasks.rows import identity
from rlctl.tasks.verifiers import (
    IN_A_CHILD,
    NONE,
    STEP_TAKES,
    VERIFIERS,
    Verifier,
    check_reference,
    load_function,
    load_verifier,
    none,
    numeric,
)

MAX_FINDINGS = 20


class DataTask(Task):
    """Prompts from rows, those held out chosen by a hash of the prompt, and a verifier by name or by reference.

    Args:
        name: where the rows are.
        rows: each a sample or the fault in it.
        content: changes with the data.
        options: the user's.

    Raises:
        UsageError: no rows, or faults in them: the first 20 of all are listed.
    """

    def __init__(self, name: str, rows: Iterable[Sample | Finding], content: bytes, options: TaskOptions) -> None:
        self.name = name
        self._verify, self.verifier = (None, None) if options.step is not None else _resolve_verifier(options)
        self.stepper = _resolve_step(options)
        samples: list[Sample] = []
        faults: list[Finding] = []
        for row in rows:
            (faults if isinstance(row, Finding) else samples).append(row)  # type: ignore[arg-type]
        if faults:
            raise FindingsError(f"{name} cannot be used", faults, limit=MAX_FINDINGS)
        _refuse_no_answers(name, samples, options)
        sides: tuple[list[Sample], list[Sample]] = ([], [])
        for sample in samples:
            side = sides[is_held_out(identity(sample), options.held_out)]
            side.append(replace(sample, index=len(side)))
        self._train, self._held_out = sides
        if not self._train:
            what = f"all {len(samples)} prompts are held out" if samples else "the file has no prompts"
            raise UsageError(what, where=name, fix="add lines, or lower task.held_out" if samples else "add lines")
        key = (options.prompt_field, options.answer_field, options.held_out)
        self.digest = blake2b(content + repr(key).encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int:
        """Number of prompts that are not held out."""
        return len(self._train)

    def sample(self, index: int) -> Sample:
        """Return training prompt ``index``, 0 .. size - 1."""
        return self._train[index]

    def held_out(self, n: int) -> list[Sample]:
        """Return the first ``n`` held-out prompts."""
        return self._held_out[:n]

    def score(self, sample: Sample, response_text: str) -> float:
        """Return the reward, in this process; a user's function is imported here on the first call. Of a conversation
        it is that of the first turn."""
        if self.stepper is not None:
            messages = [*opening(sample), {"role": "assistant", "content": response_text}]
            step = partial(load_function(self.stepper, STEP_TAKES), messages, sample.answer)
            return score_of(take_step(step, f"step {self.stepper}"), sample).reward
        if self._verify is None:
            assert self.verifier is not None
            self._verify = load_verifier(self.verifier)
        return float(self._verify(sample.prompt, response_text, sample.answer))


def _resolve_step(options: TaskOptions) -> str | None:
    """Return the reference to the function that takes the steps of conversations, or None."""
    if options.step is None:
        return None
    options.refuse("of several turns", "verifier", "tolerance")
    return check_reference(options.step, "task.step")


def _resolve_verifier(options: TaskOptions) -> tuple[Verifier | None, str | None]:
    """Return the function to call here, or the reference to run elsewhere."""
    name = options.verifier
    if name is None:
        raise UsageError(
            "a data file needs a verifier",
            where="task.verifier",
            fix=f"one of {', '.join(VERIFIERS.names())}, or module:function, or file.py:function; none where a reward "
            "model alone judges",
        )
    if name != "numeric":
        options.refuse(f"verifier {name}", "tolerance")
    if name == NONE:
        return none, None
    if ":" in name:
        return None, check_reference(name)
    verify = VERIFIERS.load(name, where="task.verifier")
    if name in IN_A_CHILD:
        return None, f"{verify.__module__}:{name}"
    return (partial(numeric, tolerance=options.tolerance), None) if name == "numeric" else (verify, None)


def _refuse_no_answers(name: str, samples: list[Sample], options: TaskOptions) -> None:
    """A function of the user's may do without an answer here and there, but not for want of the right field."""
    if options.verifier != NONE and samples and not any(sample.answer.strip() for sample in samples):
        raise UsageError(
            f"all {len(samples)} answers ({options.answer_field!r}) in {name} are empty",
            where=samples[0].source,
            fix="name the field that holds them with task.answer_field; for a function that needs none, write any text",
        )
