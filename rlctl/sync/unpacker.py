"""Taking named tensors out of buckets of bytes: as views where they lie, or straight into their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rlctl.keys.dtypes import dtype_code, torch_dtype
from rlctl.sync.buckets import FilledBucket, allocate, copy_array, copy_bytes, hash_bytes
from rlctl.sync.digest import Hasher, SyncDigest, Verify, bind, hasher
from rlctl.sync.errors import CorruptedError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.routine import Routine, Routines
from rlctl.sync.targets import Content, Target, matching, target_of
from rlctl.sync.tensor_meta import BucketMeta, Chunk, SyncSummary, TensorMeta


class Unpacker:
    """Reads the buckets of syncs. It keeps the scratch memory for tensors that came in pieces, so one receiver keeps
    one Unpacker and calls ``begin`` before each sync.
    """

    summary: SyncSummary | None

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._open: dict[str, _Open] = {}
        self._held: Mapping[str, Target] = {}
        self._routines = Routines()
        self.summary = None
        self.begin(version=0)

    def begin(self, *, version: int, base_version: int | None = None, verify: Verify = "full") -> None:
        """Expect a sync of ``version``; ``summary`` is None until all of it has arrived and been checked."""
        if self.summary is None:  # after one that failed memory may be another's
            self._routines.forget()
        self.summary = None
        self._version = version
        self._base_version = base_version
        self._verify: Verify = verify
        self._digest = SyncDigest(version, base_version)
        self._next_bucket = 0
        self._close_all()

    def tensors(self, buckets: Iterable[FilledBucket]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), each one checked; a tensor is only valid until the next one is asked for.

        Tensors lie where they arrived; only one that came in pieces is put together in scratch memory of its size.

        Raises:
            CorruptedError: a bucket is missing, repeated or of another sync, a digest differs, or the end is missing.
        """
        for chunk, data, state in self._chunks(buckets):
            meta = chunk.tensor
            if chunk.whole:
                hash_bytes(data, state.hashing)
                target = data
            else:
                target = self._assembled(state, data.device)
                copy_bytes(target[chunk.start : chunk.start + chunk.nbytes], data, state.hashing)
            if chunk.ends:
                self._close(chunk, state.hashing)
                yield meta.name, target.view(torch_dtype(meta.dtype)).view(meta.shape)
        self._require_end()

    def relay(self, buckets: Iterable[FilledBucket], acquire: Callable[[int], torch.Tensor]) -> Iterator[FilledBucket]:
        """Copy bucket k into the buffer ``acquire(k)``, checking it on the way, and yield it there."""
        for bucket in buckets:
            meta = bucket.meta
            buffer = acquire(meta.index)[: meta.used]
            for chunk, data, state in self._chunks([bucket]):
                part = slice(chunk.offset, chunk.offset + chunk.nbytes)
                copy_bytes(buffer[part], data, state.hashing)
                if chunk.ends:
                    self._close(chunk, state.hashing)
            yield FilledBucket(meta, buffer)
        self._require_end()

    def hold(self, targets: Mapping[str, torch.Tensor]) -> Mapping[str, Target]:
        """Look up where the tensors of ``targets`` are; the same object as last time when all are where they were."""
        last = self._held
        held = {name: target_of(name, t, last.get(name)) for name, t in targets.items()}
        if len(held) != len(last) or any(target is not last.get(name) for name, target in held.items()):
            self._held = held
        return self._held

    def into(
        self,
        buckets: Iterable[FilledBucket],
        targets: Mapping[str, torch.Tensor],
        *,
        cast: bool = False,
        held: Mapping[str, Target] | None = None,
    ) -> LoadReport:
        """Copy every tensor into the one of its name in ``targets``, each byte once.

        Args:
            buckets: as they arrive.
            targets: name -> tensor of the same shape; written in place.
            cast: let a target have another dtype (torch's conversion); otherwise that is an error.
            held: what ``hold`` has just returned for the targets.

        Raises:
            CorruptedError: as for ``tensors``; targets may have been written in part.
            MismatchError: a shape differs, or a dtype does and ``cast`` is off.
        """
        # What needs no bytes is done for many tensors at once: between copies neither code nor data are in the cache.
        held = self.hold(targets) if held is None else held
        loaded, unknown = list[str](), list[str]()
        for bucket in buckets:
            meta = bucket.meta
            self._check_bucket(meta, bucket.data)
            routine = self._routines.of(bucket, held) if self._verify == "off" else None
            if routine is not None:
                self._follow(routine)
                loaded += routine.loaded
                unknown += routine.unknown
                if meta.summary is not None:
                    self._finish(meta.summary)
                continue
            content = Content(bucket)
            states = [self._continue(chunk) for chunk in meta.chunks]
            ends = [held.get(chunk.tensor.name) for chunk in meta.chunks]
            pairs = [content.pair(n, chunk, end) for n, (chunk, end) in enumerate(zip(meta.chunks, ends, strict=True))]
            for n, (chunk, state, end, pair) in enumerate(zip(meta.chunks, states, ends, pairs, strict=True)):
                if end is None or (pair is not None and end.address + chunk.start == content.address(n, chunk)):
                    # Nobody wants it, or it is there already: both sides share the memory, or it was received there.
                    hash_bytes(content.tensor(n, chunk), state.hashing)
                elif pair is not None:
                    copy_array(*pair, state.hashing)
                else:
                    self._copy(chunk, content.tensor(n, chunk), matching(chunk.tensor, end.tensor, cast=cast), state)
            for chunk, state, end in zip(meta.chunks, states, ends, strict=True):
                if chunk.ends:
                    self._close(chunk, state.hashing)
                    (unknown if end is None else loaded).append(chunk.tensor.name)
                    self._free_scratch(self._open.pop(chunk.tensor.name))
            if meta.summary is not None:
                self._finish(meta.summary)
        self._require_end()
        done = set(loaded)
        return LoadReport(loaded, unknown, [name for name in targets if name not in done])

    def _follow(self, routine: Routine) -> None:
        if self._open and not routine.names.keys().isdisjoint(self._open):
            raise CorruptedError("a whole tensor arrived in the middle of itself")
        self._digest.add_unverified(routine.names, routine.nbytes)
        states = [self._continue(chunk) for chunk in routine.pieces]
        for to, out_of in routine.copies:
            np.copyto(to, out_of)
        for chunk, state in zip(routine.pieces, states, strict=True):
            if chunk.ends:
                self._close(chunk, state.hashing)
                self._free_scratch(self._open.pop(chunk.tensor.name))

    def _copy(self, chunk: Chunk, data: torch.Tensor, target: torch.Tensor, state: _Open) -> None:
        meta = chunk.tensor
        part = slice(chunk.start, chunk.start + chunk.nbytes)
        if target.is_contiguous() and dtype_code(target.dtype) == meta.dtype:
            copy_bytes(target.reshape(-1).view(torch.uint8)[part], data, state.hashing)
            return
        if not chunk.whole:
            whole = self._assembled(state, data.device)
            copy_bytes(whole[part], data, state.hashing)
            data = whole
        else:
            hash_bytes(data, state.hashing)
        if chunk.ends:
            target.copy_(data.view(torch_dtype(meta.dtype)).view(meta.shape))

    def _chunks(self, buckets: Iterable[FilledBucket]) -> Iterator[tuple[Chunk, torch.Tensor, _Open]]:
        for bucket in buckets:
            self._check_bucket(bucket.meta, bucket.data)
            content = Content(bucket)
            for number, chunk in enumerate(bucket.meta.chunks):
                yield chunk, content.tensor(number, chunk), self._continue(chunk)
                if chunk.ends:
                    self._free_scratch(self._open.pop(chunk.tensor.name))
            if bucket.meta.summary is not None:
                self._finish(bucket.meta.summary)

    def _check_bucket(self, meta: BucketMeta, data: torch.Tensor) -> None:
        if meta.version != self._version:
            raise CorruptedError(f"a bucket of version {meta.version} arrived in the sync to version {self._version}")
        if meta.index != self._next_bucket:
            raise CorruptedError(f"bucket {meta.index} arrived where bucket {self._next_bucket} was due")
        if self.summary is not None:
            raise CorruptedError(f"bucket {meta.index} arrived after the end of the sync")
        if data.numel() != meta.used:
            raise CorruptedError(f"bucket {meta.index} has {data.numel()} bytes and describes {meta.used}")
        self._next_bucket += 1

    def _continue(self, chunk: Chunk) -> _Open:
        meta = chunk.tensor
        state = self._open.get(meta.name)
        if state is None:
            state = self._open[meta.name] = _Open(meta, 0, hasher(meta, self._verify, self._version))
        if state.meta != meta or state.due != chunk.start:
            raise CorruptedError(f"byte {chunk.start} of tensor {meta.name} arrived where byte {state.due} was due")
        state.due += chunk.nbytes
        return state

    def _close(self, chunk: Chunk, hashing: Hasher) -> None:
        meta = chunk.tensor
        digest = bind(meta, hashing.content(), version=self._version, base_version=self._base_version)
        if bool(digest) != bool(chunk.digest):
            raise CorruptedError(
                f"tensor {meta.name} came with{'' if chunk.digest else 'out'} a digest, "
                f"and verify is {self._verify} here",
                fix="sync.verify must be the same on both sides",
            )
        if digest != chunk.digest:
            raise CorruptedError(f"tensor {meta.name} did not arrive as it was sent: its digest differs")
        self._digest.add(meta, digest)

    def _finish(self, summary: SyncSummary) -> None:
        mine = (self._digest.tensors, self._digest.nbytes, self._verify, self._base_version, self._digest.digest())
        if mine != (summary.tensors, summary.nbytes, summary.verify, summary.base_version, summary.digest):
            raise CorruptedError(
                f"{mine[0]} tensors of {mine[1]} bytes arrived (verify {mine[2]}, base version {mine[3]}), "
                f"{summary.tensors} of {summary.nbytes} were sent (verify {summary.verify}, base version "
                f"{summary.base_version}), or their digests differ"
            )
        if self._open:
            raise CorruptedError(f"the sync ended in the middle of tensor {next(iter(self._open))}")
        self.summary = summary

    def _require_end(self) -> None:
        if self.summary is None:
            raise CorruptedError(f"the sync to version {self._version} ended after {self._next_bucket} buckets, early")

    def _assembled(self, state: _Open, device: torch.device) -> torch.Tensor:
        meta = state.meta
        if state.scratch is None:
            fitting = [s for s in self._free if s.device == device and s.numel() >= meta.nbytes]
            state.scratch = min(fitting, key=torch.Tensor.numel, default=None)
            if state.scratch is None:
                self._free = [s for s in self._free if s.device != device]  # too small to be used again
                state.scratch = allocate(meta.nbytes, device)
            else:
                self._free = [s for s in self._free if s is not state.scratch]
        return state.scratch[: meta.nbytes]

    def _free_scratch(self, state: _Open) -> None:
        if state.scratch is not None:
            self._free.append(state.scratch)

    def _close_all(self) -> None:
        for state in self._open.values():
            self._free_scratch(state)
        self._open = {}


@dataclass
class _Open:
    """A tensor of which not all has come. Those of several senders may be open at once."""

    meta: TensorMeta
    due: int
    hashing: Hasher
    scratch: torch.Tensor | None = None
