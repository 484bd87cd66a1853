"""The event log: every kind round-trips, a cut line is reported, work done again is left out of the lineage."""

import threading

import msgspec
import numpy as np
import pytest

from rlctl.experience import events as kinds
from rlctl.experience.event_log import EventLog, lineage, read_events
from rlctl.experience.events import AnyEvent, Dispatched, Noted, RunStarted, StepEnded
from rlctl.experience.figures import figures_out

SAMPLES = {str: "x", int: 3, bool: True, float: 0.5, list[int]: [1], list[str]: ["a"], dict[str, float]: {"a": 1.0}}


def example(kind: type) -> kinds.Event:
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.name in ("seq", "time", "attempt"):
            continue
        values[field.name] = SAMPLES.get(field.type)
        if values[field.name] is None:
            literal = getattr(field.type, "__args__", None)
            is_literal = literal is not None and isinstance(literal[0], str)
            values[field.name] = literal[0] if is_literal else [] if "list" in str(field.type) else {}
    return kind(**values)


@pytest.mark.parametrize("kind", AnyEvent.__args__, ids=lambda k: k.__name__)
def test_every_kind_of_event_round_trips(kind, tmp_path):
    log = EventLog(tmp_path / "events.jsonl", attempt=2, clock=lambda: 12.5)
    written = example(kind)
    log.emit(written)
    log.close()
    found = read_events(tmp_path / "events.jsonl")
    assert found.faults == []
    assert found.events == [written]
    assert (found.events[0].seq, found.events[0].time, found.events[0].attempt) == (0, 12.5, 2)


def test_a_cut_last_line_is_reported_and_the_next_attempt_goes_on_after_it(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for ordinal in range(3):
        log.emit(Dispatched(ordinal=ordinal, row=0, samples=1, version=0))
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    again = EventLog(path, attempt=1)
    assert again.next_seq == 3
    again.emit(Noted(message="later"))
    again.close()
    found = read_events(path)
    assert [number for number, _ in found.faults] == [3]
    assert [type(e).__name__ for e in found.events] == ["Dispatched", "Dispatched", "Noted"]
    assert found.events[-1].seq == 3


def test_figures_that_are_not_finite_are_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    odd = {"grad_norm": float("nan"), "high": float("inf"), "low": float("-inf"), "loss": 0.5}
    log.emit(StepEnded(step=1, version=1, metrics=figures_out(odd)))
    log.close()
    found = read_events(path)
    assert found.faults == []
    np.testing.assert_equal(found.events[0].figures, odd)


def test_foreign_lines_are_faults_not_errors(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"dispatched","ordinal":"one"}\nnot json\n{"kind":"never_heard_of"}\n\xff\xfe\n')
    found = read_events(path)
    assert found.events == []
    assert [number for number, _ in found.faults] == [1, 2, 3, 4]


def test_lineage_leaves_out_work_that_was_lost_and_done_again():
    log = EventLog(None)
    seen: list[kinds.Event] = []
    log.subscribe(seen.append)
    log.emit(RunStarted(mode="sync", seed=0))
    log.emit(StepEnded(step=1, version=1, metrics={"try": 0.0}))
    saved = log.next_seq - 1
    log.emit(StepEnded(step=2, version=2, metrics={"try": 0.0}))
    log.emit(RunStarted(mode="sync", seed=0, from_step=1, from_seq=saved))
    log.emit(StepEnded(step=2, version=2, metrics={"try": 1.0}))
    steps = [(e.step, e.metrics["try"]) for e in lineage(seen) if isinstance(e, StepEnded)]
    assert steps == [(1, 0.0), (2, 1.0)]
    log.emit(RunStarted(mode="sync", seed=0))
    assert [type(e).__name__ for e in lineage(seen)] == ["RunStarted"]


def test_threads_share_one_order(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    heard: list[int] = []
    log.subscribe(lambda event: heard.append(event.seq))
    log.subscribe(lambda event: log.emit(Noted(message="echo")) if isinstance(event, Dispatched) else None)

    def emit(number: int) -> None:
        for ordinal in range(200):
            log.emit(Dispatched(ordinal=ordinal, row=number, samples=1, version=0))
            if not ordinal % 50:
                log.flush()

    threads = [threading.Thread(target=emit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    log.close()
    found = read_events(tmp_path / "events.jsonl")
    assert not found.faults
    assert [event.seq for event in found.events] == list(range(4 * 400))
    assert sorted(heard) == list(range(4 * 400))
    for number in range(4):
        mine = [e.ordinal for e in found.events if isinstance(e, Dispatched) and e.row == number]
        assert mine == list(range(200))


def test_lines_that_are_deep_or_endless_are_reported(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit(Noted(message="a"))
    log.close()
    good = path.read_bytes()
    monkeypatch.setattr("rlctl.experience.event_log.MOST_LINE", 4_000_000)
    deep = b'{"kind":"Noted","message":' + b"[" * 500_000
    path.write_bytes(good + deep + b"\n" + good + b"x" * 4_000_001 + b"\n" + good)
    found = read_events(path)
    assert [number for number, _ in found.faults] == [2, 4]
    assert "nothing behind it was read" in found.faults[1][1]
    assert len(found.events) == 2
