"""The synchronizer's edges: their order, what overlaps, and that every failure ends resumed or stopped, in time."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import rlctl
from rlctl.errors import RlctlError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import SyncPhase
from rlctl.experience.message_queue import MessageQueue
from rlctl.rollout.rollouter import Evaluation
from rlctl.sync.errors import DeadlineError
from rlctl.sync.report import SyncError, SyncReport
from rlctl.trainers.synchronizer import ParameterSynchronizer, Validation
from tests.waiting import until

FOUND = Evaluation(4, 0.5, {}, 3.0)
EDGES = ("pause", "transfer", "update")


class Side:
    """A rollout side and its loop that note what is asked of them; one call may be made to fail or to hang."""

    def __init__(self, *, hybrids: int = 0) -> None:
        self.calls: list[str] = []
        self.hybrids = hybrids
        self.serving: int | None = 0
        self.paused = self.stopped = False
        self.faults: dict[str, Callable[[], None]] = {}
        self.validating = threading.Event()
        self.validating.set()
        self.released = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            self.faults[name]()

    def hang(self) -> None:
        self.released.wait(60.0)

    # The replicas.

    def sync_weights(self, version: int) -> SyncReport:
        self.note(f"transfer {version}")
        self.serving = None
        self.note("transfer")
        self.serving = version
        return SyncReport(version, 1, 4, 0.1, {})

    def to_rollout(self, version: int) -> None:
        self.note(f"lend {version}")

    def to_trainer(self) -> None:
        self.note("take back")

    def abort(self) -> None: ...

    def sleep(self) -> None: ...

    def versions(self) -> Mapping[str, int | None]:
        return {"a": self.serving}

    # The loop.

    def pause(self) -> None:
        self.note("pause")
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.note("resume")

    def stop(self) -> None:
        self.stopped = True
        self.note("stop")

    def update_param_version(self, version, *, validate=None) -> Future:
        self.note(f"update {version}")
        self.note("update")

        def answer():
            self.note("validation begins")
            assert self.validating.wait(60.0)
            self.note("validation")
            return FOUND

        if validate is not None:
            return self._threads.submit(answer)
        done: Future = Future()
        done.set_result(None)
        return done

    def state(self):
        self.note("state")
        return {"buffer": 7}

    def close(self) -> None:
        self.released.set()
        self.validating.set()
        self._threads.shutdown()


@pytest.fixture
def side():
    one = Side(hybrids=1)
    yield one
    one.close()


def synchronizer(side: Side, *, timeout: float = 60.0, validate_timeout: float = 60.0, log: EventLog | None = None):
    return ParameterSynchronizer(
        side, side, MessageQueue(), log or EventLog(None), held_out=["prompt"], timeout=timeout,
        validate_timeout=validate_timeout,
    )  # fmt: skip


def test_the_name_is_there_for_users():
    assert rlctl.ParameterSynchronizer is ParameterSynchronizer


def test_the_order_of_the_edges(side):
    phases: list[str] = []
    log = EventLog(None)
    log.subscribe(lambda event: phases.append(event.phase) if isinstance(event, SyncPhase) else None)
    one = synchronizer(side, log=log)
    assert one.sync_weights(3).version == 3
    one.wait_last_valid()
    assert side.calls == ["pause", "transfer 3", "transfer", "update 3", "update", "resume"]
    assert phases == ["pause", "version", "transfer", "update"]
    assert one.queue.param_version == 3 and not side.paused
    one.wait_last_valid()  # there is none any more


def test_a_validation_runs_on_while_training_does_and_the_resume_waits_for_it(side):
    side.validating.clear()
    one = synchronizer(side)
    one.sync_weights(1, validate=True, global_steps=5)
    until(lambda: "validation begins" in side.calls)
    assert side.paused and "resume" not in side.calls and not len(one.queue)
    side.validating.set()
    one.wait_last_valid()
    assert side.calls[-2:] == ["validation", "resume"] and not side.paused
    assert one.queue.drain() == [(1, Validation(5, FOUND))]


def test_the_next_sync_waits_for_the_last_validation(side):
    side.validating.clear()
    one = synchronizer(side)
    one.sync_weights(1, validate=True)
    thread = threading.Thread(target=one.sync_weights, args=(2,))
    thread.start()
    until(lambda: "validation begins" in side.calls)
    assert "transfer 2" not in side.calls
    side.validating.set()
    thread.join(60.0)
    one.wait_last_valid()
    assert side.calls.index("resume") < side.calls.index("transfer 2")
    assert [m.version for m in one.queue.drain()] == [1]


def test_the_trainers_devices_are_lent_to_a_validation(side):
    one = synchronizer(side)
    one.sync_weights(2, validate=True, global_steps=2, use_trainer_do_validate=True)
    kept = [call for call in side.calls if call in ("lend 2", "validation", "take back", "resume", "transfer")]
    assert kept == ["transfer", "lend 2", "validation", "resume", "take back"]
    side.calls.clear()
    one.sync_weights(3, use_trainer_do_validate=True)
    one.wait_last_valid()
    assert "lend 3" not in side.calls  # there is nothing to validate


def test_a_failed_validation_resumes_and_is_told_at_the_next_wait(side):
    def fail() -> None:
        raise RuntimeError("no answers")

    side.faults["validation"] = fail
    one = synchronizer(side)
    one.sync_weights(1, validate=True)
    with pytest.raises(RuntimeError, match="no answers"):
        one.wait_last_valid()
    assert not side.paused and side.calls[-1] == "resume"
    one.sync_weights(2)
    one.wait_last_valid()


def test_a_validation_that_never_ends_is_given_up_and_resumed(side):
    side.validating.clear()
    one = synchronizer(side, validate_timeout=0.05)
    one.sync_weights(1, validate=True)
    with pytest.raises(DeadlineError, match="version update, with its validation: no answer within 50 ms"):
        one.wait_last_valid()
    assert not side.paused and side.calls[-1] == "resume"


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_that_hangs_is_named_and_nothing_stays_paused(side, edge):
    side.faults[edge] = side.hang
    one = synchronizer(side, timeout=0.05)
    one._edge = _without_grace(one)
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=f"weight sync to version 1: {edge}: no answer"):
        one.sync_weights(1)
    assert time.monotonic() - begin < 30.0
    # In the middle of a transfer nothing serves: the loop is ended. Else it goes on.
    assert side.stopped == (edge == "transfer")
    assert side.stopped or side.calls[-1] == "resume"


def test_a_pause_that_comes_too_late_does_not_stay(side):
    side.faults["pause"] = side.hang
    with pytest.raises(DeadlineError, match="pause"):
        synchronizer(side, timeout=0.05).sync_weights(1)
    side.released.set()
    until(lambda: side.calls.count("resume") == 2)
    assert not side.paused


def _without_grace(one: ParameterSynchronizer):
    edge = one._edge
    return lambda name, version, act, grace=0.0, undo=None: edge(name, version, act, undo=undo)


def test_a_transfer_that_leaves_the_old_version_serving_goes_on_with_it(side):
    def fail() -> None:
        side.serving = 0
        raise SyncError("rolled back", fenced=[])

    side.faults["transfer"] = fail
    one = synchronizer(side)
    with pytest.raises(SyncError, match="rolled back"):
        one.sync_weights(1)
    assert side.calls[-1] == "resume" and not side.stopped and not side.paused


def test_when_ending_fails_too_the_first_error_is_the_one_raised(side):
    def fail() -> None:
        raise SyncError("none serves", fenced=["a"])

    def also() -> None:
        raise RlctlError("it does not stop")

    side.faults |= {"transfer": fail, "stop": also}
    with pytest.raises(SyncError, match="none serves") as caught:
        synchronizer(side).sync_weights(1)
    assert any("it does not stop" in note for note in caught.value.__notes__)


def test_what_must_survive_is_asked_for_once_the_last_sync_is_over(side):
    side.validating.clear()
    one = synchronizer(side)
    one.sync_weights(1, validate=True)
    saved: list[Mapping] = []
    thread = threading.Thread(target=lambda: saved.append(one.rollouter_save_checkpoint()))
    thread.start()
    until(lambda: "validation begins" in side.calls)
    assert "state" not in side.calls
    side.validating.set()
    thread.join(60.0)
    assert saved == [{"buffer": 7}] and side.calls[-2:] == ["resume", "state"]


def test_whatever_fails_it_ends_resumed_or_stopped():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        side = Side(hybrids=rng.randint(0, 1))
        one = synchronizer(side, timeout=5.0, validate_timeout=5.0)

        def fail() -> None:
            raise rng.choice([RuntimeError, NoneServesError])("broke")

        names = [*EDGES, "validation", "lend 1", "lend 2", "take back", "transfer 1", "transfer 2"]
        side.faults = dict.fromkeys(rng.sample(names, rng.randint(0, 2)), fail)
        failed = 0
        for version in (1, 2):
            try:
                one.sync_weights(version, rng.random() < 0.5, version, rng.random() < 0.5)
                one.wait_last_valid()
            except (RuntimeError, SyncError):
                failed += 1
        assert side.stopped or not side.paused, side.calls
        assert failed or not side.stopped
        side.close()


class NoneServesError(SyncError):
    def __init__(self, message: str) -> None:
        super().__init__(message, fenced=["a"])
