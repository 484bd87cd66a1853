"""Runs a plan from files to files, one tensor at a time, with no more memory than the largest tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlctl.errors import Finding
from rlctl.keys.boxes import Box, first_offset, is_one_run, volume, whole
from rlctl.keys.dtypes import dtype_nbytes, torch_dtype
from rlctl.keys.layout import Ref, TensorInfo
from rlctl.keys.live import arranged, difference
from rlctl.keys.plan import Copy, Move, Plan, PlanError, Same
from rlctl.keys.sinks import Sink, Stretch
from rlctl.keys.stored_tensors import StoredTensors
from rlctl.keys.tensor_file import TensorEntry

PIECE = 4 << 20  # elements that are read at once
Advance = Callable[[float], None]


def execute(plan: Plan, source: StoredTensors, sink: Sink, *, advance: Advance = lambda _: None) -> None:
    """Check what the plan takes for equal, then write every target to ``sink``.

    Args:
        plan: must have no findings.
        source: the tensors that the plan reads.
        sink: takes the targets; it is finished on success and left to its folder on failure.
        advance: told the bytes of each finished target.

    Raises PlanError when tensors that must be equal differ, TensorFileError for a damaged source.
    """
    plan.check()
    check_same(plan, source)
    whole_jobs: list[tuple[Ref, TensorEntry]] = []
    buffer = _Buffer()
    for move in plan.moves:
        stretches = unchanged_bytes(move, source)
        pieces = source.pieces(move.sources[0]) if is_rename(move, source) else None
        if pieces is not None:
            sink.write_pieces(move.target, pieces)
        elif stretches is None:
            sink.write(move.target, _built(move, source, buffer))
        elif _is_whole(move, stretches):
            whole_jobs.append((move.target, stretches[0].entry))
            continue
        else:
            sink.stretches(move.target, stretches)
        advance(move.nbytes)
    # All at once, so that neighbours that stay neighbours are copied in one call.
    sink.copy(whole_jobs)
    advance(sum(entry.nbytes for _, entry in whole_jobs))
    sink.finish()


def is_rename(move: Move, source: StoredTensors) -> bool:
    """Tell whether a target is one whole source, element for element in order, in its dtype."""
    if len(move.copies) != 1 or move.padding:
        return False
    (copy,) = move.copies
    info = source.infos[copy.source]
    return (
        (info.shape, info.dtype) == (move.shape, move.dtype) and copy.source_box == whole(info.shape) and copy.in_order
    )


def unchanged_bytes(move: Move, source: StoredTensors) -> list[Stretch] | None:
    """Return a target as stretches of bytes of its sources, or None when elements change, move apart or are cast."""
    stretches = []
    for copy in move.copies:
        entry = source.entry(copy.source)
        info = source.infos[copy.source]
        if entry is None or info.dtype != move.dtype or not copy.in_order:
            return None
        if not is_one_run(copy.source_box, info.shape) or not is_one_run(copy.target_box, move.shape):
            return None
        if copy.source_box == whole(info.shape):
            start, count = 0, entry.nbytes
        else:
            start = dtype_nbytes(info.dtype, first_offset(copy.source_box, info.shape))
            count = dtype_nbytes(info.dtype, volume(copy.source_box))
        at = dtype_nbytes(move.dtype, first_offset(copy.target_box, move.shape))
        stretches.append(Stretch(entry, start, at, count))
    return stretches


def check_same(plan: Plan, source: StoredTensors) -> None:
    """Compare, byte for byte, what the plan takes for equal. Raises PlanError that names every pair that differs."""
    findings: list[Finding] = [difference(same) for same in plan.same if not _equal(same, source)]
    if findings:
        raise PlanError("tensors that must be equal differ", findings)


def verify(plan: Plan, source: StoredTensors, written: StoredTensors, *, advance: Advance = lambda _: None) -> None:
    """Read the output again and compare each element with what the plan says it is.

    Raises PlanError that names every tensor that is absent, of another shape or dtype, or different.
    """
    findings = []
    for move in plan.moves:
        fault = _fault(move, source, written)
        if fault:
            findings.append(Finding(fault, str(move.target)))
        advance(move.nbytes)
    extra = written.infos.keys() - {move.target for move in plan.moves}
    findings += [Finding("is in the output but not in the plan", str(ref)) for ref in sorted(extra)]
    if findings:
        raise PlanError("the output is not what was planned", findings)


class _Buffer:
    """Memory that is reused for one target after the other: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        count = dtype_nbytes(info.dtype, volume(whole(info.shape)))
        if count > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8)  # let the old one go before the new one comes
            self._bytes = torch.empty(count, dtype=torch.uint8)
        return self._bytes[:count].view(torch_dtype(info.dtype)).view(info.shape)


def _built(move: Move, source: StoredTensors, buffer: _Buffer) -> torch.Tensor:
    out = buffer.tensor(TensorInfo(move.shape, move.dtype))
    if move.padding:
        out.zero_()
    for copy in move.copies:
        for piece in copy.pieces(PIECE):
            out[_slices(piece.target_box)] = arranged(source.read(piece.source, piece.source_box), piece)
    return out


def _is_whole(move: Move, stretches: list[Stretch]) -> bool:
    return len(stretches) == 1 and not move.padding and stretches[0].count == stretches[0].entry.nbytes


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(span.slice for span in box)


def _equal(same: Same, source: StoredTensors) -> bool:
    probe = Copy(same.kept, same.box, same.box, tuple(range(len(same.box))))
    if source.infos[same.kept].dtype != source.infos[same.extra].dtype:
        return False
    return all(
        _same_bits(source.read(same.kept, piece.source_box), source.read(same.extra, piece.source_box))
        for piece in probe.pieces(PIECE)
    )


def _fault(move: Move, source: StoredTensors, written: StoredTensors) -> str | None:
    info = written.infos.get(move.target)
    if info is None:
        return "is absent from the output"
    if info != TensorInfo(move.shape, move.dtype):
        return f"is {info.dtype} {list(info.shape)} in the output, not {move.dtype} {list(move.shape)}"
    if move.padding:
        expected = _built(move, source, _Buffer())
        return None if _same_bits(expected, written.read(move.target, whole(move.shape))) else "differs in the output"
    dtype = torch_dtype(move.dtype)
    for copy in move.copies:
        for piece in copy.pieces(PIECE):
            expected = arranged(source.read(piece.source, piece.source_box), piece).to(dtype)
            if not _same_bits(expected, written.read(move.target, piece.target_box)):
                return "differs in the output"
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
