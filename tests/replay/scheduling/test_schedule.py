"""The schedule of a run that generates and trains in turns, made again from its events alone; tampering is named."""

import pytest

from rlctl.experience.events import Dispatched, Finished, GroupEnded, SegmentMade, Selected, StepEnded
from rlctl.experience.schedule_events import Admitted, Arrived, LoopChanged, ScheduleBegan, ScheduleEvent, Wanted
from tests.replay.scheduling.schedules import (
    changed,
    config_of,
    numbered_anew,
    places,
    require_named,
    statuses,
    swapped,
    told,
    without,
)  # fmt: skip
from tests.trainers.sessions import Run

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("run"), steps=STEPS)


@pytest.fixture(scope="module")
def config():
    return config_of(steps=STEPS)


def test_the_schedule_of_sync_is_exact(run, config):
    assert statuses(told(run.events, config)) == ["exact"] * STEPS


def test_every_single_event_that_is_removed_is_missed(run, config):
    for place in range(1, len(run.events) - 1):
        require_named(told(without(run.events, place), config), run.events[place + 1].seq)


KINDS = (
    ScheduleBegan, Wanted, Admitted, Dispatched, Arrived, SegmentMade, Finished, GroupEnded, Selected, LoopChanged,
    StepEnded,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_removed_event_is_missed_also_when_the_others_are_numbered_anew(run, config, kind):
    # The last step's end has nothing after it that would say that it is missing.
    for place in places(run.events, kind)[: -1 if kind is StepEnded else None]:
        require_named(told(numbered_anew(without(run.events, place)), config))


@pytest.mark.parametrize(
    "kind", (Admitted, Dispatched, Arrived, Finished, GroupEnded, Selected, LoopChanged, StepEnded)
)
def test_a_swapped_pair_is_named(run, config, kind):
    for place in places(run.events, kind):
        other = place + 1 if kind is not StepEnded else place - 8
        if type(run.events[other]) is not kind:
            require_named(told(swapped(run.events, place, other), config))


def test_a_decision_that_is_flipped_is_named_by_its_event(run, config):
    for place in places(run.events, Selected):
        event = run.events[place]
        ordinals = [*event.ordinals[:-1], event.ordinals[-1] + 1]
        require_named(told(changed(run.events, place, ordinals=ordinals), config), event.seq)
        ages = [*event.ages[:-1], 1]
        require_named(told(changed(run.events, place, ages=ages), config), event.seq)
    for place in places(run.events, Admitted):
        event = run.events[place]
        require_named(told(changed(run.events, place, room=event.room + 1), config), event.seq)
        require_named(told(changed(run.events, place, version=event.version + 1), config), event.seq)


@pytest.mark.parametrize("other", ["trainer.max_staleness=1", "trainer.prompts_per_step=8", "run.deterministic=true"])
def test_another_setting_is_named(run, other):
    found = require_named(told(run.events, config_of(other, steps=STEPS)))
    assert other.partition("=")[0] in found.reason


def test_a_log_of_an_older_version_is_unavailable_with_the_reason(run, config):
    old = numbered_anew(event for event in run.events if not isinstance(event, ScheduleEvent))
    findings = told(old, config)
    assert statuses(findings) == ["unavailable"] * STEPS and "version of rlctl" in findings[0].reason
