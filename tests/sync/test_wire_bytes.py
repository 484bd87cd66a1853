"""The bytes that cross the process groups, counted around them and by the kernel, are those of the transfer plan."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest
import torch
import torch.distributed

from rlctl.keys.dtypes import torch_dtype
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.backends import gloo_group
from rlctl.sync.backends.collective import HEAD_NBYTES
from rlctl.sync.delivery import planned
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Weight, model_weights
from tests.sync.sliced_models import ALIGNED, blank_shards, engine_shards, layouts_of, trainer_shards, whole_model
from tests.sync.test_gloo import Side, side, together
from tests.sync.wire_cases import assert_same, random_tensor

REAL: Any = torch.distributed.ProcessGroupGloo
BUCKET = 64 << 10
# Sizes are multiples of the alignment of buckets, so that no byte between two tensors travels.
MODEL = {
    "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 384, "vocab_size": 1024,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


class CountedGloo:
    """A process group, and the bytes of every message that goes into it (rank 0) or comes out of it."""

    _Options = REAL._Options
    create_device = staticmethod(REAL.create_device)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank = rank
        self.messages: list[int] = []
        self._group = REAL(store, rank, size, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        assert options.rootRank == 0
        self.messages += [tensor.numel() * tensor.element_size() for tensor in tensors]
        return self._group.broadcast(tensors, options)


def came_in(engines: Side) -> int:
    """The bytes that the kernel received on all connections of the groups: ``tcpi_bytes_received`` of tcp_info."""
    connections = [c for e in engines.all for group in e._groups for c in group._connections]
    ends = {(c.getsockname(), c.getpeername()): c for c in connections}  # in one process, all groups see both
    infos = [c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136) for c in ends.values()]
    return sum(struct.unpack_from("<Q", info, 128)[0] for info in infos)


def groups(engines: Side, role: str) -> list[list[Any]]:
    return [engine._groups for engine in engines.all if engine.member.role == role]


def whole_plan(weights: list[Weight], trainers: int, replicas: int) -> Plan:
    """The trainer's weights are sharded over its ranks; a replica of two ranks has one worker, which gets all."""
    placement = Placement.separate(Cluster(), trainers, 2 * replicas)
    train, rollout = ParallelLayout.fsdp(trainers), ParallelLayout.vllm(tp=2, replicas=replicas)
    return planned("whole", weights, train, rollout, placement)


@pytest.mark.parametrize(
    ("trainers", "senders", "rollouts"), [(1, 1, 1), (1, 1, 4), (4, 4, 1), (4, 1, 1), (2, 2, 2), (4, 2, 3)]
)
def test_bytes_are_those_of_the_plan(
    trainers: int, senders: int, rollouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = model_weights(ModelSpec.from_config(MODEL))
    plan = whole_plan(weights, trainers, rollouts)
    g = torch.Generator().manual_seed(trainers)
    source = {w.name: random_tensor(w.shape, torch_dtype(w.dtype), g) for w in weights}
    targets = [{n: torch.zeros_like(t) for n, t in source.items()} for _ in range(rollouts)]
    monkeypatch.setattr(gloo_group, "_Gloo", CountedGloo)
    with side(trainers, rollouts, senders=senders, bucket_size=BUCKET) as engines:
        engines.meet()
        before = came_in(engines)
        together(
            *(lambda e=e: e.send_weights(source.items(), 1) for e in engines.trainers),
            *(lambda e=e, t=t: e.receive_into(1, t) for e, t in zip(engines.rollouts, targets, strict=True)),
        )
        for target in targets:
            assert_same(source, target)

        sent = [[group._group for group in found] for found in groups(engines, "trainer")]
        received = [[group._group for group in found] for found in groups(engines, "rollout")]
        # A trainer rank puts its share on the wire once, and takes nothing: it has all that it wants.
        assert [len(found) for found in sent] == [1] * senders + [0] * (trainers - senders)
        assert all(group.rank == 0 for found in sent for group in found)
        heads = sum(group.messages.count(HEAD_NBYTES) for found in sent for group in found)
        put = sum(sum(group.messages) for found in sent for group in found)
        assert (put - heads * HEAD_NBYTES) * rollouts == plan.bytes_moved
        assert heads * BUCKET < 3 * plan.bytes_moved // rollouts + senders * 2 * BUCKET  # buckets are well filled
        loads = [sum(m for m in found[0].messages if m != HEAD_NBYTES) for found in sent[:senders]]
        assert max(loads) - min(loads) <= max(w.nbytes for w in weights)

        for rank, found in enumerate(received):
            due = sum(int(plan.traffic.received[kind][rank]) for kind in ("node", "network"))
            assert sum(sum(group.messages) for group in found) == due + heads * HEAD_NBYTES
        messages = [nbytes for found in received for group in found for nbytes in group.messages]
        assert 0 <= came_in(engines) - before - sum(messages) < 256 * len(messages)
    assert plan.traffic.received["device"].sum() == 0


GQA = {"num_key_value_heads": 2}
NO_BIAS = {"model_type": "llama"}
SLICED = [
    pytest.param({}, ParallelLayout.fsdp(2), 2, 1, id="fsdp 2 to tp 2"),
    pytest.param({}, ParallelLayout.fsdp(4), 4, 1, id="fsdp 4 to tp 4"),
    pytest.param({}, ParallelLayout.fsdp(4), 2, 1, id="fsdp 4 to tp 2"),
    pytest.param({}, ParallelLayout(tp=2), 4, 1, id="tp 2 to tp 4"),
    pytest.param(GQA, ParallelLayout.fsdp(2), 4, 1, id="fsdp 2 to tp 4, two key heads"),
    pytest.param(GQA, ParallelLayout(tp=2), 4, 1, id="tp 2 to tp 4, two key heads"),
    pytest.param({"tie_word_embeddings": True}, ParallelLayout.fsdp(2), 2, 1, id="tied"),
    pytest.param({}, ParallelLayout.fsdp(4), 2, 2, id="fsdp 4 to two of tp 2"),
    pytest.param(GQA | NO_BIAS, ParallelLayout.fsdp(2, tp=2), 4, 1, id="fsdp 2 x tp 2 to tp 4, two key heads"),
    pytest.param({}, ParallelLayout.fsdp(2, replicate=2), 2, 1, id="hsdp 2 x 2 to tp 2"),
]


@pytest.mark.parametrize(("config", "train", "tp", "replicas"), SLICED)
def test_ranks_get_their_slices_and_the_bytes_are_those_of_the_plan(
    config: dict[str, Any], train: ParallelLayout, tp: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**ALIGNED, **config}
    layouts = layouts_of(config, train, tp)
    rollouts = tp * replicas
    placement = Placement.separate(Cluster(devices_per_node=64), train.ranks, rollouts)
    plan = planned("slices", layouts.weights, train, ParallelLayout.vllm(tp=tp, replicas=replicas), placement)
    full = whole_model(layouts, seed=tp)
    targets = [blank_shards(config, full, tp, rank % tp) for rank in range(rollouts)]
    monkeypatch.setattr(gloo_group, "_Gloo", CountedGloo)
    with side(train.ranks, rollouts, layouts=layouts, bucket_size=8 * BUCKET, timeout=30.0) as engines:
        engines.meet()
        before = came_in(engines)
        streams = [layouts.sources(rank, trainer_shards(layouts, full, rank)) for rank in range(train.ranks)]
        places = [layouts.targets(rank % tp, shards) for rank, shards in enumerate(targets)]
        together(
            *(lambda e=e, s=s: e.send_slices(s, 1) for e, s in zip(engines.trainers, streams, strict=True)),
            *(lambda e=e, t=t: e.receive_into(1, t) for e, t in zip(engines.rollouts, places, strict=True)),
        )
        for rank, shards in enumerate(targets):
            due = engine_shards(config, full, tp, rank % tp)
            assert_same({name: due[name] for name in shards}, shards)

        content = [[content_of(group._group) for group in found] for found in groups(engines, "trainer")]
        assert all(len(found) == tp for found in content)  # one group for each rank of a replica
        for rank, found in enumerate(content):  # what it puts on the wire once reaches that rank of all replicas
            sent = sum(int(layouts.plan.traffic.sent[kind][rank]) for kind in ("node", "network"))
            assert sum(found) == sent
        assert sum(map(sum, content)) * replicas == plan.bytes_moved
        received = groups(engines, "rollout")
        for rank, found in enumerate(received):
            due_nbytes = sum(int(plan.traffic.received[kind][rank]) for kind in ("node", "network"))
            assert sum(content_of(group._group) for group in found) == due_nbytes == plan.wanted[rank]
        messages = [nbytes for found in received for group in found for nbytes in group._group.messages]
        assert 0 <= came_in(engines) - before - sum(messages) < 256 * len(messages)
    whole = sum(weight.nbytes for weight in layouts.weights)
    assert plan.bytes_moved < (0.8 if tp == 2 else 0.6) * whole * rollouts


def content_of(group: CountedGloo) -> int:
    """The bytes of its messages that are not descriptions of buckets."""
    return sum(nbytes for nbytes in group.messages if nbytes != HEAD_NBYTES)
