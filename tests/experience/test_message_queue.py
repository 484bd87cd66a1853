"""The queue: order, the version that each message carries, waits that end, nothing dropped."""

import random
import threading

import pytest

from rlctl.experience.message_queue import MessageQueue, QueueClosedError, QueueTimeoutError


def test_messages_carry_the_version_that_they_were_put_under():
    queue: MessageQueue[str] = MessageQueue(version=3)
    queue.put("a", 1.0)
    queue.update_param_version(4)
    assert queue.put("b", 1.0) == (4, "b")
    assert queue.param_version == 4 and len(queue) == 2
    assert queue.get(1.0) == (3, "a")
    assert queue.drain() == [(4, "b")] and queue.drain() == []


def test_the_version_never_goes_back():
    queue: MessageQueue[int] = MessageQueue(version=2)
    queue.update_param_version(2)
    with pytest.raises(ValueError, match="is 2 already, and 1 is older"):
        queue.update_param_version(1)


def test_a_full_queue_drops_nothing():
    queue: MessageQueue[int] = MessageQueue(capacity=1)
    queue.put(1, 1.0)
    with pytest.raises(QueueTimeoutError, match="room in the queue"):
        queue.put(2, 0.01)
    assert [m.content for m in queue.drain()] == [1]


def test_waits_end_by_a_message_the_deadline_or_the_close():
    queue: MessageQueue[int] = MessageQueue()
    with pytest.raises(QueueTimeoutError, match="a message"):
        queue.get(0.01)
    found: list[object] = []

    def take() -> None:
        while True:
            try:
                found.append(queue.get(60.0).content)
            except QueueClosedError:
                found.append("closed")
                return

    thread = threading.Thread(target=take)
    thread.start()
    queue.put(7, 1.0)
    queue.close()
    queue.close()
    thread.join(60.0)
    assert found == [7, "closed"]
    with pytest.raises(QueueClosedError):
        queue.put(8, 1.0)


def test_many_threads_lose_and_double_nothing():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    queue: MessageQueue[tuple[int, int]] = MessageQueue(capacity=rng.randint(1, 5))
    counts = [rng.randint(1, 60) for _ in range(4)]
    putters = [
        threading.Thread(target=lambda who=who, n=n: [queue.put((who, i), 60.0) for i in range(n)])
        for who, n in enumerate(counts)
    ]
    versions: list[int] = []
    taken: list[tuple[int, int]] = []

    def take() -> None:
        for _ in range(sum(counts)):
            message = queue.get(60.0)
            versions.append(message.version)
            taken.append(message.content)

    taker = threading.Thread(target=take)
    for thread in [*putters, taker]:
        thread.start()
    for version in range(20):
        queue.update_param_version(version)
    for thread in [*putters, taker]:
        thread.join(60.0)
    for who, n in enumerate(counts):
        assert [i for w, i in taken if w == who] == list(range(n))
    assert versions == sorted(versions)
