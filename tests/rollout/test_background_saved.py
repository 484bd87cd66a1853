"""A run that is saved while requests are under way, and killed: nothing that was made is lost, or trained twice."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest

from rlctl.experience.admission import Admission
from rlctl.experience.event_log import lineage
from rlctl.experience.events import Event, RunStarted, Selected
from rlctl.experience.groups import PromptGroup
from rlctl.rollout.base import Request
from tests.rollout.background import SAMPLES, Side, sleeps, tiny_model

BATCH, SIZE = 4, 26


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def undisturbed(model: Any) -> dict[int, list[list[int]]]:
    """The tokens of each prompt's responses; the weights are always the same, so they depend on nothing else."""
    side = Side(model, Admission("drop", SIZE, 0), size=SIZE)
    side.rollouter.submit(side.cursor.take(SIZE), 0)
    side.rollouter.run(lambda: side.buffer.ready(SIZE, 0))
    return tokens_of(side.buffer.select(SIZE))


def tokens_of(groups: list[PromptGroup]) -> dict[int, list[list[int]]]:
    return {group.ordinal: [response.token_ids for response in group.ordered] for group in groups}


def side_of(model: Any, staleness: int, rng: random.Random) -> Side:
    return Side(model, Admission("pacing", BATCH, staleness, 1.0), size=SIZE, slow=lambda: rng.random() * 0.004)


@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_trained_once_in_the_lineage(model: Any, undisturbed: Any, seed: int) -> None:
    rng, nap = random.Random(seed), sleeps(seed, 0.02)
    rounds, staleness = rng.choice([1, 2, 4]), rng.randint(1, 3)
    side = side_of(model, staleness, rng)
    events: list[Event] = []
    trained: dict[int, list[list[int]]] = {}
    saved: dict[str, Any] = {"step": 0, "trained": {}, "seq": -1, "rollouter": None}
    kills, resumed_tokens, step = 0, 0, 0

    def begin() -> None:
        side.log.subscribe(events.append)
        side.log.next_seq = len(events)
        side.log.emit(RunStarted(mode="", seed=0, from_step=saved["step"], from_seq=saved["seq"]))
        if saved["rollouter"] is not None:
            side.rollouter.load(json.loads(saved["rollouter"]))
        side.sync(saved["step"])
        side.rollouter.resubmit()
        side.rollouter.start()

    begin()
    while True:
        step += 1
        count = 0
        for _ in range(rounds):
            groups = side.take(step, BATCH // rounds)
            assert max((step - 1 - g.oldest_version for g in groups), default=0) <= staleness
            count += len(groups)
            trained |= tokens_of(groups)
            nap()
        if not count:
            break
        if kills < 4 and rng.random() < 0.4:
            kills += 1
            side.rollouter.stop()
            side, trained, step = side_of(model, staleness, rng), dict(saved["trained"]), saved["step"]
            begin()
            continue
        with side.rollouter.saving():
            saved = {"step": step, "trained": dict(trained), "seq": side.log.next_seq - 1}
            saved["rollouter"] = json.dumps(side.rollouter.state())
            resumed_tokens += saved["rollouter"].count('"token_ids"')
        side.sync(step)
    side.rollouter.stop()
    print("kills", kills, "rounds", rounds, "staleness", staleness)
    chosen = [ordinal for event in lineage(events) if isinstance(event, Selected) for ordinal in event.ordinals]
    assert sorted(chosen) == list(range(SIZE))
    assert resumed_tokens
    # Not only the prompts: each response is what it is without any interruption.
    assert trained == undisturbed


def test_responses_that_were_whole_when_they_were_saved_are_not_made_again(model: Any) -> None:
    """They wait for their reward only."""
    release = threading.Event()
    blocked = Side(model, Admission("pacing", 4, 0), size=4, slow=lambda: float(not release.wait(60)))
    blocked.rollouter.update_param_version(0)
    blocked.rollouter.start()
    with blocked.buffer.changed:
        assert blocked.buffer.changed.wait_for(
            lambda: sum(len(group.under_way) for group in blocked.buffer.unfinished()) == 4 * SAMPLES, 60
        )
        state = {"buffer": json.loads(json.dumps(blocked.buffer.state())), "cursor": blocked.cursor.state()}
    release.set()
    blocked.rollouter.stop()
    side = Side(model, Admission("pacing", 4, 0), size=4)
    handed: list[Request] = []
    side.engine.submit = handed.extend  # type: ignore[method-assign]
    side.rollouter.load(state)
    side.rollouter.update_param_version(0)
    side.rollouter.resubmit()
    side.rollouter.start()
    groups = side.take(1, 4)
    side.rollouter.stop()
    assert not handed
    expected = Side(model, Admission("pacing", 4, 0), size=4)
    expected.rollouter.update_param_version(0)
    expected.rollouter.start()
    assert [r for g in groups for r in g.ordered] == [r for g in expected.take(1, 4) for r in g.ordered]
    expected.rollouter.stop()
