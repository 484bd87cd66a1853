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

from rlctl.keys.dtypes import dtype_code
from rlctl.sync.buckets import allocate
from rlctl.sync.delta_codec import DENSE_ABOVE, DeltaHeader, apply, encode, find_changes, read_header
from rlctl.sync.digest import Bytes, content_digest
from rlctl.sync.errors import CorruptedError, MismatchError, WrongBaseError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta, require_same_dtype

MARK = "#delta"
# Coding fewer bytes than this saves nothing.
SMALLEST = 1024
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
    data: Bytes
    meta: TensorMeta
    digest: bytes


class DeltaEncoder:
    """The sender's side: one copy of the last committed weights.

    A sync ends by ``commit`` or ``rollback``. After a rollback the base is the one before, except for tensors that
    were sent whole, which will be sent whole again.

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

    @property
    def base_nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(base.data.nbytes for base in self._base.values())

    def stream(self, tensors: Stream, *, whole: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what to send for ``tensors`` (contiguous CPU tensors, or copied to be).

        Args:
            tensors: the new weights, all of them.
            whole: send everything whole: an anchor, for receivers whose version is not ``version``.
        """
        assert not self._pending, "the sync before was neither committed nor rolled back"
        assert not self._renewed
        self.stats = DeltaStats()
        for name, tensor in tensors:
            meta = TensorMeta.of(name, tensor)
            flat = _source_bytes(tensor)
            payload = None if whole else self._delta(meta, flat)
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
        """Make what was sent the base: every receiver that serves has it."""
        for name, payload in self._pending.items():
            base = self._base[name]
            base.digest = apply(payload, base.data).result
        self._pending.clear()
        self._renewed.clear()
        self.version = version

    def rollback(self) -> None:
        """Keep the base of the version before."""
        self._pending.clear()
        for name in self._renewed:
            del self._base[name]
        self._renewed.clear()

    def _delta(self, meta: TensorMeta, flat: Bytes) -> Bytes | None:
        base = self._base.get(meta.name)
        if base is None or base.meta != meta or meta.nbytes < SMALLEST:
            return None
        change = find_changes(base.data, flat, meta.dtype)
        if change.density > DENSE_ABOVE:
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
        data = base.data if base is not None and reuse else allocate(meta.nbytes).numpy()
        np.copyto(data, flat)
        self._base[meta.name] = _Base(data, meta, content_digest(data))
        self._renewed.add(meta.name)


class DeltaDecoder:
    """The receiver's side: applies deltas to its weights of the last committed version, in place.

    Args:
        targets: name -> contiguous CPU tensor. These may be the engine's live weights, or a copy of them.
        check_bytes: hash targets before and after a delta, not only compare what was recorded of them.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], *, check_bytes: bool = True) -> None:
        self._targets = targets
        self._check_bytes = check_bytes
        self._digests: dict[str, bytes] = {}

    def load(self, tensors: Stream) -> LoadReport:
        """Write a stream that ``DeltaEncoder.stream`` made and a transport carried into the targets.

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
            if sent == name:
                self._whole(name, target, tensor)
            else:
                self._delta(name, target, tensor)
            loaded.append(name)
        done = set(loaded)
        return LoadReport(loaded, unknown, [name for name in self._targets if name not in done])

    def forget(self) -> None:
        """After a failed sync: the targets are no known version until each was sent whole again."""
        self._digests.clear()

    def _whole(self, name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
        self._digests.pop(name, None)
        if target.shape != tensor.shape:
            raise MismatchError(f"tensor {name} is sent as {tuple(tensor.shape)}, and held as {tuple(target.shape)}")
        require_same_dtype(TensorMeta.of(name, tensor), dtype_code(target.dtype))
        target.detach().copy_(tensor)
        self._digests[name] = content_digest(_target_bytes(target))

    def _delta(self, name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
        payload = tensor.numpy()
        header = read_header(payload)
        data = _target_bytes(target)
        known = self._digests.get(name, b"")
        if self._check_bytes and known:
            known = content_digest(data)
        self._require_base(name, target, header, known)
        self._digests.pop(name)
        apply(payload, data)
        if self._check_bytes and content_digest(data) != header.result:
            raise CorruptedError(f"the delta of {name} does not lead to what was sent")
        self._digests[name] = header.result

    def _require_base(self, name: str, target: torch.Tensor, header: DeltaHeader, known: bytes) -> None:
        if (header.dtype, header.shape) != (dtype_code(target.dtype), tuple(target.shape)):
            raise MismatchError(
                f"tensor {name} is sent as {header.dtype} {header.shape}, and held as {dtype_code(target.dtype)} "
                f"{tuple(target.shape)}"
            )
        if known != header.base:
            held = f"other weights (digest {known.hex()[:8]})" if known else "no committed weights"
            raise WrongBaseError(
                f"the delta of {name} was made against digest {header.base.hex()[:8]}, and there are {held} here",
                fix="a sync of whole tensors gives this receiver a base",
            )


def _source_bytes(tensor: torch.Tensor) -> Bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    found: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
    return found


def _target_bytes(tensor: torch.Tensor) -> Bytes:
    assert tensor.is_contiguous()
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found
