"""The ring between real processes: exact, bounded waits, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, PeerLostError, TransferError
from rlctl.sync.packer import Packer
from rlctl.sync.ring import RingConsumer, RingProducer
from rlctl.sync.tensor_meta import BucketMeta, Chunk, TensorMeta
from rlctl.sync.unpacker import Unpacker
from tests.sync.wire_cases import assert_same, hard_tensors

torch.set_num_threads(1)  # a forked child cannot use its parent's compute threads
FORK = multiprocessing.get_context("fork")
SLOT = 16384


def send(ring: RingProducer, tensors: dict[str, torch.Tensor], version: int) -> None:
    for bucket in Packer(ring.slot_nbytes, ring.acquire, version=version).pack(tensors.items()):
        ring.publish(bucket)
    ring.finish()


def consumers(count: int, act: Callable[[Channel, int], None]) -> tuple[list[Channel], list[multiprocessing.Process]]:
    """Start ``count`` processes that run ``act`` on their end of a channel."""
    channels, processes = [], []
    for i in range(count):
        mine, other = Channel.pair("trainer", f"rollout {i}")
        process = FORK.Process(target=act, args=(other, i), daemon=True)
        process.start()
        other.close()
        channels.append(mine)
        processes.append(process)
    return channels, processes  # type: ignore[return-value]


def receive_three(channel: Channel, rank: int) -> None:
    consumer = RingConsumer(channel, Deadline(20))
    unpacker = Unpacker()
    for version in range(3):
        unpacker.begin(version=version)
        got = {n: t.clone() for n, t in unpacker.tensors(consumer.buckets(Deadline(20)))}
        assert_same(hard_tensors(version), got)
    os._exit(17)  # an assertion that fails gives another code


@pytest.mark.parametrize("count", [1, 3])
def test_three_syncs_to_real_processes(count: int) -> None:
    ring = RingProducer(SLOT)
    channels, processes = consumers(count, receive_three)
    for channel in channels:
        ring.attach(channel, Deadline(20))
    for version in range(3):
        ring.begin(Deadline(20))
        send(ring, hard_tensors(version), version)
    for process in processes:
        process.join(20)
        assert process.exitcode == 17
    assert ring.lost == {}
    ring.close()


def die_at_second_bucket(channel: Channel, rank: int) -> None:
    consumer = RingConsumer(channel, Deadline(20))
    for bucket in consumer.buckets(Deadline(20)):
        if rank == 1 and bucket.meta.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(17)


def test_a_killed_consumer_is_named_and_the_others_go_on() -> None:
    ring = RingProducer(SLOT)
    channels, processes = consumers(3, die_at_second_bucket)
    for channel in channels:
        ring.attach(channel, Deadline(20))
    ring.begin(Deadline(20))
    send(ring, hard_tensors(5), 0)
    assert ring.lost == {"rollout 1": "rollout 1 is gone: its connection closed"}
    assert ring.peers == ["rollout 0", "rollout 2"]
    for process in processes:
        process.join(20)
    assert [p.exitcode for p in processes] == [17, -signal.SIGKILL, 17]
    ring.close()


def stall(channel: Channel, rank: int) -> None:
    consumer = RingConsumer(channel, Deadline(20))
    buckets = consumer.buckets(Deadline(20))
    next(buckets)
    time.sleep(60)


def test_a_stalled_consumer_ends_by_the_deadline_without_burning_cpu() -> None:
    ring = RingProducer(SLOT)
    channels, processes = consumers(1, stall)
    ring.attach(channels[0], Deadline(20))
    ring.begin(Deadline(20), stall=1.0)
    begin, cpu = time.monotonic(), time.process_time()
    with pytest.raises(PeerLostError, match="no receiver is left at bucket 2: rollout 0 did not free a slot"):
        send(ring, hard_tensors(5), 0)
    assert 0.9 < time.monotonic() - begin < 2.0
    assert time.process_time() - cpu < 0.3
    processes[0].kill()
    processes[0].join(5)
    ring.close()


def pair() -> tuple[RingProducer, RingConsumer]:
    """Both ends in this process."""
    ring = RingProducer(SLOT)
    mine, other = Channel.pair("trainer", "rollout")
    ring.attach(mine, Deadline(5))
    ring.begin(Deadline(5))
    return ring, RingConsumer(other, Deadline(5))


def test_a_lost_or_silent_producer_ends_the_wait() -> None:
    ring, consumer = pair()
    with pytest.raises(DeadlineError, match="waiting for trainer: no answer within"):
        next(consumer.buckets(Deadline(60), stall=0.2))
    ring.close()
    with pytest.raises(PeerLostError, match="trainer is gone"):
        next(consumer.buckets(Deadline(60)))
    consumer.close()


def test_an_aborted_sync_leaves_the_ring_usable() -> None:
    ring, consumer = pair()
    raised: list[Exception] = []

    def read() -> None:
        try:
            list(consumer.buckets(Deadline(10)))
        except TransferError as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    packer = Packer(SLOT, ring.acquire, version=0)
    for bucket in packer.pack({"a": torch.randn(20000)}.items()):
        if bucket.meta.index == 3:
            ring.abort("out of memory in layer 7")
            break
        ring.publish(bucket)
    reader.join(10)
    assert "gave the sync up: out of memory in layer 7" in str(raised[0])

    sent, got, unpacker = hard_tensors(1), {}, Unpacker()
    unpacker.begin(version=1)
    reader = threading.Thread(
        target=lambda: got.update({n: t.clone() for n, t in unpacker.tensors(consumer.buckets(Deadline(10)))})
    )
    reader.start()
    ring.begin(Deadline(10))
    send(ring, sent, 1)
    reader.join(10)
    assert_same(sent, got)
    ring.close()
    consumer.close()


def test_slots_are_published_in_any_order_and_free_when_read() -> None:
    ring = RingProducer(SLOT, 3)
    channel, other = Channel.pair("trainer", "rollout 0")
    ring.attach(channel, Deadline(5))
    consumer = RingConsumer(other, Deadline(5))
    ring.begin(Deadline(0.5))
    slots = [ring.acquire(k) for k in range(3)]
    for value, slot in enumerate(slots, 1):
        slot[:4] = value
    order = [1, 0, None, 2]  # None: an empty bucket
    meta = TensorMeta("a", "U8", (4,))
    for index, place in enumerate(order):
        data = slots[0][:0] if place is None else slots[place][:4]
        chunks = () if place is None else (Chunk(meta, 0, 4, 0),)
        ring.publish(FilledBucket(BucketMeta(index, 0, data.numel(), chunks), data))
    read = []
    for _ in order[:2]:
        read.append(consumer.take(Deadline(5)).data.tolist())
        consumer.free(Deadline(5), last=True)
    assert ring.acquire(1).data_ptr() == slots[1].data_ptr()
    assert ring.acquire(0).data_ptr() == slots[0].data_ptr()
    for _ in order[2:]:
        read.append(consumer.take(Deadline(5)).data.tolist())
        consumer.begin(len(read))
    assert read == [[2] * 4, [1] * 4, [], [3] * 4]
    with pytest.raises(PeerLostError, match="did not free a slot"):
        ring.acquire(2)
    ring.close()
    consumer.close()


def test_a_late_consumer_joins_between_syncs() -> None:
    ring = RingProducer(SLOT)
    first, first_other = Channel.pair("trainer", "rollout 0")
    late, late_other = Channel.pair("trainer", "rollout 1")
    results: dict[int, dict[str, torch.Tensor]] = {}

    def read(consumer: RingConsumer, key: int, version: int) -> None:
        unpacker = Unpacker()
        unpacker.begin(version=version)
        results[key] = {n: t.clone() for n, t in unpacker.tensors(consumer.buckets(Deadline(10)))}

    ring.attach(first, Deadline(5))
    one = RingConsumer(first_other, Deadline(5))
    readers = [threading.Thread(target=read, args=(one, 0, 0))]
    ring.begin(Deadline(10))
    readers[0].start()
    send(ring, hard_tensors(0), 0)
    readers[0].join(10)
    ring.attach(late, Deadline(5))
    two = RingConsumer(late_other, Deadline(5))
    readers = [threading.Thread(target=read, args=(c, k, 1)) for c, k in ((one, 1), (two, 2))]
    for reader in readers:
        reader.start()
    ring.begin(Deadline(10))
    send(ring, hard_tensors(1), 1)
    for reader in readers:
        reader.join(10)
    assert_same(hard_tensors(0), results[0])
    assert_same(hard_tensors(1), results[1])
    assert_same(hard_tensors(1), results[2])
    for end in (ring, one, two):
        end.close()
