"""Conversations through a real engine: tokens, masks, log-probs, budgets, and going on in the middle of one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Finished, SegmentMade
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.rows import rows_of
from rlctl.rollout.base import SamplingParams
from rlctl.rollout.rollouter import Rollouter
from rlctl.tasks.base import Message, Sample, TaskOptions
from rlctl.tasks.conversation import ConversationTask, Step
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.mixture import cursor_for
from rlctl.tasks.rewarding import RewardScorer
from tests.rollout.tiny import make_engine, make_model

TOKENIZER = build_tokenizer()
STOPS = tuple(TOKENIZER.encode("0123456789", add_special_tokens=False))
BUDGET = 40


class Talk(ConversationTask):
    """Prompt n takes n % 4 + 1 turns. It keeps what it was asked."""

    name, digest, size = "talk", "talk-1", None

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[Message]]] = []

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> Talk:
        return cls()

    def sample(self, index: int) -> Sample:
        return Sample(index, f"{index % 100}+", str(index % 4 + 1))

    def held_out(self, n: int) -> list[Sample]:
        return [self.sample(index) for index in range(n)]

    def step(self, sample: Sample, messages: Sequence[Message]) -> Step:
        self.asked.append((sample.prompt, list(messages)))
        turn = sum(message["role"] == "assistant" for message in messages)
        if str(turn) == sample.answer:
            return None, 0.5, True
        return f"{turn}*{len(messages[-1]['content'])};", 0.25, False


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, vocab_size=len(TOKENIZER), num_attention_heads=4, num_key_value_heads=2)
    model = make_model(config, seed=5)
    # Turns that end: a token in four is a stop.
    head = model.get_output_embeddings().weight
    head[list(STOPS)] = head[list(STOPS)] * 0.1 + 0.02
    return model


class Talking:
    """A rollout side that makes ``samples`` conversations of each of ``prompts`` prompts."""

    def __init__(
        self, model: Any, *, max_slots: int = 64, max_turns: int | None = None, stops: tuple[int, ...] = STOPS
    ) -> None:
        self.task, self.buffer, self.events = Talk(), GroupBuffer(), list[Event]()
        log = EventLog(None)
        log.subscribe(self.events.append)
        self.engine = make_engine(model, max_slots=max_slots)
        params = SamplingParams(max_new_tokens=BUDGET, stop_token_ids=stops)
        self.rollouter = Rollouter(
            self.engine, self.task, RewardScorer(self.task, 10.0), TOKENIZER, self.buffer, log,
            params=params, samples=3, seed=11, max_prompt_tokens=16, max_turns=max_turns,
        )  # fmt: skip

    def submit(self, prompts: int) -> None:
        self.rollouter.submit(cursor_for(self.task, 2).take(prompts), 0)

    def finish(self, prompts: int) -> list[PromptGroup]:
        self.rollouter.run(lambda: len(self.buffer.finished()) == prompts)
        return self.buffer.select(prompts)


def responses(groups: Sequence[PromptGroup]) -> list[Response]:
    return [response for group in groups for response in group.ordered]


@pytest.fixture(scope="module")
def talked(model: Any) -> tuple[Talking, list[PromptGroup]]:
    side = Talking(model)
    side.submit(12)
    return side, side.finish(12)


def test_turns_follow_each_other_until_the_task_is_done_or_the_room_is(talked: tuple[Talking, Any]) -> None:
    side, groups = talked
    wanted = {group.ordinal: int(side.task.sample(group.row).answer) for group in groups}
    ends = set()
    for response in responses(groups):
        turns, done = len(response.turns), wanted[response.key.ordinal]
        ends.add((response.finish_reason, turns))
        assert len(response.token_ids) <= BUDGET
        assert not response.segments[-1].observation
        assert len(response.observations) == turns - 1 == response.key.turn
        if response.finish_reason == "stop":
            assert turns == done
        assert response.reward == pytest.approx(0.25 * (turns - (turns == done)) + 0.5 * (turns == done))
        for (_, end), (begin, _) in zip(response.turns, response.turns[1:], strict=False):
            # The model stops at digits here, so the template ends the turn.
            said = TOKENIZER.decode(response.token_ids[end:begin])
            assert said.removeprefix(TOKENIZER.eos_token) in response.observations
            assert response.token_ids[end - 1] in STOPS
    # Several turns, and cut ones, or the test tests nothing.
    assert {turns for _, turns in ends} >= {1, 2, 3}
    assert {reason for reason, _ in ends} == {"stop", "length"}


def test_a_step_sees_what_was_said(talked: tuple[Talking, Any]) -> None:
    side, groups = talked
    for group in groups:
        sample = side.task.sample(group.row)
        for response in group.ordered:
            messages: list[Message] = [{"role": "user", "content": sample.prompt}]
            for turn, (begin, end) in enumerate(response.turns):
                ids = response.token_ids[begin:end]
                text = TOKENIZER.decode(ids[:-1] if ids[-1] in STOPS else ids)
                messages.append({"role": "assistant", "content": text})
                assert (sample.prompt, messages) in side.task.asked
                messages.extend({"role": "user", "content": said} for said in response.observations[turn : turn + 1])


def test_log_probs_are_the_models_in_every_turn_and_absent_between(talked: tuple[Talking, Any], model: Any) -> None:
    _, groups = talked
    for row in rows_of(groups):
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        found = torch.from_numpy(row.rollout_logprobs)
        torch.testing.assert_close(found[row.mask], expected[row.mask], atol=1e-5, rtol=0)
        assert np.isnan(row.rollout_logprobs[~row.mask]).all()
        assert row.trained == sum(end - begin for begin, end in row.turns)
        assert (row.versions == 0).all()


def test_tokens_do_not_depend_on_how_many_are_decoded_at_once(talked: tuple[Talking, Any], model: Any) -> None:
    narrow = Talking(model, max_slots=4)
    narrow.submit(12)
    assert [r.token_ids for r in responses(narrow.finish(12))] == [r.token_ids for r in responses(talked[1])]


@pytest.mark.parametrize("ticks", [6, 15, 40])
def test_a_conversation_goes_on_from_a_saved_buffer(ticks: int, talked: tuple[Talking, Any], model: Any) -> None:
    side = Talking(model, max_slots=16)
    side.submit(12)
    count = iter(range(ticks))
    side.rollouter.run(lambda: next(count, None) is None)
    state = json.loads(json.dumps(side.buffer.state()))
    assert ticks == 40 or any(group["under_way"] for group in state["groups"])
    again = Talking(model, max_slots=16)
    again.buffer.load(state)
    again.rollouter.resubmit()
    found = responses(again.finish(12))
    assert [(r.token_ids, r.turns, r.reward, r.finish_reason, r.key) for r in found] == [
        (r.token_ids, r.turns, r.reward, r.finish_reason, r.key) for r in responses(talked[1])
    ]


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_turn_goes_on_where_it_was(seed: int, talked: tuple[Talking, Any], model: Any) -> None:
    """Requests are aborted at random, waiting ones too, under new versions of the same weights."""
    rng, version = random.Random(seed), 0
    side = Talking(model, max_slots=8)
    side.submit(12)
    while len(side.buffer.finished()) < 12:
        ticks = iter(range(rng.randint(0, 9)))
        side.rollouter.run(lambda ticks=ticks: next(ticks, None) is None or len(side.buffer.finished()) == 12)
        side.rollouter.take(side.engine.abort())
        version += 1
        assert side.engine.load_weights(model.state_dict().items(), version).complete
    groups = side.buffer.select(12)
    found = responses(groups)
    assert [(r.token_ids, r.turns, r.reward, r.finish_reason, r.key) for r in found] == [
        (r.token_ids, r.turns, r.reward, r.finish_reason, r.key) for r in responses(talked[1])
    ]
    for row in rows_of(groups):
        assert (np.diff(row.versions) >= 0).all()
    assert max(len({segment.version for segment in r.segments}) for r in found) > 1
    assert side.rollouter.take_stats().tokens == sum(response.sampled for response in found)


def test_conversations_go_on_in_the_background(talked: tuple[Talking, Any], model: Any) -> None:
    """Turns are judged in one thread and made in another."""
    side = Talking(model, max_slots=8)
    side.submit(12)
    side.rollouter.start()
    found = responses(side.finish(12))
    side.rollouter.stop()
    assert [(r.token_ids, r.turns, r.reward, r.finish_reason, r.key, r.observations) for r in found] == [
        (r.token_ids, r.turns, r.reward, r.finish_reason, r.key, r.observations) for r in responses(talked[1])
    ]
    assert side.rollouter.take_stats().tokens == sum(response.sampled for response in found)


def test_events_tell_the_turns(talked: tuple[Talking, Any]) -> None:
    side, groups = talked
    told: dict[tuple[int, int], list[SegmentMade]] = {}
    for event in side.events:
        if isinstance(event, SegmentMade):
            told.setdefault((event.ordinal, event.sample), []).append(event)
    ended = {(e.ordinal, e.sample): e for e in side.events if isinstance(e, Finished)}
    for response in responses(groups):
        key = (response.key.ordinal, response.key.sample)
        assert [(e.turn, e.observation, e.tokens, e.version, e.index) for e in told[key]] == [
            (s.turn, s.observation, len(s.token_ids), 0, i) for i, s in enumerate(response.segments)
        ]
        assert (ended[key].turns, ended[key].tokens) == (len(response.turns), response.sampled)
    assert side.rollouter.take_stats().tokens == sum(response.sampled for response in responses(groups))


def test_the_number_of_turns_can_be_bounded(model: Any) -> None:
    side = Talking(model, max_turns=2)
    side.submit(8)
    found = responses(side.finish(8))
    assert max(len(r.turns) for r in found) == 2
    cut = [r for r in found if len(r.turns) == 2 and int(side.task.sample(r.key.ordinal).answer) != 2]
    assert all(r.finish_reason == "length" for r in found if r.reward == 0.5 and len(r.turns) == 2)
    assert cut


def test_an_evaluation_holds_whole_conversations(model: Any) -> None:
    # Greedy decoding of a random model meets few kinds of tokens: more of them end a turn.
    side = Talking(model, stops=tuple(range(0, len(TOKENIZER), 2)))
    found = [side.rollouter.evaluate(side.task.held_out(8)) for _ in range(2)]
    assert found[0] == found[1]
    assert max(len(messages) for _, messages in side.task.asked) > 3
    assert len(side.buffer) == 0
