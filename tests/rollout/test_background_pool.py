"""The rollout side over a pool of replicas: syncs of every kind, deaths and lockstep, while a trainer takes batches."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlctl.errors import RlctlError
from rlctl.experience.admission import Admission
from rlctl.experience.events import Aborted, SegmentMade, Selected
from rlctl.rollout.pool import ReplicaPool
from rlctl.sync.deadline import Deadline
from rlctl.sync.protocols import Interruption
from tests.rollout.background import Side, sleeps, tiny_model
from tests.rollout.thread_replicas import ThreadReplica

BATCH, STEPS = 4, 5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


class Pooled(Side):
    """A rollout side whose replicas decode in threads of their own, or in lockstep."""

    def __init__(self, model: Any, admission: Admission) -> None:
        lockstep = admission.in_order
        self.made = lambda name: ThreadReplica(model, name, lockstep=lockstep, max_slots=8, pause=0.0005)
        self.replicas = [self.made(name) for name in "ab"]
        self.pool = ReplicaPool(self.replicas, deterministic=lockstep, patience=1.0)
        super().__init__(model, admission, pool=self.pool)

    def sync_all(self, version: int, how: Interruption) -> None:
        """Bring weights as a sync beside the loop does."""
        self.rollouter.pause()
        with self.pool.syncing():
            for replica in self.replicas:
                if not replica.lost:
                    replica.interrupt(how, version, Deadline(30))
                    engine = replica._mortal.engine
                    assert engine.load_weights(self.model.state_dict().items(), version).complete
                    replica.resume(version, Deadline(30))
        self.rollouter.update_param_version(version)
        self.rollouter.resume()

    def close(self) -> None:
        self.rollouter.stop()
        self.pool.close()
        for replica in self.replicas:
            replica.close()


def train(side: Pooled, how: Interruption, seed: int = 0, rounds: int = 2, kill: bool = False) -> list[Any]:
    nap, rng, trained = sleeps(seed, 0.02), random.Random(seed), []
    for step in range(1, STEPS + 1):
        for _ in range(rounds):
            groups = side.take(step, BATCH // rounds)
            trained += [(r.key, r.token_ids, r.versions) for group in groups for r in group.ordered]
            nap()
        if kill:
            lost = [index for index, replica in enumerate(side.replicas) if replica.lost]
            for index in lost:
                side.replicas[index].close()
                side.replicas[index] = side.made("ab"[index])
                side.pool.replace(side.replicas[index])
            if not lost:
                side.replicas[rng.randrange(2)].kill()
        if side.rollouter.deterministic:
            side.rollouter.wait_held(30.0)
        if step % 2:
            with side.rollouter.saving():
                side.rollouter.state()
        side.sync_all(step, how)
    return trained


@pytest.mark.parametrize("how", ["abort", "keep", "wait"])
@pytest.mark.parametrize("kill", [False, True])
def test_a_trainer_beside_a_pool(model: Any, how: Interruption, kill: bool) -> None:
    alone = Side(model, Admission("pacing", BATCH * STEPS, 0))
    alone.rollouter.submit(alone.cursor.take(BATCH * STEPS), 0)
    expected = {r.key: r.token_ids for group in alone.take(1, BATCH * STEPS) for r in group.ordered}
    side = Pooled(model, Admission("pacing", BATCH, 2, 1.0, batches=STEPS))
    try:
        side.rollouter.update_param_version(0)
        side.rollouter.start()
        trained = train(side, how, kill=kill)
    finally:
        side.close()
    assert {key: ids for key, ids, _ in trained} == expected
    assert max(age for event in side.of(Selected) for age in event.ages) <= 2
    assert {event.replica for event in side.of(SegmentMade)} == {"a", "b"}
    assert {event.why for event in side.of(Aborted)} <= {"sync", "checkpoint"}
    assert len(side.buffer) == 0


def test_without_replicas_the_run_ends_by_name(model: Any) -> None:
    side = Pooled(model, Admission("pacing", BATCH, 1, 1.0))
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    try:
        side.take(1, BATCH)
        for replica in side.replicas:
            replica.kill("out of memory")
        with pytest.raises(RlctlError, match=r"no replica has served.*out of memory"):
            side.take(2, 2 * BATCH)
        with pytest.raises(RlctlError, match="no replica has served"):
            side.rollouter.stop()
    finally:
        side.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_in_lockstep_the_trainers_pace_changes_nothing(model: Any, ahead: int) -> None:
    def run(seed: int) -> list[Any]:
        side = Pooled(model, Admission("pacing", BATCH, 2, 1.0, in_order=True, batches=STEPS))
        buffer, take = side.buffer, side.take

        def towards_the_goal(step: int, count: int) -> list[Any]:
            goal = buffer.goal(step - 1, ahead)
            side.rollouter.start(lambda: buffer.selected + buffer.prefix() >= goal)
            return take(step, count)

        side.take = towards_the_goal  # type: ignore[method-assign, assignment]
        side.rollouter.update_param_version(0)
        try:
            return train(side, "abort", seed)
        finally:
            side.close()

    expected = run(0)
    assert len(expected) == 2 * BATCH * STEPS
    for seed in range(1, 3):
        assert run(seed) == expected
