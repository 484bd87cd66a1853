"""Runs on devices that both train and generate."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from rlctl.config import Layer
from rlctl.errors import UnavailableError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, ReplicaChanged, StepEnded, SyncEnded, SyncPhase
from rlctl.experience.segments import RequestKey
from rlctl.ops.inputs import find_inputs
from rlctl.ops.memory_profile import profile_memory
from rlctl.ops.planned_model import planned_model
from rlctl.ops.resolve import Resolution, resolve
from rlctl.ops.session import Session
from rlctl.ops.topology_plan import plan_topology
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.runtime.hybrid.group import HybridGroup, require_supported, rollout_setup
from rlctl.runtime.in_process import DTYPES
from rlctl.runtime.ranks.supervisor import RankError
from rlctl.runtime.signals import StopSignal
from rlctl.schema import Config
from rlctl.sync.report import SyncError

STALL = 15.0
SMALL = {
    "placement.layout": "hybrid",
    "placement.trainer_ranks": 2,
    "placement.replicas": 1,
    "placement.replica_tp": 2,
    "cluster.devices_per_node": 2,
    "sync.backend": "reshard",
    "sync.timeout": 120.0,
    "trainer.rank_timeout": 120.0,
    "trainer.prompts_per_step": 8,
    "trainer.mini_batch_prompts": 8,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 24,
    "run.validate_prompts": 0,
    "run.threads": 1,
    "run.checkpoint_every": 0,
}


def on_paper(config: Config) -> int:
    """Bytes of a sync as rlctl topology says them."""
    plan = plan_topology("small", config, planned_model(config.model.path, "F32", where="model.path"))
    assert plan.moved
    return plan.moved


def resolution(*overrides: str) -> Resolution:
    return resolve(env={}, layers=[Layer("small", SMALL)], overrides=["run.steps=2", *overrides])


def configured(*overrides: str) -> Config:
    return resolution(*overrides).config


@pytest.mark.new_interpreters
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["sync", pytest.param("colocate_async", marks=pytest.mark.slow)])
def test_a_mode_trains_and_every_switch_is_told(tmp_path: Path, mode: str) -> None:
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    config = configured(f"trainer.mode={mode}", *([f"sync.timeout={STALL}"] if mode == "colocate_async" else []))
    with Session(config, find_inputs(config), log, tmp_path / "ckpt", StopSignal(), output=tmp_path / "log") as session:
        group = session.parts.rollouts
        assert isinstance(group, HybridGroup)
        session.trainer.fit()
        ended = [e for e in events if isinstance(e, SyncEnded)]
        assert [(e.version, e.status) for e in ended] == [(version, "committed") for version in range(3)]
        assert {e.bytes for e in ended} == {on_paper(config)}
        phases = [e.phase for e in events if isinstance(e, SyncPhase) and e.version == 1]
        assert phases == ["reshard", "wake_kv", "agree", "offload_trainer"]
        changes = [e.change for e in events if isinstance(e, ReplicaChanged)]
        assert changes == ["joined", "slept", "woke", "slept", "woke"]
        assert group.versions() == {"0": 2}
        if mode == "sync":
            tokens_are_those_of_one_process(session, config)
            end_of_a_rank(group)
        else:
            stall_of_a_rank(group)


def tokens_are_those_of_one_process(session: Session, config: Config) -> None:
    group = session.parts.rollouts
    assert isinstance(group, HybridGroup)
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    requests = [Request(RequestKey(900 + n // 2, n % 2), (1 + n, 2, 3), params, seed=7) for n in range(6)]
    found = group.engine.generate(requests)
    weights = list(group.model.per_tensor_params())
    engine = EmbeddedEngine(session.source, dtype=DTYPES[config.model.dtype], max_length=64)
    engine.load_weights(weights, 0)
    expected = engine.generate(requests)
    assert [o.key for o in found] == [o.key for o in expected]
    same = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    assert same >= len(requests) - 1, (found, expected)  # noise may fall on the edge between two tokens


def end_of_a_rank(group: HybridGroup) -> None:
    os.kill(group.model.ranks.pids[1], signal.SIGKILL)
    with pytest.raises((RankError, SyncError), match="trainer rank 1 of 2 died in switch: SIGKILL"):
        group.sync_weights(3)
    assert group.versions() == {"0": None}


def stall_of_a_rank(group: HybridGroup) -> None:
    group.sleep()
    os.kill(group.model.ranks.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(SyncError, match=r"the switch to version 3 failed: .*rank 1"):
        group.sync_weights(3)
    assert STALL < time.monotonic() - begin < STALL + 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_stalls_while_all_generate_is_named_in_time(tmp_path: Path) -> None:
    config = configured(f"trainer.rank_timeout={STALL}")
    with Session(
        config, find_inputs(config), EventLog(None), tmp_path / "ckpt", StopSignal(), output=tmp_path / "log"
    ) as session:
        group = session.parts.rollouts
        assert isinstance(group, HybridGroup)
        group.sync_weights(0)
        os.kill(group.model.ranks.pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        params = SamplingParams(max_new_tokens=8, temperature=1.0)
        with pytest.raises(RankError, match="trainer rank 1 of 2 stalled in decode"):
            group.engine.generate([Request(RequestKey(0, 0), (1, 2, 3), params, seed=7)])
        assert STALL < time.monotonic() - begin < STALL + 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_deltas_trains_to_the_same_bits_and_keeps_what_was_predicted(tmp_path: Path) -> None:
    found = [trained(tmp_path / str(delta), f"sync.delta={delta}") for delta in (True, False)]
    (weights, syncs, lines), (expected, whole, _) = found
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    parts = [rank.parts for rank in profile_memory(resolution("sync.delta=true")).estimate.ranks]
    kept = max(rank["engine_weights"] + rank["sent_before"] for rank in parts)
    assert [sync.kept for sync in syncs] == [kept] * 3
    assert [line["sync_kept_bytes"] for line in lines] == [kept] * 2
    assert [sync.kept for sync in whole] == [0] * 3
    assert syncs[0].bytes == whole[0].bytes == on_paper(configured()) >= syncs[2].bytes


def trained(folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], list[SyncEnded], list[dict[str, float]]]:
    """Weights after two steps, the syncs of the run, and what was reported of each step."""
    folder.mkdir()
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    config = configured("run.deterministic=true", "rollout.max_new_tokens=8", *overrides)
    with Session(config, find_inputs(config), log, folder / "ckpt", StopSignal(), output=folder / "log") as session:
        session.trainer.fit()
        group = session.parts.rollouts
        assert isinstance(group, HybridGroup)
        weights = {name: tensor.clone() for name, tensor in group.model.per_tensor_params()}
    lines = [event.figures for event in events if isinstance(event, StepEnded)]
    return weights, [event for event in events if isinstance(event, SyncEnded)], lines


def test_what_such_devices_cannot_do_is_refused_first() -> None:
    require_supported(configured())
    assert rollout_setup(configured("sync.delta=true"), "").delta
    assert rollout_setup(configured("placement.pad=true"), "").pad
    lora = "model.lora.rank=2"
    require_supported(configured(lora))
    for overrides, where in (
        (("rollout.engine=sglang",), "rollout.engine"),
        ((lora, "model.lora.use_dora=true"), "model.lora.use_dora"),
    ):
        with pytest.raises(UnavailableError) as caught:
            require_supported(configured(*overrides))
        assert caught.value.where == where
