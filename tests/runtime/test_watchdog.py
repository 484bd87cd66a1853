"""Waits that see nothing change: on a clock of the test's own."""

import threading

import pytest

from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.segments import RequestKey, Segment
from rlctl.runtime.watchdog import StalledError, Watchdog, missing_responses


class World:
    """A wait, its clock, and what came of it."""

    def __init__(self, *, requeue=lambda: None) -> None:
        self.now = 100.0
        self.changes = 0
        self.told: list[str] = []
        self.requeued: list[float] = []
        self.act = requeue
        self.dog = Watchdog(
            10.0,
            changes=lambda: self.changes,
            waiting=lambda: ["prompt 4 waits for replica b"],
            requeue=self.requeue,
            tell=self.told.append,
            clock=lambda: self.now,
        )
        self.dog.begin()

    def requeue(self) -> None:
        self.requeued.append(self.now)
        self.act()

    def after(self, seconds: float) -> None:
        self.now += seconds
        if self.dog.due():
            self.dog.act()


def test_while_something_changes_nothing_is_said():
    world = World()
    for _ in range(100):
        world.changes += 1
        world.after(9.9)
        world.after(9.9)
    assert not world.told and not world.requeued


def test_it_tells_who_waits_then_queues_again_then_fails():
    world = World()
    world.after(9.9)
    assert not world.told
    world.after(0.1)
    assert world.requeued == [110.0] and len(world.told) == 1
    assert "prompt 4 waits for replica b" in world.told[0] and "test_watchdog.py" in world.told[0]
    world.after(9.9)
    assert len(world.told) == 1
    with pytest.raises(StalledError, match="twice, also after all requests were queued again:\n  prompt 4") as caught:
        world.after(0.1)
    assert "trainer.stall_timeout" in str(caught.value.fix)


def test_a_requeue_that_helps_begins_anew():
    world = World()
    world.after(10.0)
    world.changes += 1
    world.after(9.0)
    world.after(9.0)
    assert len(world.requeued) == 1
    world.after(1.0)
    assert len(world.requeued) == 2


def test_what_a_requeue_changes_and_takes_does_not_count():
    world = World()

    def slow() -> None:
        world.changes += 5
        world.now += 50.0

    world.act = slow
    world.after(10.0)
    world.after(9.0)
    with pytest.raises(StalledError):
        world.after(1.0)


def test_a_wait_does_not_count_what_went_before():
    world = World()
    world.now += 1000.0
    world.dog.begin()
    world.after(9.0)
    assert not world.told


def test_the_stacks_of_other_threads_are_told():
    met, over = threading.Event(), threading.Event()

    def a_thread_that_sits_here() -> None:
        met.set()
        over.wait(60.0)

    thread = threading.Thread(target=a_thread_that_sits_here)
    thread.start()
    assert met.wait(60.0)
    world = World()
    world.after(10.0)
    over.set()
    thread.join(60.0)
    assert "a_thread_that_sits_here" in world.told[0]


def test_missing_responses_are_named():
    groups = [PromptGroup(n, n, "", [1], 3, dispatched=2) for n in range(10)]
    groups[0].add(Response(RequestKey(0, 1), [Segment([1], [-0.1])], "stop", 1.0))
    groups[0].goes_on(Response(RequestKey(0, 2), [Segment([1, 2], [-0.1, -0.2])], "abort"))
    lines = missing_responses(groups)
    assert len(lines) == 9 and lines[-1] == "and 2 more prompts"
    assert lines[0] == (
        "prompt 0, dispatched under version 2, waits for 2 of 3 responses (0, 2); 2 tokens of them are known"
    )
