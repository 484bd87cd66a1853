"""What of nccl and hccl runs without their devices: everything but the library's own calls, here with gloo under it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.backends.device_group import DeviceGroup
from rlctl.sync.backends.hccl import HcclEngine, HcclGroup
from rlctl.sync.backends.kimi import KimiEngine
from rlctl.sync.backends.nccl import WATCHDOG, NcclEngine, NcclGroup, environment
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member
from rlctl.sync.errors import DeadlineError, GivenUpError, PeerLostError
from rlctl.sync.rendezvous import MeetingStore
from tests.sync.wire_cases import assert_same, blank, hard_tensors

_Gloo: Any = torch.distributed.ProcessGroupGloo


class HostGroup(DeviceGroup):
    """A device group whose library is gloo."""

    def _make(self, store: MeetingStore, rank: int, size: int, deadline: Deadline) -> Any:
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=max(deadline.remaining, 0.001))
        return _Gloo(store, rank, size, options)

    def _abort(self, group: Any) -> None:
        pass  # gloo has none


class HostEngine(NcclEngine):
    kind = "cpu"
    group_class = HostGroup


def together(*actions: Callable[[], Any]) -> list[Any]:
    return [future.result(30) for future in [call(action, "test") for action in actions]]


@contextmanager
def engines(trainers: int, rollouts: int, **options: Any) -> Iterator[tuple[list[HostEngine], list[HostEngine]]]:
    given = EngineOptions(**{"bucket_size": 8192, "timeout": 10.0, "token": "nccl", **options})
    left = [HostEngine(Member("trainer", rank, trainers), given) for rank in range(trainers)]
    right = [HostEngine(Member("rollout", rank, rollouts), given) for rank in range(rollouts)]
    yield left, right
    for engine in (*left, *right):
        engine.close()


def meet(trainers: list[HostEngine], rollouts: list[HostEngine]) -> None:
    everybody = [*trainers, *rollouts]
    kwargs = HostEngine.build_topology(len(trainers), len(rollouts), [e.prepare() for e in everybody])
    together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(everybody, kwargs, strict=True)))


def test_every_tensor_arrives_exact() -> None:
    with engines(2, 2, senders=2) as (trainers, rollouts):
        for version in range(3):
            meet(trainers, rollouts)
            source, targets = hard_tensors(0, version), [blank(0), blank(0)]
            together(
                *(lambda e=e, s=source, v=version: e.send_weights(s.items(), v) for e in trainers),
                *(lambda e=e, t=t, v=version: e.receive_into(v, t) for e, t in zip(rollouts, targets, strict=True)),
            )
            for engine in (*trainers, *rollouts):
                engine.finalize()
            for target in targets:
                assert_same(source, target)


def test_a_cancelled_wait_ends_at_its_next_look() -> None:
    with engines(1, 1) as (trainers, rollouts):
        meet(trainers, rollouts)
        receiving = call(lambda: rollouts[0].receive_into(1, {}), "receiver")
        time.sleep(0.1)
        assert not receiving.done()
        begin = time.monotonic()
        rollouts[0].cancel()
        assert isinstance(receiving.exception(5), (PeerLostError, GivenUpError))
        assert time.monotonic() - begin < 2
        group = trainers[0]._groups[0]
        trainers[0].cancel()
        with pytest.raises(PeerLostError, match=r"what \(rollout 0\): the group was ended"):
            group.broadcast(torch.zeros(1), Deadline(1), "what")


def test_a_wait_ends_by_its_deadline() -> None:
    with engines(1, 1) as (trainers, rollouts):
        meet(trainers, rollouts)
        work = rollouts[0]._groups[0].broadcast(torch.zeros(1), Deadline(10), "waiting for a bucket")
        begin = time.monotonic()
        with pytest.raises(DeadlineError, match=r"waiting for a bucket \(trainer 0\): no answer within 200 ms"):
            work.wait(Deadline(0.2))
        assert time.monotonic() - begin < 1
        trainers[0]._groups[0].broadcast(torch.zeros(1), Deadline(10), "sending").wait(Deadline(5))
        work.wait(Deadline(5))


def test_a_group_that_cannot_connect_in_time_is_given_up() -> None:
    class Slow(HostGroup):
        def _connect(self, group: Any, device: torch.device) -> None:
            time.sleep(1)

    class Refusing(HostGroup):
        def _connect(self, group: Any, device: torch.device) -> None:
            raise RuntimeError("NCCL error: unhandled system error\nand its trace")

    class Alone(HostGroup):
        def _make(self, store: MeetingStore, rank: int, size: int, deadline: Deadline) -> Any:
            return None

    store = MeetingStore(Deadline(1), None, None)
    for kind, error, what in (
        (Slow, DeadlineError, "connecting trainer 0 to rollout 0: no answer within 100 ms"),
        (Refusing, PeerLostError, "connecting trainer 0 to rollout 0: NCCL error: unhandled system error"),
    ):
        made = type("Made", (kind,), {"_make": Alone._make})
        with pytest.raises(error) as caught:
            made(store, 0, ["trainer 0", "rollout 0"], "cpu", Deadline(0.1))
        assert caught.value.message == what


def test_what_the_watchdog_reads_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before = dict(os.environ)
    with pytest.raises(OSError, match="broken"), environment(WATCHDOG):
        assert {name: os.environ[name] for name in WATCHDOG} == dict(WATCHDOG)
        raise OSError("broken")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("engine", "here", "reason"),
    [
        (NcclEngine, torch.cuda.is_available(), "no NCCL|no CUDA device"),
        (HcclEngine, find_spec("torch_npu") is not None, "torch_npu is not installed"),
    ],
)
def test_what_is_missing_is_said_with_a_remedy(engine: type[CheckpointEngine], here: bool, reason: str) -> None:
    if here:
        engine.available()
        return
    with pytest.raises(UnavailableError, match=reason) as caught:
        engine.available()
    assert "gloo" in (caught.value.fix or "")


def test_a_device_of_another_kind_is_refused() -> None:
    member = Member("trainer", 0, 1)
    with pytest.raises(UsageError, match="nccl moves weights between cuda devices, and the engine's device is cpu"):
        NcclEngine(member, EngineOptions())
    with pytest.raises(UsageError, match="hccl moves weights between npu devices"):
        HcclEngine(member, EngineOptions(device="cuda:1"))
    with pytest.raises(UsageError, match="kimi knows no device meta"):
        KimiEngine(member, EngineOptions(device="meta"))


def test_only_group_and_device_differ() -> None:
    assert (NcclEngine.kind, NcclEngine.group_class) == ("cuda", NcclGroup)
    assert (HcclEngine.kind, HcclEngine.group_class) == ("npu", HcclGroup)
    assert set(vars(HcclEngine)) - {"__module__", "__doc__", "__abstractmethods__", "_abc_impl"} == {
        "name",
        "kind",
        "group_class",
        "available",
    }
