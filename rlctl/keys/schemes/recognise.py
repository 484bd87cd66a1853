"""Which naming scheme a set of names is: what speaks for each, and a refusal where two would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.keys.layout import Layout, Ref

Build = Callable[[], Layout]


@dataclass(frozen=True)
class Recognised:
    """The scheme of a set of names and what it was told by."""

    layout: Layout
    why: str


def recognise(names: set[Ref], candidates: Mapping[str, Build], *, where: str) -> Recognised:
    """Return the one of ``candidates`` that accounts for most of ``names``.

    Args:
        names: clean names with their rank folders.
        candidates: scheme -> what makes its layout of this model; one that cannot be made (UsageError) is passed over.
        where: how messages name the source.

    Of schemes that are the same for this model (a dense model has no experts to stack) the first is taken. Raises
    UsageError when none accounts for half of the names, and when two different ones account for equally many.
    """
    layouts: dict[str, Layout] = {}
    faults: dict[str, str] = {}
    for scheme, build in candidates.items():
        try:
            layouts[scheme] = build()
        except UsageError as error:
            faults[scheme] = error.message
    if not layouts:
        raise UsageError(f"no scheme fits: {'; '.join(faults.values())}", where=where)
    held = {scheme: {ref for ref in names if ref in one.stored} for scheme, one in layouts.items()}
    best = max(len(found) for found in held.values())
    winners = [scheme for scheme, found in held.items() if len(found) == best]
    counted = sum(layouts[winners[0]].drop_reason(ref.name) is None for ref in names)
    if 2 * best <= counted:
        listing = ", ".join(f"{scheme} {len(found)}" for scheme, found in held.items())
        first = sorted(str(ref) for ref in names)[:4]
        raise UsageError(
            f"the names are of no scheme known for this model (of {counted} names: {listing}); first: "
            f"{', '.join(first)}",
            where=where,
            fix="is config.json that of this checkpoint? name the scheme with --from, or give a --map",
        )
    different = [s for s in winners[1:] if layouts[s].stored != layouts[winners[0]].stored]
    if different:
        raise UsageError(
            f"ambiguous: {best} of {counted} names are those of {' and of '.join([winners[0], *different])}",
            where=where,
            fix="name the scheme with --from",
        )
    return Recognised(layouts[winners[0]], _why(winners[0], best, counted, held, layouts))


def _why(scheme: str, best: int, counted: int, held: Mapping[str, set[Ref]], layouts: Mapping[str, Layout]) -> str:
    text = f"{best} of {counted} names are those of the {scheme} form"
    others = [s for s in layouts if s != scheme]
    own = held[scheme].difference(*(layouts[s].stored for s in others)) if others else set()
    if own:
        sign = min(own, key=lambda ref: (ref.shard, ref.name))
        return f"{text}, and only there is {sign}"
    return text
