"""Sets of ranks that exchange alike, so that one collective does what many messages would. Arithmetic only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from rlctl.hybrid.reshard.pieces import Piece, cut, piece_of
from rlctl.keys.dtypes import DTYPE_BITS
from rlctl.sync.boxes import Box, sizes
from rlctl.sync.dealer import Run
from rlctl.sync.plan import Plan


class Column(NamedTuple):
    """Slices of one size that the members of a micro-group hold, one each, and that all of them want.

    Attributes:
        own: the piece of this rank, as it sends it.
        others: by place in the group, the pieces that it gets.
    """

    own: Piece
    others: dict[int, Piece]


class Gather(NamedTuple):
    """One collective of a micro-group: ``ranks`` in order, the columns that travel together, bytes of each member."""

    ranks: tuple[int, ...]
    columns: tuple[Column, ...]
    nbytes: int


def group_ranks(plan: Plan) -> dict[int, int]:
    """Return device -> rank of the group: the devices of both layouts in order."""
    devices = sorted({*plan.placement.train, *plan.placement.rollout})
    return {device: rank for rank, device in enumerate(devices)}


def micro_groups(plan: Plan, below: float) -> tuple[list[tuple[tuple[int, ...], list[Run]]], list[Run]]:
    """Return the exchanges that a collective can do, each as (ranks of the group, its runs), and all other runs.

    A collective does it where every member of a set of ranks sends each other one as many slices of one size. No rank
    is in two groups: those that exchange most are taken, so that no group waits for another.
    """
    ranks = group_ranks(plan)
    single = list[Run]()
    alike = defaultdict[tuple[int, int, int, tuple[int, ...]], list[Run]](list)
    for run in plan.runs:
        if run.link == "device" or run.nbytes >= below:
            single.append(run)
        else:
            alike[run.group, run.first, run.length, sizes(run.cell.box)].append(run)
    found = list[tuple[tuple[int, ...], list[Run]]]()
    for runs in alike.values():
        sent = defaultdict[tuple[int, Box], list[Run]](list)
        for run in runs:
            sent[run.src, run.cell.box].append(run)
        by_members = defaultdict[tuple[int, ...], list[list[Run]]](list)
        for (src, _), same in sent.items():
            to = {ranks[plan.placement.rollout[run.dst]] for run in same}
            by_members[tuple(sorted({ranks[plan.placement.train[src]], *to}))].append(same)
        for members, sets in by_members.items():
            flat = [run for same in sets for run in same]
            each = Counter(ranks[plan.placement.train[same[0].src]] for same in sets)
            if len(each) == len(members) and len(set(each.values())) == 1:
                found.append((members, flat))
            else:
                single += flat
    kept = _disjoint(found)
    single += [run for members, runs in found if members not in kept for run in runs]
    return [(members, runs) for members, runs in found if members in kept], single


def _disjoint(exchanges: Sequence[tuple[tuple[int, ...], Sequence[Run]]]) -> set[tuple[int, ...]]:
    loads = Counter[tuple[int, ...]]()
    for members, runs in exchanges:
        loads[members] += sum(run.nbytes * run.length for run in runs)
    kept = set[tuple[int, ...]]()
    for members, _ in sorted(loads.items(), key=lambda item: (-item[1], item[0])):
        if not any(set(members) & set(other) for other in kept):
            kept.add(members)
    return kept


def columns_of(
    plan: Plan,
    runs: Sequence[Run],
    members: tuple[int, ...],
    rank: int,
    dtypes: Mapping[str, str],
    names: Collection[str] | None,
) -> Iterator[Column]:
    """Yield an exchange's columns as ``rank``, one of its members, sees them: the same ones in the same order on all.

    Args:
        dtypes: of the weights; ``names``: only these weights.
    """
    ranks = group_ranks(plan)
    own, others = list[Piece](), {place: list[Piece]() for place, member in enumerate(members) if member != rank}
    sent = set[Box]()
    for run in runs:
        of, to = ranks[plan.placement.train[run.src]], ranks[plan.placement.rollout[run.dst]]
        first = of == rank and run.cell.box not in sent
        if not first and to != rank:
            continue
        pieces = own if first else others[members.index(of)]
        sent.add(run.cell.box)
        for transfer in plan.expand(run):
            if names is None or transfer.tensor in names:
                pieces.append(piece_of(transfer, dtypes[transfer.tensor]))
    for number, piece in enumerate(own):
        yield Column(piece, {place: pieces[number] for place, pieces in others.items()})


def gathers_of(members: tuple[int, ...], columns: Iterable[Column], most: int) -> Iterator[Gather]:
    """Yield columns as collectives in which all members together bring at most ``most`` bytes."""
    each = max(most // len(members), 1)
    # Equal on all members: the widest dtypes first, so that each piece lies at a multiple of its size.
    ordered = sorted(columns, key=lambda found: -DTYPE_BITS[found.own.dtype])
    pending, nbytes = list[Column](), 0
    for column in chain.from_iterable(_cut_column(whole, each) for whole in ordered):
        if pending and nbytes + column.own.nbytes > each:
            yield Gather(members, tuple(pending), nbytes)
            pending, nbytes = [], 0
        pending.append(column)
        nbytes += column.own.nbytes
    if pending:
        yield Gather(members, tuple(pending), nbytes)


def _cut_column(column: Column, most: int) -> Iterator[Column]:
    parts = {place: cut(piece, most) for place, piece in column.others.items()}
    for own in cut(column.own, most):
        yield Column(own, {place: next(pieces) for place, pieces in parts.items()})
