"""Runs of every mode, with every rule that decides: exact, deterministic or not; flipped decisions are named."""

import random

import pytest

from rlctl.experience.events import Evicted, Finished, Selected, Switched, SyncPhase
from rlctl.experience.schedule_events import (
    Admitted,
    Arrived,
    LendDecided,
    LoopChanged,
    QueueChanged,
    RateMeasured,
    Retained,
    ScheduleEvent,
    Wanted,
)  # fmt: skip
from tests.replay.scheduling.schedules import (
    changed,
    config_of,
    numbered_anew,
    places,
    require_named,
    statuses,
    told,
    without,
)  # fmt: skip
from tests.trainers.sessions import Run
from tests.trainers.threaded import LAYOUT, threaded

__all__ = ["threaded"]  # the fixture

STEPS = 4
COLOCATED = ("trainer.mode=colocate_async", "trainer.mini_batch_prompts=4", "rollout.max_new_tokens=64")
ONE = ("trainer.mode=one_step_off", *LAYOUT, "trainer.mini_batch_prompts=4")
SEPARATE = ("trainer.mode=separate_async", *LAYOUT, "trainer.mini_batch_prompts=2", "trainer.parameter_sync_step=2")
DROP = ("trainer.admission=drop", "trainer.warmup_batches=3", "trainer.max_staleness=1")
FILTER = ("algorithm.filter_groups=true", "trainer.warmup_batches=1")
VALIDATES = ("run.validate_prompts=4", "run.validate_every=2")
LENDS = (*SEPARATE, *VALIDATES, "placement.hybrid_replicas=1", "rollout.max_slots=2")

IN_TURN = {
    "sync, filtered": ("algorithm.filter_groups=true",),
    "colocated": (*COLOCATED, *VALIDATES),
    "colocated, dropped": (*COLOCATED, *DROP),
    "colocated, waits": (*COLOCATED, "trainer.admission=wait"),
    "colocated, begins again": (*COLOCATED, "trainer.partial_rollout=false"),
    "colocated, filtered": (*COLOCATED, *FILTER),
}
BESIDE = {
    "one step off": (*ONE, *VALIDATES),
    "separate": (*SEPARATE, *VALIDATES),
    "separate, dropped": (*SEPARATE, *DROP),
    "separate, waits": (*SEPARATE, "trainer.admission=wait"),
    "separate, filtered": (*SEPARATE, *FILTER),
    "separate, lends": LENDS,
}


@pytest.mark.parametrize("same", ["true", "false"])
@pytest.mark.parametrize("mode", [*IN_TURN.values(), *BESIDE.values()], ids=[*IN_TURN, *BESIDE])
def test_every_mode_is_exact(request, tmp_path, mode, same):
    if mode in BESIDE.values():
        request.getfixturevalue("threaded").hybrids = int(mode is LENDS)
    settings = (*mode, f"run.deterministic={same}")
    run = Run(tmp_path, *settings, steps=STEPS)
    findings = told(run.events, config_of(*settings, steps=STEPS))
    assert statuses(findings) == ["exact"] * STEPS, findings


@pytest.fixture(scope="module")
def lent(tmp_path_factory):
    """A run in the background that filters, validates beside the training and lends devices; and its configuration."""
    from rlctl.ops import session
    from tests.trainers.threaded import ThreadedGroup

    class Group(ThreadedGroup):
        hybrids = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "needs_processes", lambda config: False)
        patch.setattr(session, "InProcessGroup", Group)
        settings = (*LENDS, *FILTER, "rollout.max_new_tokens=32")
        return Run(tmp_path_factory.mktemp("lent"), *settings, steps=STEPS).events, config_of(*settings, steps=STEPS)


FLIPS = {
    Admitted: lambda e: {"room": e.room + 1},
    Wanted: lambda e: {"groups": e.groups - 1},
    Selected: lambda e: {"ordinals": [*e.ordinals[:-1], e.ordinals[-1] + 1]},
    Evicted: lambda e: {"ordinal": e.ordinal + 1},
    LendDecided: lambda e: {"lend": not e.lend},
    Switched: lambda e: {"to": "trainer" if e.to == "rollout" else "rollout"},
    RateMeasured: lambda e: {"finished": e.finished + 1},
    QueueChanged: lambda e: {"version": e.version + 1},
    LoopChanged: lambda e: {"version": e.version + 1} if e.change == "version" else {"change": "version"},
    SyncPhase: lambda e: {"version": e.version + 1},
}


@pytest.mark.parametrize("kind", FLIPS, ids=lambda kind: kind.__name__)
def test_a_decision_that_is_flipped_is_named_by_its_event(lent, kind):
    events, config = lent
    assert statuses(told(events, config)) == ["exact"] * STEPS
    found = places(events, kind)
    assert found, "the run made no such decision: nothing is shown"
    for place in random.Random(0).sample(found, min(8, len(found))):
        require_named(told(changed(events, place, **FLIPS[kind](events[place])), config), events[place].seq)


@pytest.mark.parametrize(
    "kind", (Wanted, Admitted, Arrived, Finished, Selected, Evicted, LendDecided, Switched, RateMeasured, QueueChanged)
)
def test_an_event_that_is_removed_is_missed_though_the_others_are_numbered_anew(lent, kind):
    events, config = lent
    steps = places(events, Selected)
    found = [place for place in places(events, kind) if place < steps[-1]]
    assert found
    for place in random.Random(0).sample(found, min(6, len(found))):
        if isinstance(events[place], QueueChanged) and events[place].change == "taken":
            continue  # what was put stays in the queue
        if kind is RateMeasured and not any(p > place for p in places(events, LendDecided)):
            continue  # nothing rests on it
        require_named(told(numbered_anew(without(events, place)), config))


def test_events_say_little(lent):
    import msgspec

    events, _ = lent
    sizes = [len(msgspec.json.encode(event)) for event in events]
    mine = [size for size, event in zip(sizes, events, strict=True) if isinstance(event, ScheduleEvent)]
    assert sum(mine) < 0.6 * sum(sizes)
    assert Retained not in {type(event) for event in events} or places(events, Retained)
