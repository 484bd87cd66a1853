"""The built-in task: modular arithmetic in which a model finds out by itself that writing a trace pays.

A prompt such as ``6-1-9e`` is a start digit, two operations that are applied in turn (modulo 10), and a count letter
(``a`` = 1 .. ``z`` = 26 operations). A response is the last digit, either at once or after a trace
``<think>e-1=5;d-9=6;c-1=5;b-9=6;a-1=5;</think>5``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from rlctl.tasks.base import Sample, Task, TaskOptions, is_held_out
from rlctl.tasks.counter import draw, permutation, uniform

HELD_OUT = 0.1
MIN_K, MAX_K = 2, 26
PROBLEMS_PER_K = 10 * 27 * 27
"""Start digit, then twice one of + - * with a digit from 1 to 9."""
_ALPHA = 1.7
_ANSWER = re.compile(r"(?:\A|</think>)([0-9])\Z")


def pareto_k(u: float) -> int:
    """Return a number of operations for ``u`` in (0, 1): Pareto with alpha 1.7 from 2 up, so half of all are 2.
    The long tail may exceed MAX_K; the caller draws again."""
    return int(MIN_K * u ** (-1 / _ALPHA))


def prompt_text(number: int, k: int) -> str:
    """Return problem ``number`` (0 .. PROBLEMS_PER_K - 1) with ``k`` operations."""
    start, rest = divmod(number, 27 * 27)
    first, second = divmod(rest, 27)
    return f"{start}{_operation(first)}{_operation(second)}{chr(ord('a') + k - 1)}"


def _operation(number: int) -> str:
    return "+-*"[number // 9] + str(number % 9 + 1)


def operations_of(prompt: str) -> int:
    """Return the number of operations that a prompt asks for."""
    return ord(prompt[5]) - ord("a") + 1


def results(prompt: str) -> Iterator[tuple[str, int]]:
    """Yield each operation in turn with the true digit after it."""
    value = int(prompt[0])
    for i in range(operations_of(prompt)):
        operation = prompt[1:3] if i % 2 == 0 else prompt[3:5]
        value = apply_operation(value, operation)
        yield operation, value


def apply_operation(value: int, operation: str) -> int:
    """Return ``value`` after an operation such as ``*7``, modulo 10."""
    digit = int(operation[1])
    return {"+": value + digit, "-": value - digit, "*": value * digit}[operation[0]] % 10


def trace(prompt: str) -> str:
    """Return the whole correct response with a trace."""
    k = operations_of(prompt)
    steps = [f"{chr(ord('a') + k - 1 - i)}{op}={value};" for i, (op, value) in enumerate(results(prompt))]
    return f"<think>{''.join(steps)}</think>{steps[-1][-2]}"


def answer(prompt: str) -> str:
    """Return the digit that a prompt asks for."""
    return str(list(results(prompt))[-1][1])


class CycleTask(Task):
    """Endless; the held-out set is a tenth of all problems, by a hash of the prompt, and is never trained on (nor was
    it during the warm start of the model that comes with the task)."""

    name = "cycle"
    digest = "cycle-1"
    size = None

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> CycleTask:
        """Build the task; it takes no options."""
        options.refuse(name, "verifier", "step", "prompt_field", "answer_field", "held_out", "tolerance")
        return cls()

    def sample(self, index: int) -> Sample:
        """Return a problem for any ``index``, with the long-tailed mix of lengths."""
        attempt = 0
        while True:
            k = pareto_k(uniform(index, attempt, 0))
            if k <= MAX_K:
                prompt = prompt_text(draw(index, attempt, 1) % PROBLEMS_PER_K, k)
                if not is_held_out(prompt, HELD_OUT):
                    return _as_sample(index, prompt)
            attempt += 1

    def held_out(self, n: int) -> list[Sample]:
        """Return ``n`` held-out problems, as many of each number of operations as ``n`` allows, short ones first."""
        lengths = range(MIN_K, MAX_K + 1)
        share, rest = divmod(n, len(lengths))
        prompts: list[str] = []
        for i, k in enumerate(lengths):
            wanted = share + (i < rest)
            order = (prompt_text(int(number), k) for number in permutation(PROBLEMS_PER_K, k))
            prompts.extend(islice((p for p in order if is_held_out(p, HELD_OUT)), wanted))
        return [_as_sample(i, prompt) for i, prompt in enumerate(prompts)]

    def score(self, sample: Sample, response_text: str) -> float:
        """Return 1.0 if the response is the right digit, at once or after a trace, else 0.0."""
        found = _ANSWER.search(response_text)
        return float(found is not None and found.group(1) == sample.answer)

    def metrics(self, sample: Sample, response_text: str) -> dict[str, float]:
        """Return whether the model chose to think."""
        return {"think": float(response_text.startswith("<think>"))}


def _as_sample(index: int, prompt: str) -> Sample:
    return Sample(index, prompt, answer(prompt), group=f"k={operations_of(prompt)}")
