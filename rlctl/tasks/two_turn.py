"""The built-in task of two turns: guess a digit, hear how far off the guess is, and put it right.

A prompt such as ``4+8-2b`` has the form that the built-in model knows from the task cycle, and stands for a secret
digit that nothing in it gives away. The first guess is answered by how far the secret lies above it, modulo 10, as in
``a+3`` (one operation is left: add 3); the second must be the secret. So the first guess is luck, and the second
depends on the guess and on the answer to it. A guess is a digit, as in ``8`` or ``=8``, at once or after a trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

from rlctl.tasks.base import Message, Sample, TaskOptions, is_held_out
from rlctl.tasks.conversation import ConversationTask, Step
from rlctl.tasks.counter import draw, permutation
from rlctl.tasks.cycle import PROBLEMS_PER_K, prompt_text
from rlctl.tasks.final_part import final_part

HELD_OUT = 0.1
_K = 2
_GUESS = re.compile(r"=?([0-9])")


def secret(prompt: str) -> int:
    """Return the digit that a prompt stands for."""
    return blake2b(b"two_turn " + prompt.encode(), digest_size=8).digest()[0] % 250 % 10


class TwoTurnTask(ConversationTask):
    """Endless; a tenth of the prompts is held out, by a hash. The reward is 1 for the secret in either turn."""

    name = "two_turn"
    digest = "two_turn-1"
    size = None

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> TwoTurnTask:
        """Build the task; it takes no options."""
        options.refuse(name, "verifier", "step", "prompt_field", "answer_field", "held_out", "tolerance")
        return cls()

    def sample(self, index: int) -> Sample:
        """Return a prompt for any ``index``."""
        attempt = 0
        while is_held_out(prompt := prompt_text(draw(index, attempt) % PROBLEMS_PER_K, _K), HELD_OUT):
            attempt += 1
        return Sample(index, prompt, str(secret(prompt)))

    def held_out(self, n: int) -> list[Sample]:
        """Return the first ``n`` of the about 730 held-out prompts, in an order of their own."""
        order = (prompt_text(int(number), _K) for number in permutation(PROBLEMS_PER_K, _K))
        prompts = islice((prompt for prompt in order if is_held_out(prompt, HELD_OUT)), n)
        return [Sample(index, prompt, str(secret(prompt))) for index, prompt in enumerate(prompts)]

    def step(self, sample: Sample, messages: Sequence[Message]) -> Step:
        """Judge the last guess; anything but a digit ends the conversation without a reward."""
        found = _GUESS.fullmatch(final_part(messages[-1]["content"]))
        if found is None:
            return None, 0.0, True
        away = (int(sample.answer) - int(found.group(1))) % 10
        second = sum(message["role"] == "assistant" for message in messages) == 2
        return (None, float(away == 0), True) if second or away == 0 else (f"a+{away}", 0.0, False)
