"""What is NIXL's own: who reads what from whom, memory registered once, what is kept from one sync to the next."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from rlctl.sync.backends.nixl import NixlEngine
from rlctl.sync.backends.nixl_agent import Batch, NixlAgent, Place
from rlctl.sync.backends.nixl_buckets import Taking
from rlctl.sync.backends.nixl_links import READ
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.member import described
from rlctl.sync.runs import APART_NBYTES
from tests.sync.nixl_weights import check, mixed
from tests.sync.side import Weights, side
from tests.sync.squad import Pool, Squad, runnable
from tests.sync.wire_cases import assert_same, hard_tensors

pytestmark = pytest.mark.nixl
HARD, BLANK = "tests.sync.wire_cases:hard_tensors", "tests.sync.wire_cases:blank"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Place, Place]]:
    """Everything that is read: from whom, here, there."""
    found: list[tuple[str, Place, Place]] = []
    inner = NixlAgent.read

    def noted(agent: NixlAgent, name: str, peer: str, batch: Batch) -> Any:
        found.extend((peer, here, there) for here, there in batch.pairs if here.nbytes != 64)  # the rest is a greeting
        return inner(agent, name, peer, batch)

    monkeypatch.setattr(NixlAgent, "read", noted)
    return found


def lies_in(place: Place, weights: Weights) -> bool:
    return any(t.data_ptr() <= place.address < t.data_ptr() + t.nbytes for t in weights.values())


def test_large_tensors_go_from_where_they_lie_to_where_they_belong(reads: list[tuple[str, Place, Place]]) -> None:
    source, targets = mixed(1), [mixed(2), mixed(3)]
    large = sum(t.nbytes for t in source.values() if t.nbytes >= APART_NBYTES)
    with side(NixlEngine, 1, 2) as engines:
        engines.trainers[0].bind(source)
        for engine, target in zip(engines.rollouts, targets, strict=True):
            engine.bind(target)
        for version in range(3):
            reads.clear()
            source["d"].add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
            into_targets = [pair for pair in reads if any(lies_in(pair[1], target) for target in targets)]
            straight = [here.nbytes for _, here, there in into_targets if lies_in(there, source)]
            assert sum(straight) == 2 * large
            assert sum(here.nbytes for _, here, _ in reads) - sum(straight) < 2 * 4096


def test_what_is_not_bound_goes_through_buckets(reads: list[tuple[str, Place, Place]]) -> None:
    source, target = mixed(1), mixed(2)
    large = sum(t.nbytes for t in source.values() if t.nbytes >= APART_NBYTES)
    with side(NixlEngine, 1, 1) as engines:
        for version, straight in enumerate((0, large)):  # the same targets once more are worth being registered
            reads.clear()
            source["b"].add_(1)
            engines.sync(version, source, [target])
            assert_same(source, target)
            assert not any(lies_in(there, source) for *_, there in reads)
            assert sum(here.nbytes for _, here, _ in reads) >= large
            assert sum(here.nbytes for _, here, _ in reads if lies_in(here, target)) == straight


@pytest.mark.parametrize("extras", [{}, {"topology": "chain"}], ids=["direct", "chain"])
def test_what_is_kept_of_a_sync_serves_the_next_until_something_changes(
    extras: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    inner = NixlAgent._prepared

    def noted(agent: NixlAgent, name: str, peer: str, pairs: Any) -> Any:
        prepared.append(peer)
        return inner(agent, name, peer, pairs)

    monkeypatch.setattr(NixlAgent, "_prepared", noted)
    source, targets = mixed(1), [mixed(2), mixed(3)]
    with side(NixlEngine, 1, 2, verify="off", extras=extras) as engines:

        def bind() -> None:
            engines.trainers[0].bind(source)
            for engine, target in zip(engines.rollouts, targets, strict=True):
                engine.bind(target)

        def sync(version: int) -> int:
            prepared.clear()
            for tensor in source.values():
                tensor.add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
            return len(prepared)

        bind()
        assert sync(0) > 0
        assert [sync(1), sync(2), sync(3)] == [0, 0, 0]
        source = mixed(4)  # elsewhere
        bind()
        assert sync(4) > 0
        targets = [mixed(5), mixed(6)]
        bind()
        assert sync(5) > 0
        source = {name: torch.cat([tensor, tensor]) for name, tensor in source.items() if tensor.dim()}  # other shapes
        targets = [{name: torch.zeros_like(tensor) for name, tensor in source.items()} for _ in range(2)]
        bind()
        assert sync(6) > 0
        for tensor in source.values():  # elsewhere, and nobody was told
            tensor.data = tensor.clone()
        sync(7)
        for tensor in targets[0].values():
            tensor.data = tensor.clone()
        sync(8)
        sync(9)
        assert sync(10) == 0


@pytest.mark.parametrize("topology", ["direct", "chain"])
def test_few_of_many_buckets_are_answered_for(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone whose memory is waited for, or that none comes after."""
    answers = []
    inner = Channel.send

    def noted(channel: Channel, data: bytes, deadline: Deadline) -> None:
        answers.extend([channel.peer] if data == READ else [])
        inner(channel, data, deadline)

    monkeypatch.setattr(Channel, "send", noted)
    g = torch.Generator().manual_seed(1)
    source = {f"w{n}": torch.randint(0, 256, (200 << 10,), generator=g, dtype=torch.uint8) for n in range(45)}
    targets = [{name: torch.zeros_like(tensor) for name, tensor in source.items()} for _ in range(2)]
    with side(NixlEngine, 1, 2, bucket_size=256 << 10, extras={"topology": topology}) as engines:
        for version in range(4):
            if version == 1:
                engines.trainers[0].bind(source)
                for engine, target in zip(engines.rollouts, targets, strict=True):
                    engine.bind(target)
            answers.clear()
            source["w7"].add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
            buckets = 45 // 8 + 1 if version else 45
            assert buckets <= len(answers) / 2 <= buckets + 1


def test_buckets_that_lie_where_they_lay_are_read_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has changed ends the row, and is read in its turn."""
    rows: list[int] = []
    inner, read = Taking._hear, NixlAgent.read

    def noted(taking: Taking, deadline: Deadline) -> None:
        inner(taking, deadline)
        rows.append(len(taking._source.told))

    def slow(agent: NixlAgent, name: str, peer: str, batch: Batch) -> Any:
        time.sleep(0.01)  # so that the sender is ahead
        return read(agent, name, peer, batch)

    monkeypatch.setattr(Taking, "_hear", noted)
    monkeypatch.setattr(NixlAgent, "read", slow)
    source = {f"w{n}": torch.full((200 << 10,), n, dtype=torch.uint8) for n in range(30)}
    source["small"] = torch.zeros(5, dtype=torch.uint8)
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    with side(NixlEngine, 1, 1, bucket_size=256 << 10, verify="off") as engines:
        engines.trainers[0].bind(source)
        engines.rollouts[0].bind(target)
        longest = []
        for version in range(6):
            rows.clear()
            for tensor in source.values():
                tensor.add_(1)
            if version == 4:
                source["w9"].data = source["w9"].clone()
            engines.sync(version, source, [target])
            assert_same(source, target)
            longest.append(max(rows))
    assert longest[0] == 1
    assert 4 < max(longest[2:4]) <= 16
    assert 1 < longest[5] <= 16


def test_memory_that_is_used_once_is_let_go() -> None:
    source = mixed(1)
    targets = [mixed(2) for _ in range(5)]  # all alive: none lies where an earlier one did
    with side(NixlEngine, 1, 1) as engines:
        for version in range(5):
            engines.sync(version, source, [targets[version]])
            assert len(engines.rollouts[0].agent._regions) < 3 + len(source)


def test_in_a_chain_each_reads_from_the_one_before_while_that_receives(
    reads: list[tuple[str, Place, Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, targets = mixed(1), [mixed(seed) for seed in (2, 3, 4)]
    last = source["g"].data_ptr()
    inner = NixlAgent.read

    def held_up(agent: NixlAgent, name: str, peer: str, batch: Batch) -> Any:
        # The first does not get it before the last has something.
        if any(there.address == last for _, there in batch.pairs):
            for _ in range(500):
                if any(other == "rollout 1" for other, *_ in reads):
                    break
                agent.progress()
                time.sleep(0.01)
            else:
                raise AssertionError("rollout 2 waits for rollout 1 to be through")
        return inner(agent, name, peer, batch)

    monkeypatch.setattr(NixlAgent, "read", held_up)
    with side(NixlEngine, 1, 3, extras={"topology": "chain"}) as engines:
        engines.trainers[0].bind(source)
        for engine, target in zip(engines.rollouts, targets, strict=True):
            engine.bind(target)
        for version in range(3):
            reads.clear()
            source["b"].add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
        nbytes = {peer: sum(here.nbytes for other, here, _ in reads if other == peer) for peer, *_ in reads}
        assert set(nbytes) == {"trainer 0", "rollout 0", "rollout 1"}
        assert len(set(nbytes.values())) == 1


@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 3), (2, 2)])
def test_a_chain_of_processes(pool: Pool, trainers: int, rollouts: int) -> None:
    runnable("nixl")
    squad = Squad(pool, "nixl", trainers, rollouts, senders=trainers, extras={"topology": "chain"})
    for version in range(3):
        squad.load(HARD, BLANK, seed=version)
        squad.transfer(version)
        expected = {name: described(name, tensor) for name, tensor in hard_tensors(version).items()}
        assert squad.digests() == [expected] * rollouts


def test_memory_is_registered_once() -> None:
    source, targets = mixed(1), [mixed(2), mixed(3)]
    with side(NixlEngine, 1, 1) as engines:
        engines.trainers[0].bind(source)
        engines.rollouts[0].bind(targets[0])
        for version in range(4):  # as with a shadow: two sets of targets in turn
            engines.sync(version, source, [targets[version % 2]])
        agents = [engine.agent for engine in engines.all]
        registered = [agent.registrations for agent in agents]
        for version in range(4, 8):
            engines.sync(version, source, [targets[version % 2]])
        assert [engine.agent for engine in engines.all] == agents
        assert [agent.registrations for agent in agents] == registered
        other = mixed(4)
        engines.rollouts[0].bind(other)  # nothing of what was bound before is kept
        engines.sync(8, source, [other])
        assert engines.rollouts[0].agent is not agents[1]
        assert_same(source, other)


def test_agents_are_made_anew_when_told_so() -> None:
    with side(NixlEngine, 1, 1, extras={"keep_agents": False}) as engines:
        for version in range(2):
            check(engines, version)
            assert [engine._agent for engine in engines.all] == [None, None]


@pytest.mark.parametrize("topology", ["direct", "chain"])
def test_over_tcp_alone_agents_answer_while_they_wait(topology: str) -> None:
    with side(NixlEngine, 1, 2, extras={"transports": "tcp", "topology": topology}) as engines:
        for version in range(2):
            check(engines, version)
        source, targets = mixed(1), [mixed(2), mixed(3)]
        engines.sync(2, source, targets)
        for target in targets:
            assert_same(source, target)
