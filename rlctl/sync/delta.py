"""Sending only what changed since the last committed version: a stream of tensors in, a shorter one out, and back.

Deltas travel as uint8 tensors under marked names, so that every transport carries them as it carries any stream.
Tensors without a base, and those of which too much changed, go whole. Each delta names the digest of the tensor it was
made from and of the one it leads to: a receiver with another base refuses it before it writes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.buckets import allocate, copy_array, flat_bytes
from rlctl.sync.delta_codec import DENSE_ABOVE, apply, encode, few_changes, read_header
from rlctl.sync.digest import Bytes, FullHasher, SyncDigest, bind, content_digest
from rlctl.sync.errors import CorruptedError, MismatchError, WrongBaseError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta, require_same_dtype

MARK = "#delta"
# Coding fewer bytes than this saves nothing.
SMALLEST = 1024
HUGE_PAGE = 2 << 20
# A delta kept until its sync is committed may take this share of its tensor; beyond it the base is renewed at once.
KEPT_SHARE = 0.25

Stream = Iterable[tuple[str, torch.Tensor]]


@dataclass
class DeltaStats:
    """One sync's sums: tensors sent whole and as deltas, elements changed in the latter, bytes scanned and sent."""

    whole: int = 0
    deltas: int = 0
    changed: int = 0
    scanned: int = 0
    sent: int = 0


@dataclass
class _Base:
    """A tensor's bytes; ``digest`` is that of the committed ones, which ``ahead``, if any, still leads to."""

    data: Bytes
    meta: TensorMeta
    digest: bytes
    ahead: Bytes | None = None

    def catch_up(self) -> None:
        if self.ahead is not None:
            apply(self.ahead, self.data)
            self.ahead = None


class DeltaEncoder:
    """The sender's side: one copy of the last committed weights, those that this rank sent.

    A sync ends by ``commit`` or ``rollback``. After a rollback the base is the one before, except for tensors that
    were sent whole, which will be sent whole again. Both cost next to nothing: a copy is brought up to date when the
    next sync compares it.

    Attributes:
        version: of the base; None before the first commit.
        stats: of the sync under way, or the last one.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.stats = DeltaStats()
        self._base: dict[str, _Base] = {}
        self._pending: dict[str, Bytes] = {}
        self._renewed: set[str] = set()
        self._sent: set[str] | None = None  # of the sync under way

    @property
    def base_nbytes(self) -> int:
        """Bytes of the copy, and of deltas that it does not have yet."""
        ahead = sum(base.ahead.nbytes for base in self._base.values() if base.ahead is not None)
        pending = sum(payload.nbytes for payload in self._pending.values())
        return sum(base.data.nbytes for base in self._base.values()) + ahead + pending

    def stream(self, tensors: Stream, base_version: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what to send for ``tensors``, in the same order.

        Args:
            tensors: the new weights, all that this rank sends.
            base_version: that every receiver holds. When it is not that of the base, or None, everything goes whole:
                an anchor.
        """
        self.rollback()  # of a sync whose end was not told
        self.stats = DeltaStats()
        sent = self._sent = set()
        anchor = base_version is None or base_version != self.version
        for name, tensor in tensors:
            meta = TensorMeta.of(name, tensor)
            flat = _own_bytes(tensor)
            payload = None if anchor else self._delta(meta, flat)
            sent.add(name)
            self.stats.scanned += meta.nbytes
            if payload is None:
                self._renew(meta, flat)
                self.stats.whole += 1
                self.stats.sent += meta.nbytes
                yield name, tensor
            else:
                self.stats.deltas += 1
                self.stats.sent += payload.nbytes
                yield name + MARK, torch.from_numpy(payload)

    def commit(self, version: int) -> None:
        """Make what was sent the base: every receiver that serves has it. What was not sent has no base any more.

        Without a ``stream`` before, nothing changes when it is the version that the base has.
        """
        if self._sent is None and version == self.version:
            return
        sent = self._sent or set()
        for name, payload in self._pending.items():
            base = self._base[name]
            base.ahead, base.digest = payload, read_header(payload).result
        self._base = {name: base for name, base in self._base.items() if name in sent}
        self._end()
        self.version = version

    def rollback(self) -> None:
        """Keep the base of the version before."""
        for name in self._renewed:
            self._base.pop(name, None)
        self._end()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the base, whole tensors of ``version``, by name. Between syncs only."""
        for name, base in sorted(self._base.items()):
            base.catch_up()
            # A view of no bytes has no strides that another dtype could take.
            data = torch.from_numpy(base.data) if base.meta.nbytes else torch.empty(0, dtype=torch.uint8)
            yield name, data.view(torch_dtype(base.meta.dtype)).view(base.meta.shape)

    def _end(self) -> None:
        self._pending, self._renewed, self._sent = {}, set(), None

    def _delta(self, meta: TensorMeta, flat: Bytes) -> Bytes | None:
        base = self._base.get(meta.name)
        if base is None or base.meta != meta or meta.nbytes < SMALLEST:
            return None
        base.catch_up()
        change = few_changes(base.data, flat, meta.dtype, DENSE_ABOVE)
        if change is None:
            return None
        payload = encode(change, meta.dtype, meta.shape, base.digest)
        if payload.nbytes >= meta.nbytes:
            return None
        self.stats.changed += change.positions.size
        if payload.nbytes > KEPT_SHARE * meta.nbytes:
            self._renew(meta, flat)
        else:
            self._pending[meta.name] = payload
        return payload

    def _renew(self, meta: TensorMeta, flat: Bytes) -> None:
        base = self._base.get(meta.name)
        reuse = base is not None and base.meta.nbytes == meta.nbytes
        data = base.data if base is not None and reuse else _room(meta.nbytes)
        hashing = FullHasher()
        copy_array(data, flat, hashing)
        self._base[meta.name] = _Base(data, meta, hashing.content())
        self._renewed.add(meta.name)


class DeltaDecoder:
    """The receiver's side: writes what ``DeltaEncoder.stream`` made, and a transport carried, into its weights.

    Args:
        targets: name -> tensor, on any device and in any memory layout; written in place.
        version: of the weights that arrive.
        base: name -> tensor of the base version, that ``targets`` are made from; None: they hold it themselves.
        check_bytes: hash the base before a delta and what became of it. Otherwise the caller's word is taken that the
            versions fit.
    """

    def __init__(
        self,
        targets: Mapping[str, torch.Tensor],
        *,
        version: int,
        base: Mapping[str, torch.Tensor] | None = None,
        check_bytes: bool = True,
    ) -> None:
        self._targets = targets
        self._base = targets if base is None else base
        self._check_bytes = check_bytes
        self._version = version
        self._digest = SyncDigest(version)

    def load(self, tensors: Stream) -> LoadReport:
        """Write all of a stream. The report's digest is over what the weights became, however they travelled.

        Raises:
            WrongBaseError: a delta was made against other weights; its target is as before.
            CorruptedError: a delta cannot be read, or does not lead to what was sent.
            MismatchError: shapes or dtypes differ.
        """
        loaded, unknown = list[str](), list[str]()
        for sent, tensor in tensors:
            name = sent.removesuffix(MARK)
            target = self._targets.get(name)
            if target is None:
                unknown.append(name)
                continue
            meta = TensorMeta.of(name, target)
            content = self._whole(meta, target, tensor) if sent == name else self._delta(meta, target, tensor)
            self._digest.add(meta, bind(meta, content, version=self._version))
            loaded.append(name)
        done = set(loaded)
        untouched = [name for name in self._targets if name not in done]
        return LoadReport(loaded, unknown, untouched, self._digest.digest())

    def _whole(self, meta: TensorMeta, target: torch.Tensor, tensor: torch.Tensor) -> bytes:
        if meta.shape != tuple(tensor.shape):
            raise MismatchError(f"tensor {meta.name} is sent as {tuple(tensor.shape)}, and held as {meta.shape}")
        require_same_dtype(TensorMeta.of(meta.name, tensor), meta.dtype)
        target.detach().copy_(tensor)
        return content_digest(_own_bytes(tensor)) if self._check_bytes else b""

    def _delta(self, meta: TensorMeta, target: torch.Tensor, tensor: torch.Tensor) -> bytes:
        payload, data = tensor.cpu().numpy(), flat_bytes(target)
        own = self._base is self._targets
        if data is not None and own:
            content = apply_checked(payload, meta, data, check_bytes=self._check_bytes)
            return content if self._check_bytes else b""
        fresh = np.empty(meta.nbytes, np.uint8) if data is None else data
        hashing = FullHasher()
        copy_array(fresh, _own_bytes(self._base[meta.name]), hashing)
        content = apply_checked(payload, meta, fresh, known=hashing.content(), check_bytes=self._check_bytes)
        if data is None:
            target.detach().copy_(torch.from_numpy(fresh).view(target.dtype).view(target.shape))
        return content if self._check_bytes else b""


def apply_checked(
    payload: Bytes, meta: TensorMeta, data: Bytes, *, known: bytes | None = None, check_bytes: bool = True
) -> bytes:
    """Change ``data``, the bytes of tensor ``meta``, by a delta; return the content digest of what they are then.

    ``known``: their digest before, if it was computed. Raises what ``DeltaDecoder.load`` does.
    """
    header = read_header(payload)
    if (header.dtype, header.shape) != (meta.dtype, meta.shape):
        raise MismatchError(
            f"tensor {meta.name} is sent as {header.dtype} {header.shape}, and held as {meta.dtype} {meta.shape}"
        )
    if check_bytes:
        held = content_digest(data) if known is None else known
        if held != header.base:
            raise WrongBaseError(
                f"the delta of {meta.name} was made against digest {header.base.hex()[:8]}, and there are other "
                f"weights here (digest {held.hex()[:8]})",
                fix="a sync of whole tensors gives this receiver a base",
            )
    apply(payload, data)
    if check_bytes and content_digest(data) != header.result:
        raise CorruptedError(f"the delta of {meta.name} does not lead to what was sent")
    return header.result


def _room(nbytes: int) -> Bytes:
    # A mapping of its own is for what fills huge pages: there are models of more tensors than a process may map.
    return allocate(nbytes).numpy() if nbytes >= HUGE_PAGE else np.empty(nbytes, np.uint8)


def _own_bytes(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes in the order of its elements: its own memory, or a copy of them."""
    flat = flat_bytes(tensor)
    if flat is None:
        flat = flat_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        assert flat is not None
    return flat
