"""Handing tensors from one engine to another in the same process: no copy, and none of the bytes on the way.

Messages go over a socket pair all the same, so that waits, deadlines and ends are those of any other receiver.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from rlctl.sync.buckets import FilledBucket, hash_bytes
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.digest import SyncDigest, Verify, bind, hasher
from rlctl.sync.errors import CorruptedError
from rlctl.sync.fanout import Fanout, acknowledge
from rlctl.sync.packer import Stream
from rlctl.sync.tensor_meta import BucketMeta, Chunk, TensorMeta

_BOXES: weakref.WeakValueDictionary[int, Box] = weakref.WeakValueDictionary()
_NAMES = itertools.count()


class Box:
    """What one receiver has not taken yet; found by its name in both threads."""

    def __init__(self) -> None:
        self.buckets: deque[FilledBucket] = deque()


class DirectProducer(Fanout):
    """The sender's side. See Fanout for what happens to a receiver that does not keep up."""

    def __init__(self) -> None:
        super().__init__()
        self._boxes: dict[Channel, Box] = {}
        self._published = 0

    @property
    def told(self) -> int:
        """Buckets published so far, over all syncs."""
        return self._published

    def attach(self, channel: Channel, deadline: Deadline) -> None:
        """Let a receiver of this process take part from the next bucket on."""
        box, name = Box(), next(_NAMES)
        _BOXES[name] = self._boxes[channel] = box
        acknowledge(channel, name, deadline)
        self._acked[channel] = self._published

    def begin(self, deadline: Deadline, *, stall: float = math.inf) -> None:
        """Start a sync: ``deadline`` for all of it, ``stall`` seconds for any one wait."""
        self._begin(deadline, stall)
        for box in self._boxes.values():
            box.buckets.clear()

    def publish(self, bucket: FilledBucket) -> None:
        """Give a bucket to every receiver, and wait until all are done with it: its memory may be another's then."""
        settle(bucket.data)
        for channel in self._acked:
            self._boxes[channel].buckets.append(bucket)
        self._tell(b"")
        self._published += 1
        self._wait(self._published, f"bucket {bucket.meta.index}")

    def finish(self) -> None:
        """Wait until every receiver has everything. Raises PeerLostError when none is left."""
        self._wait(self._published, "the end of the sync")

    def detach(self, channel: Channel) -> None:
        """See Fanout."""
        super().detach(channel)
        self._boxes.pop(channel, None)


class DirectConsumer:
    """The receiver's side.

    Args:
        channel: to the sender, which calls ``attach`` on its end.
        deadline: for its answer.
    """

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        self.channel = channel
        box = _BOXES.get(int.from_bytes(channel.receive(deadline, limit=8), "little"))
        if box is None:
            raise CorruptedError(f"{channel.peer} is in another process, and said that it is in this one")
        self._box = box
        self._taken = 0
        self._data: torch.Tensor | None = None

    def begin(self, told: int) -> None:
        """Expect the tensor after the first ``told`` ones of the sender."""
        self._taken = told

    def take(self, deadline: Deadline) -> FilledBucket:
        """Return the next tensor, once it has come, as a bucket of its own memory."""
        self.channel.receive(deadline, limit=0)
        bucket = self._box.buckets.popleft()
        self._data = bucket.data
        return bucket

    def free(self, deadline: Deadline, *, last: bool) -> None:
        """Let go the tensor taken."""
        assert self._data is not None
        settle(self._data)
        self._data = None
        self._taken += 1
        acknowledge(self.channel, self._taken, deadline)

    def close(self) -> None:
        """Leave."""
        self.channel.close()
        self._box.buckets.clear()


class DirectPacker:
    """Makes a bucket of each tensor, which lies in the tensor's own memory. One DirectPacker is one sync.

    Args:
        version: of the weights that are sent.
        base_version: version that the stream is a delta against, else None.
        verify: what is hashed.
    """

    def __init__(self, *, version: int, base_version: int | None, verify: Verify) -> None:
        self._version = version
        self._base_version = base_version
        self._verify = verify

    def pack(self, stream: Stream) -> Iterator[FilledBucket]:
        """Yield the buckets of ``stream`` in order; the last one carries the summary alone."""
        total = SyncDigest(self._version, self._base_version)
        index = 0
        for name, tensor in stream:
            meta = TensorMeta.of(name, tensor)
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            data = plain.reshape(-1).view(torch.uint8)
            hashing = hasher(meta, self._verify, self._version)
            hash_bytes(data, hashing)
            digest = bind(meta, hashing.content(), version=self._version, base_version=self._base_version)
            total.add(meta, digest)
            chunk = Chunk(meta, 0, meta.nbytes, 0, digest)
            yield FilledBucket(BucketMeta(index, self._version, meta.nbytes, (chunk,)), data)
            index += 1
        end = BucketMeta(index, self._version, 0, (), total.summary(self._verify))
        yield FilledBucket(end, torch.empty(0, dtype=torch.uint8))


def settle(data: torch.Tensor) -> None:
    """Return when what was begun with a tensor on its device is done, so that another thread's stream may read it."""
    if data.device.type != "cpu":
        torch.accelerator.current_stream(data.device).synchronize()
