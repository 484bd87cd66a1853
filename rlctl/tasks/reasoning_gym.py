"""The procedurally made tasks of the package reasoning-gym, by name."""

from __future__ import annotations

import msgspec

from rlctl.errors import UsageError
from rlctl.registry import suggest
from rlctl.tasks.base import Sample, Task, TaskOptions, is_held_out
from rlctl.tasks.counter import draw
from rlctl.tasks.gym_items import NAMES, VERSION, Place, item, score

_ATTEMPTS = 1000
_HELD_OUT_STREAM = 1


class ReasoningGymTask(Task):
    """Endless; what is held out is decided by a hash of the question, so that no question is on both sides, however
    few of them there are. Rewards are the package's own, computed in a child process: some evaluate what the model
    wrote."""

    verifier = f"{score.__module__}:{score.__name__}"

    def __init__(self, dataset: str, held_out: float) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self._dataset = dataset
        self._share = held_out
        self.digest = f"reasoning_gym-{VERSION}-{dataset}-{held_out:g}"
        self.sample(0)

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> ReasoningGymTask:
        """Return the task ``reasoning_gym:NAME``. Raises UsageError for a name or an option that does not apply."""
        options.refuse(name, "verifier", "step", "prompt_field", "answer_field", "tolerance")
        dataset = name.partition(":")[2]
        if dataset not in NAMES:
            near = suggest(dataset, NAMES)
            fix = f"did you mean {near!r}?" if near else f"known: {', '.join(NAMES)}"
            raise UsageError(f"reasoning_gym has no {dataset!r}", where="task.name", fix=fix)
        return cls(dataset, options.held_out)

    @property
    def size(self) -> None:
        """It has no end."""
        return None

    def sample(self, index: int) -> Sample:
        """Return training prompt ``index``: an item that depends on the number alone and is not held out."""
        for attempt in range(_ATTEMPTS):
            found = self._item(index, 0, index, attempt)
            if not is_held_out(found.prompt, self._share):
                return found
        raise self._none("not held out")

    def held_out(self, n: int) -> list[Sample]:
        """Return ``n`` different held-out prompts, the same each time: fewer if the task has fewer questions."""
        found: dict[str, Sample] = {}
        attempts = _ATTEMPTS + 20 * n if self._share else 0
        for attempt in range(attempts):
            if len(found) == n:
                break
            sample = self._item(len(found), _HELD_OUT_STREAM, attempt)
            if is_held_out(sample.prompt, self._share):
                found.setdefault(sample.prompt, sample)
        return list(found.values())

    def score(self, sample: Sample, response_text: str) -> float:
        """Return what the package gives, in this process."""
        return score(sample.prompt, response_text, sample.answer)

    def _item(self, index: int, *keys: int) -> Sample:
        # Seeds below 2^31: what a seed passes through may be a C integer.
        place = Place(self._dataset, draw(*keys) >> 33)
        question = str(item(place)[1]["question"])
        return Sample(index, question, msgspec.json.encode(place).decode())

    def _none(self, kind: str) -> UsageError:
        return UsageError(
            f"{self.name}: none of {_ATTEMPTS} questions is {kind}", where="task.held_out", fix="lower task.held_out"
        )
