"""Weights over torch.distributed's gloo: plain TCP between CPUs.

Trainer rank s < ``senders`` broadcasts its share in a group of itself and all rollout workers; the groups work side by
side. ``keep_group`` (default true): while the same members take part, their groups stay.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed

from rlctl.errors import UnavailableError
from rlctl.sync.backends.gloo_group import GlooGroup
from rlctl.sync.bucket_engine import BucketEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Kwargs, Member, Metadata
from rlctl.sync.errors import CorruptedError
from rlctl.sync.rendezvous import MeetingPoint, join
from rlctl.sync.runs import memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.work import InThread, Work

# A bucket's description comes in one message of this size, with the two sizes before it; a longer one in two.
HEAD_NBYTES = 8192
_HEAD = struct.Struct("<IQ")
_MAX_META = 64 << 20
_WAITING = "waiting for a bucket"


class GlooEngine(BucketEngine):
    """See the module."""

    name = "gloo"
    places = True

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self._listener: Listener | None = None
        self._groups: list[GlooGroup] = []
        self._group_id = ""
        self._heads: dict[int, tuple[torch.Tensor, Work[None]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            raise UnavailableError("this build of torch has no gloo", fix="pip install torch")

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
            "rollouts": rollout_world,
        }
        return [shared for _ in metadata]

    def _connect(self, *, group_id: str, keep: bool, addresses: list[str], rollouts: int) -> None:
        if keep:
            return
        self._end_groups()
        workers = [f"rollout {rank}" for rank in range(rollouts)]
        if self.member.role == "rollout":
            for sender, address in enumerate(addresses):
                self._groups.append(self._join(sender, address, workers))
        elif self.sends:
            assert self._listener is not None
            peers = [str(self.member), *workers]
            with MeetingPoint(self._listener, rollouts, self.deadline) as point:
                self._groups.append(GlooGroup(point.store(), 0, peers, self.options.host, self.deadline))
        self._group_id = group_id
        self._pool = self._pool or ThreadPoolExecutor(max(len(self._groups), 1), thread_name_prefix="rlctl-gloo")

    def _join(self, sender: int, address: str, workers: list[str]) -> GlooGroup:
        peer = f"trainer {sender}"
        store, channel = join(address, self.options.token, peer, self.deadline)
        with channel:
            return GlooGroup(store, self.member.rank + 1, [peer, *workers], self.options.host, self.deadline)

    def _put(self, bucket: FilledBucket) -> Work[None]:
        what = f"sending bucket {bucket.meta.index}"
        content = [memory_of(run, bucket.data, bucket.placed) for run in runs(bucket.meta)]
        group = self._groups[0]
        return _All([group.broadcast(part, self.deadline, what) for part in (*_headed(bucket.meta), *content)])

    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        assert self._pool is not None
        return InThread(self._pool, lambda: self._receive(sender, buffer), _WAITING)

    def _receive(self, sender: int, buffer: torch.Tensor) -> BucketMeta:
        group = self._groups[sender]
        head, arrival = self._heads.pop(sender) if sender in self._heads else self._expect_head(group)
        arrival.wait(self.deadline)
        nbytes, used = _HEAD.unpack_from(head.numpy().data)
        if not (0 < nbytes <= _MAX_META and used <= buffer.numel()):
            raise CorruptedError(f"a bucket of {used} bytes and {nbytes} of description was announced")
        encoded = head[_HEAD.size : _HEAD.size + nbytes]
        if nbytes > encoded.numel():
            encoded = torch.cat([encoded, torch.empty(nbytes - encoded.numel(), dtype=torch.uint8)])
            rest = encoded[HEAD_NBYTES - _HEAD.size :]
            group.broadcast(rest, self.deadline, _WAITING).wait(self.deadline)
        meta = BucketMeta.decode(encoded.numpy().data)
        if meta.used != used:
            raise CorruptedError(f"bucket {meta.index} came with {used} bytes and describes {meta.used}")
        placed = self.placed(meta)
        parts = [memory_of(run, buffer, placed) for run in runs(meta)]
        works = [group.broadcast(part, self.deadline, _WAITING) for part in parts]
        if meta.summary is None:  # the next head is under way while this content is
            self._heads[sender] = self._expect_head(group)
        _All(works).wait(self.deadline)
        return meta

    def _expect_head(self, group: GlooGroup) -> tuple[torch.Tensor, Work[None]]:
        head = torch.empty(HEAD_NBYTES, dtype=torch.uint8)
        return head, group.broadcast(head, self.deadline, _WAITING)

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
