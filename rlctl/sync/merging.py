"""Several senders' buckets as one sync: each sender's sequence checked, then numbered through, with one summary.

Buckets come from whichever sender has one. A tensor has one sender, so its pieces stay in order.
"""

from __future__ import annotations

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.digest import SyncDigest, Verify
from rlctl.sync.errors import CorruptedError
from rlctl.sync.tensor_meta import BucketMeta


class Merger:
    """One sync of several senders."""

    def __init__(self, senders: int, *, version: int, base_version: int | None, verify: Verify) -> None:
        self._version = version
        self._base_version = base_version
        self._verify = verify
        self._index = 0
        self._all = SyncDigest(version, base_version)
        self._each = [_Sequence(version, base_version) for _ in range(senders)]

    def add(self, sender: int, bucket: FilledBucket, *, last: bool) -> FilledBucket:
        """Return a sender's bucket as the next of the whole sync; the ``last`` one has the summary of all.

        Raises CorruptedError when it is not the sender's next, or its summary does not hold.
        """
        meta = bucket.meta
        self._each[sender].check(sender, meta)
        for chunk in meta.chunks:
            if chunk.ends:
                self._all.add(chunk.tensor, chunk.digest)
        summary = self._all.summary(self._verify) if last else None
        merged = BucketMeta(self._index, meta.version, meta.used, meta.chunks, summary)
        self._index += 1
        return FilledBucket(merged, bucket.data, bucket.placed)


class _Sequence:
    def __init__(self, version: int, base_version: int | None) -> None:
        self._next = 0
        self._digest = SyncDigest(version, base_version)
        self._version = version

    def check(self, sender: int, meta: BucketMeta) -> None:
        if meta.index != self._next or meta.version != self._version:
            raise CorruptedError(
                f"bucket {meta.index} of version {meta.version} arrived from trainer {sender} "
                f"where bucket {self._next} of version {self._version} was due"
            )
        self._next += 1
        for chunk in meta.chunks:
            if chunk.ends:
                self._digest.add(chunk.tensor, chunk.digest)
        summary = meta.summary
        if summary is not None and (summary.tensors, summary.digest) != (self._digest.tensors, self._digest.digest()):
            raise CorruptedError(
                f"{self._digest.tensors} tensors arrived from trainer {sender}, which sent {summary.tensors}, "
                "or their digests differ"
            )
