"""What backends over a collective group share.

Trainer rank s < ``senders`` broadcasts its share in a group of itself and all rollout workers; where slices are
delivered, in one group for each rank of a replica, with those workers of all replicas. The groups work side by side.
``keep_group`` (default true): while the same members take part, their groups stay.
"""

from __future__ import annotations

import hashlib
import struct
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Protocol

import torch

from rlctl.sync.bucket_engine import BucketEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Kwargs, Member, Metadata
from rlctl.sync.errors import CorruptedError
from rlctl.sync.rendezvous import MeetingPoint, MeetingStore, join
from rlctl.sync.runs import message_of, messages, room_for, spread
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.traits import Delivery
from rlctl.sync.work import InThread, Work

# A bucket's description comes in one message of this size, with the two sizes before it; a longer one in two.
HEAD_NBYTES = 8192
_HEAD = struct.Struct("<IQ")
_MAX_META = 64 << 20
WAITING = "waiting for a bucket"


class CollectiveGroup(Protocol):
    """One sender (rank 0) and all that receive from it."""

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline, what: str) -> Work[None]:
        """Begin to send (rank 0) or receive (others) a contiguous tensor. ``what`` is for the error."""

    def end_waits(self) -> None:
        """Have whatever waits fail soon, on every rank if that can be done; from any thread."""

    def close(self) -> None:
        """End the group: nothing is written into a tensor any more."""


class CollectiveEngine(BucketEngine):
    """See the module."""

    delivers: ClassVar[Delivery] = "slices"

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self._listener: Listener | None = None
        self._groups: list[CollectiveGroup] = []
        self._group_id = ""
        self._heads: dict[int, tuple[torch.Tensor, Work[None]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @abstractmethod
    def _open_group(self, store: MeetingStore, rank: int, peers: list[str]) -> CollectiveGroup:
        """Return a group, once all its ranks have come. ``peers``: what errors call each."""

    def _metadata(self) -> Metadata:
        self._close_listener()
        if self.sends:
            self._listener = Listener(f"tcp:{self.options.host}:0", self.options.token.encode())
        return {
            "group": self._group_id,
            "address": self._listener.address if self._listener else "",
            "senders": self.options.senders,
        }

    @classmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """See CheckpointEngine. The groups are kept when the same instances as last time, all of them, have them."""
        senders = min(metadata[0]["senders"], trainer_world)
        members = [*metadata[:senders], *metadata[trainer_world:]]
        group_id = hashlib.sha256(" ".join(m["id"] for m in members).encode()).hexdigest()
        shared = {
            "senders": senders,
            "group_id": group_id,
            "keep": all(m["group"] == group_id for m in members),
            "addresses": [m["address"] for m in metadata[:senders]],
            "parts": [m["part"] for m in metadata[trainer_world : trainer_world + rollout_world]],
        }
        return [shared for _ in metadata]

    def _connect(self, *, group_id: str, keep: bool, addresses: list[str], parts: list[int]) -> None:
        if keep:
            return
        self._end_groups()
        workers = {part: [f"rollout {rank}" for rank, mine in enumerate(parts) if mine == part] for part in self.parts}
        if self.member.role == "rollout":
            mine = workers[self.member.part]
            for sender, address in enumerate(addresses):
                self._groups.append(self._join(sender, address, mine))
        elif self.sends:
            assert self._listener is not None
            with MeetingPoint(self._listener, len(parts), self.deadline) as point:
                for part, peers in workers.items():
                    self._groups.append(self._open_group(point.store(f"{part}/"), 0, [str(self.member), *peers]))
        self._group_id = group_id
        self._pool = self._pool or ThreadPoolExecutor(
            max(len(self._groups), 1), thread_name_prefix=f"rlctl-{self.name}"
        )

    def _join(self, sender: int, address: str, workers: list[str]) -> CollectiveGroup:
        peer = f"trainer {sender}"
        store, channel = join(address, self.options.token, peer, self.deadline, f"{self.member.part}/")
        with channel:
            return self._open_group(store, workers.index(str(self.member)) + 1, [peer, *workers])

    def _put(self, bucket: FilledBucket) -> Work[None]:
        what = f"sending bucket {bucket.meta.index}"
        content = [message_of(message, bucket.data, bucket.placed) for message in messages(bucket.meta)]
        group, head = self._groups[self.lane], [part.to(self.options.device) for part in _headed(bucket.meta)]
        return _All([group.broadcast(part, self.deadline, what) for part in (*head, *content)])

    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        assert self._pool is not None
        return InThread(self._pool, lambda: self._receive(sender, buffer), WAITING)

    def _receive(self, sender: int, buffer: torch.Tensor) -> BucketMeta:
        group = self._groups[sender]
        head, arrival = self._heads.pop(sender) if sender in self._heads else self._expect_head(group)
        arrival.wait(self.deadline)
        message = head.cpu()
        nbytes, used = _HEAD.unpack_from(message.numpy().data)
        if not (0 < nbytes <= _MAX_META and used <= buffer.numel()):
            raise CorruptedError(f"a bucket of {used} bytes and {nbytes} of description was announced")
        encoded = message[_HEAD.size : _HEAD.size + nbytes]
        if nbytes > encoded.numel():
            rest = self._message(nbytes - encoded.numel())
            group.broadcast(rest, self.deadline, WAITING).wait(self.deadline)
            encoded = torch.cat([encoded, rest.cpu()])
        meta = BucketMeta.decode(encoded.numpy().data)
        if meta.used != used:
            raise CorruptedError(f"bucket {meta.index} came with {used} bytes and describes {meta.used}")
        placed, due = self.placed(meta), messages(meta)
        parts = [room_for(message, buffer, placed) for message in due]
        works = [group.broadcast(part, self.deadline, WAITING) for part in parts]
        if meta.summary is None:  # the next head is under way while this content is
            self._heads[sender] = self._expect_head(group)
        _All(works).wait(self.deadline)
        for runs, part in zip(due, parts, strict=True):
            spread(runs, part, buffer)
        return meta

    def _expect_head(self, group: CollectiveGroup) -> tuple[torch.Tensor, Work[None]]:
        head = self._message(HEAD_NBYTES)
        return head, group.broadcast(head, self.deadline, WAITING)

    def _message(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.options.device)

    def _settle(self) -> None:
        """Return when what this process has begun to do with a bucket on its device is done: the next one is received
        in another thread, which knows of no stream but the device's default."""
        device = torch.device(self.options.device)
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    def cancel(self) -> None:
        """See CheckpointEngine. Waits end at once."""
        super().cancel()
        for group in self._groups:
            group.end_waits()

    def _disconnect(self, *, failed: bool) -> None:
        self._close_listener()
        if failed or not self.options.extras.get("keep_group", True):
            self._end_groups()

    def _end_groups(self) -> None:
        for group in self._groups:
            group.close()
        if self._pool is not None:  # no thread may write into a bucket any more
            self._pool.shutdown()
            self._pool = None
        self._groups, self._group_id, self._heads = [], "", {}

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _headed(meta: BucketMeta) -> list[torch.Tensor]:
    encoded = meta.encode()
    framed = bytearray(_HEAD.pack(len(encoded), meta.used) + encoded)
    framed += bytes(max(HEAD_NBYTES - len(framed), 0))
    message = torch.frombuffer(framed, dtype=torch.uint8)
    return [message[:HEAD_NBYTES]] + [message[HEAD_NBYTES:]] * (len(framed) > HEAD_NBYTES)


class _All:
    """Several works as one."""

    def __init__(self, works: list[Work[None]]) -> None:
        self._works = works

    def wait(self, deadline: Deadline) -> None:
        """See Work."""
        for work in self._works:
            work.wait(deadline)
