"""Who sends what to whom in which message: a plan as one rank carries it out. Arithmetic only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl.hybrid.reshard.micro_groups import Column, Gather, columns_of, gathers_of, group_ranks, micro_groups
from rlctl.hybrid.reshard.pieces import Message, Piece, cut, in_rounds, messages, piece_of
from rlctl.sync.plan import Plan
from rlctl.sync.tensor_meta import ALIGN


@dataclass
class Schedule:
    """One rank's part of a plan.

    Attributes:
        copies: what its own device holds.
        groups: sets of ranks that have collectives, this rank's or not.
        gathers: collectives, in the order in which every rank takes part in its own.
        sends, receives: by the other rank, the messages of each round.
        wanted: its generation shards: name -> (shape, dtype), as far as slices go into them.
    """

    copies: list[Piece] = field(default_factory=list)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    gathers: list[Gather] = field(default_factory=list)
    sends: dict[int, list[tuple[Message, ...]]] = field(default_factory=dict)
    receives: dict[int, list[tuple[Message, ...]]] = field(default_factory=dict)
    wanted: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Rounds of the busiest pair."""
        return max(map(len, (*self.sends.values(), *self.receives.values())), default=0)

    def arriving(self) -> Iterator[Piece]:
        """Yield all pieces that this rank's generation shards are made of."""
        yield from self.copies
        yield from (piece for gather in self.gathers for column in gather.columns for piece in column.others.values())
        yield from (piece for message in messages_of(self.receives) for piece in message.pieces)

    def round(self, number: int) -> tuple[list[Message], list[Message]]:
        """Return what is sent and what is received in a round."""
        return _nth(self.sends, number), _nth(self.receives, number)


def message_sizes(plan: Plan, round_nbytes: int) -> dict[tuple[int, int], int]:
    """Return the most bytes that two ranks of the group exchange in one round, (sender, receiver) -> bytes.

    The messages of a round are ``round_nbytes`` at a rank. Most of it is dealt by what each pair exchanges, so that
    pairs are done after equally many rounds, and a quarter evenly, so that what is little goes in a few messages.
    """
    ranks = group_ranks(plan)
    pairs, loads, counts = (Counter[Any]() for _ in range(3))
    for (src, dst, link), nbytes in plan.traffic.pairs.items():
        if link != "device" and nbytes:
            sender, receiver = ranks[plan.placement.train[src]], ranks[plan.placement.rollout[dst]]
            pairs[sender, receiver] += nbytes
            loads.update({sender: nbytes, receiver: nbytes})
            counts.update({sender: 1, receiver: 1})
    sizes = {}
    for (src, dst), nbytes in pairs.items():
        load, count = max(loads[src], loads[dst]), max(counts[src], counts[dst])
        most = 3 * round_nbytes * nbytes // (4 * load) + round_nbytes // (4 * count)
        sizes[src, dst] = max(most // ALIGN, 1) * ALIGN
    return sizes


def schedule(
    plan: Plan, rank: int, *, round_nbytes: int, gather_below: float, names: Collection[str] | None = None
) -> Schedule:
    """Return what ``rank`` of the group does.

    Args:
        plan: the same on every rank.
        rank: its place among the devices of the plan.
        round_nbytes: of a rank's messages that are under way together, and of one collective.
        gather_below: slices of fewer bytes go by collectives where the members of a micro-group exchange alike.
        names: only these weights.
    """
    ranks, dtypes = group_ranks(plan), {weight.name: weight.dtype for weight in plan.weights}
    device = next(device for device, found in ranks.items() if found == rank)
    train = plan.placement.train.index(device) if device in plan.placement.train else -1
    rollout = plan.placement.rollout.index(device) if device in plan.placement.rollout else -1
    most = message_sizes(plan, round_nbytes)
    found = Schedule()
    sends, receives = defaultdict[int, list[Piece]](list), defaultdict[int, list[Piece]](list)
    columns = defaultdict[tuple[int, ...], list[Column]](list)
    exchanges, single = micro_groups(plan, gather_below)
    for members, runs in exchanges:
        found.groups.add(members)
        if rank in members:
            columns[members] += columns_of(plan, runs, members, rank, dtypes, names)
    for run in single:
        if run.src != train and run.dst != rollout:
            continue
        for transfer in plan.expand(run):
            if names is not None and transfer.tensor not in names:
                continue
            piece = piece_of(transfer, dtypes[transfer.tensor])
            if run.link == "device":
                found.copies.append(piece)
            elif run.src == train:
                to = ranks[plan.placement.rollout[run.dst]]
                sends[to] += cut(piece, most[rank, to])
            else:
                of = ranks[plan.placement.train[run.src]]
                receives[of] += cut(piece, most[of, rank])
    for members in sorted(columns):
        found.gathers += gathers_of(members, columns[members], round_nbytes)
    found.sends = {to: _rounds(rank, to, pieces, most[rank, to]) for to, pieces in sends.items()}
    found.receives = {of: _rounds(of, rank, pieces, most[of, rank]) for of, pieces in receives.items()}
    for piece in found.arriving():
        _grow(found.wanted, piece)
    return found


def messages_of(by_rank: Mapping[int, Collection[tuple[Message, ...]]]) -> Iterator[Message]:
    """Yield the messages of all ranks and rounds."""
    yield from (message for rounds in by_rank.values() for found in rounds for message in found)


def _rounds(src: int, dst: int, pieces: Iterable[Piece], most: int) -> list[tuple[Message, ...]]:
    return list(in_rounds(messages(src, dst, pieces, most), most))


def _nth(by_rank: dict[int, list[tuple[Message, ...]]], number: int) -> list[Message]:
    return [message for rounds in by_rank.values() for message in (rounds[number] if number < len(rounds) else ())]


def _grow(wanted: dict[str, tuple[tuple[int, ...], str]], piece: Piece) -> None:
    shape = tuple(high for _, high in piece.dst_box)
    before, _ = wanted.get(piece.dst, (shape, piece.dtype))
    wanted[piece.dst] = (tuple(map(max, shape, before)), piece.dtype)
