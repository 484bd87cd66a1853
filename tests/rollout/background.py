"""A rollout side that generates in the background, with a trainer's side to drive it; a real engine of this process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import LlamaConfig

from rlctl.experience.admission import Admission
from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event
from rlctl.experience.groups import PromptGroup
from rlctl.rollout.base import SamplingParams
from rlctl.rollout.rollouter import Rollouter
from rlctl.tasks.base import Message, Sample, Score, Task, TaskOptions
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.mixture import cursor_for
from rlctl.tasks.rewarding import RewardScorer
from tests.rollout.tiny import VOCAB, make_engine, make_model

TOKENIZER = build_tokenizer()
STOPS = tuple(TOKENIZER.encode("0123456789", add_special_tokens=False))
SAMPLES = 2


def tiny_model() -> Any:
    """Return a model whose responses end at random: a token in ten is a stop."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)
    model = make_model(config, seed=5)
    head = model.get_output_embeddings().weight
    head[list(STOPS)] = head[list(STOPS)] * 0.1 - 0.02
    return model


class Count(Task):
    """``size`` prompts, or endless; a response is worth its length modulo 3."""

    name, digest, size = "count", "count-1", None

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> Count:
        return cls()

    def sample(self, index: int) -> Sample:
        return Sample(index, f"{index % 100}+", "1")

    def held_out(self, n: int) -> list[Sample]:
        return [self.sample(index) for index in range(n)]

    def score(self, sample: Sample, response_text: str) -> float:
        return float(len(response_text) % 3)


class SlowScorer(RewardScorer):
    """Takes ``seconds()`` for each response."""

    def __init__(self, task: Task, seconds: Callable[[], float]) -> None:
        super().__init__(task, 10.0)
        self._seconds = seconds

    def step(self, batch: Sequence[tuple[Sample, Sequence[Message]]]) -> list[Score]:
        for _ in batch:
            time.sleep(self._seconds())
        return super().step(batch)


class Side:
    """A rollout side in the background.

    Args:
        model: what generates.
        admission: of the buffer.
        size: prompts in the data; None: endless.
        slow: seconds that a reward takes.
        longest: most tokens of a response.
        partial: whether interrupted responses go on.
        pool: generates in the engine's place.
    """

    def __init__(
        self,
        model: Any,
        admission: Admission,
        *,
        size: int | None = None,
        slow: Callable[[], float] = lambda: 0.0,
        longest: int = 24,
        max_slots: int = 16,
        partial: bool = True,
        pool: Any = None,
    ) -> None:
        self.model, self.events = model, list[Event]()
        self.log = EventLog(None)
        self.log.subscribe(self.events.append)
        self.engine = make_engine(model, max_slots=max_slots)
        self.buffer = GroupBuffer(admission)
        task = Count(size)
        self.cursor = cursor_for(task, 2, None if size is None else 1)
        params = SamplingParams(max_new_tokens=longest, stop_token_ids=STOPS)
        self.rollouter = Rollouter(
            self.engine if pool is None else pool, task, SlowScorer(task, slow), TOKENIZER, self.buffer, self.log,
            params=params, samples=SAMPLES, seed=11, max_prompt_tokens=16, cursor=self.cursor, partial_rollout=partial,
        )  # fmt: skip

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def sync(self, version: int) -> None:
        """Bring weights as a colocated sync would: requests are cut, and nothing decodes meanwhile."""
        with self.rollouter._pump.hold(30.0):
            self.rollouter.take(self.engine.abort(), "sync")
            assert self.engine.load_weights(self.model.state_dict().items(), version).complete
        self.rollouter.update_param_version(version)

    def take(
        self, step: int, count: int, timeout: float = 60.0, until: Callable[[], None] | None = None
    ) -> list[PromptGroup]:
        """Take the groups of a local update of ``step``, as a trainer does; none when the data has ended. ``until`` is
        called before each look at what is there."""
        version = step - 1

        def enough() -> bool:
            if until is not None:
                until()
                if not self.rollouter.may_evict():
                    return False
            return self.buffer.ready(self.rollouter.attainable(count, version), version)

        with self.buffer.changed:
            self.rollouter.run(enough, timeout)
            return self.rollouter.select(self.rollouter.attainable(count, version), step=step, version=version)


def sleeps(seed: int, longest: float) -> Callable[[], None]:
    """Return a function that sleeps for a random time."""
    rng = random.Random(seed)
    return lambda: time.sleep(rng.random() * longest)
