"""NIXL when something goes wrong: damage, lost readers, broken chains, a package that does not load."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import UnavailableError
from rlctl.sync.backends import nixl_library
from rlctl.sync.backends.nixl import NixlEngine
from rlctl.sync.backends.nixl_agent import NixlAgent
from rlctl.sync.backends.nixl_links import Outlet
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, PeerLostError
from rlctl.sync.member import described
from tests.sync.nixl_weights import check, mixed
from tests.sync.probes import big
from tests.sync.side import side, together
from tests.sync.squad import Managed, Pool, Squad
from tests.sync.wire_cases import assert_same

pytestmark = pytest.mark.nixl
BIG = "tests.sync.probes:big"


def test_a_broken_chain_is_closed_again(pool: Pool) -> None:
    managed = Managed(
        Squad(pool, "nixl", 1, 3, timeout=10.0, extras={"topology": "chain"}), commit="inplace", timeout=10.0
    )
    managed.load_version(1)
    managed.squad.rollouts.members[1].ask("inject", {"fault": {"kind": "kill", "at": 1}}, Deadline(20))
    report = managed.sync(1)
    assert list(report.fenced) == ["rollout 1"]
    assert sorted(report.committed) == ["rollout 0", "rollout 2"]
    managed.wait_for_processes()
    managed.load_version(2)
    assert len(managed.sync(2).committed) == 3
    managed.assert_whole()


def test_damage_in_tensors_that_are_read_where_they_lie(pool: Pool) -> None:
    squad = Squad(pool, "nixl", 1, 1, bucket_size=4 << 20)
    squad.load_source(BIG, seed=1)
    squad.rollouts.ask("load", Deadline(60), factory=BIG, arguments={"seed": 2})
    expected = {name: described(name, tensor) for name, tensor in big(1).items()}
    squad.trainers.members[0].ask("inject", {"fault": {"kind": "flip", "at": 2}}, Deadline(20))
    with pytest.raises(CorruptedError, match="did not arrive as it was sent"):
        squad.transfer(1)
    assert squad.trainers.ask("digest", Deadline(20)) == [expected]
    squad.transfer(2)
    assert squad.digests() == [expected]


def test_a_cancelled_wait_ends_at_once_on_both_sides() -> None:
    with side(NixlEngine, 1, 1, timeout=20.0) as engines:
        engines.meet()
        receiver = call(lambda: engines.rollouts[0].receive_into(1, {}), "receiver")
        time.sleep(0.2)
        begin = time.monotonic()
        engines.rollouts[0].cancel()
        assert receiver.exception(5) is not None
        with pytest.raises(PeerLostError):
            engines.trainers[0].send_weights([("a", torch.zeros(1 << 22))], 1)
        assert time.monotonic() - begin < 3
        for engine in engines.all:
            engine.finalize()
        check(engines, 2)


def test_what_was_read_while_its_owner_gave_up_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = mixed(1), mixed(2)
    with side(NixlEngine, 1, 1, verify="off", timeout=20.0) as engines:
        engines.trainers[0].bind(source)
        engines.rollouts[0].bind(target)
        engines.sync(1, source, [target])
        engines.meet()
        inner = NixlAgent.read

        def late(agent: NixlAgent, *arguments: Any) -> Any:
            if not engines.trainers[0]._cancelled.is_set():
                engines.trainers[0].cancel()
                engines.trainers[0].finalize()
                source["d"].zero_()  # the trainer goes on
            return inner(agent, *arguments)

        monkeypatch.setattr(NixlAgent, "read", late)
        sender = call(lambda: engines.trainers[0].send_weights(source.items(), 2), "sender")
        with pytest.raises(PeerLostError):
            engines.rollouts[0].receive_into(2, target)
        assert sender.exception(5) is not None


def test_a_lost_reader_is_dropped_and_the_others_served() -> None:
    source, targets = mixed(1), [mixed(2), mixed(3)]
    with side(NixlEngine, 1, 2) as engines:
        engines.meet()
        engines.rollouts[1].close()
        together(
            lambda: engines.trainers[0].send_weights(source.items(), 1),
            lambda: engines.rollouts[0].receive_into(1, targets[0]),
        )
        assert_same(source, targets[0])
        (outlet,) = engines.trainers[0]._meeting.outlets.values()
        assert isinstance(outlet, Outlet)
        assert len(outlet.lost) == 1
        assert "rollout 1 is gone" in outlet.lost[0]


def test_a_package_that_refuses_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl_refusing").mkdir()
    (tmp_path / "nixl_refusing/__init__.py").write_text("raise ImportError('detected CUDA 99')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl_library, "_PACKAGES", ("nixl_refusing", "nixl_cu12"))
    nixl_library.library.cache_clear()
    assert nixl_library.library() is sys.modules["nixl_cu12._api"]
    monkeypatch.setattr(nixl_library, "_PACKAGES", ("nixl_refusing",))
    nixl_library.library.cache_clear()
    with pytest.raises(UnavailableError, match="detected CUDA 99") as refused:
        NixlEngine.available()
    assert refused.value.fix == "pip install 'rlctl[nixl]'"
    nixl_library.library.cache_clear()
