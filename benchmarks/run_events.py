"""What the events of a run say of it; for ``modes.py`` and ``kill_soak.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlctl.experience.events import (
    Dispatched,
    Event,
    Evicted,
    GroupEnded,
    SegmentMade,
    Selected,
    StepEnded,
    SyncEnded,
)


def lag_of_tokens(events: Iterable[Event]) -> Counter[int]:
    """Return lag -> how many tokens were trained so late: the version that replicas were last brought to, when a group
    was taken for training, less the version that made the token."""
    version = 0
    made: dict[int, list[SegmentMade]] = {}
    lags: Counter[int] = Counter()
    for event in events:
        if isinstance(event, SyncEnded) and event.status != "failed":
            version = event.version
        elif isinstance(event, SegmentMade) and not event.observation:
            made.setdefault(event.ordinal, []).append(event)
        elif isinstance(event, Selected):
            for segment in (segment for ordinal in event.ordinals for segment in made.pop(ordinal, [])):
                lags[version - segment.version] += segment.tokens
    return lags


def mixed_responses(events: Iterable[Event]) -> int:
    """Return how many responses have tokens of several versions."""
    versions: dict[tuple[int, int], set[int]] = {}
    for event in events:
        if isinstance(event, SegmentMade) and not event.observation:
            versions.setdefault((event.ordinal, event.sample), set()).add(event.version)
    return sum(len(found) > 1 for found in versions.values())


def groups_per_second(events: Iterable[Event], prompts: int) -> float:
    """Return groups trained or made, whichever are fewer, by the second of the middle of a run: what was made ahead
    before, and what is used up at the end, does not count.

    Args:
        prompts: of a step.
    """
    kept = list(events)
    ends = [event for event in kept if isinstance(event, StepEnded)]
    first, last = ends[len(ends) // 3], ends[-1 - len(ends) // 10]
    made = sum(isinstance(event, GroupEnded) and first.seq < event.seq < last.seq for event in kept)
    return min((last.step - first.step) * prompts, made) / (last.time - first.time)


def faults_of(events: Iterable[Event], *, rows: int, epochs: int, bound: int, drops: bool) -> list[str]:
    """Return what is wrong with the lineage of a finished run, in words.

    Every prompt of every epoch is trained exactly once, or is dropped where that is allowed, and then it is listed and
    not trained; no token is older than the bound.

    Args:
        rows: prompts of an epoch.
        epochs: how many.
        bound: the greatest lag of a token.
        drops: whether groups may be dropped.
    """
    kept = list(events)
    trained = Counter(ordinal for event in kept if isinstance(event, Selected) for ordinal in event.ordinals)
    dropped = Counter(event.ordinal for event in kept if isinstance(event, Evicted))
    found = [f"prompt {ordinal} was trained {count} times" for ordinal, count in trained.items() if count != 1]
    found += [f"prompt {ordinal} was dropped {count} times" for ordinal, count in dropped.items() if count != 1]
    found += [f"prompt {ordinal} was trained and dropped" for ordinal in sorted(trained.keys() & dropped.keys())]
    if dropped and not drops:
        found.append(f"prompts were dropped: {sorted(dropped)}")
    everything = set(range(rows * epochs))
    missing, foreign = everything - trained.keys() - dropped.keys(), trained.keys() - everything
    if missing:
        found.append(f"prompts were never trained: {sorted(missing)}")
    if foreign:
        found.append(f"prompts were trained that no epoch has: {sorted(foreign)}")
    row_of = {event.ordinal: event.row for event in kept if isinstance(event, Dispatched)}
    uses = Counter(row_of[ordinal] for ordinal in [*trained, *dropped] if ordinal in row_of)
    found += [f"row {row} was used {count} times in {epochs} epochs" for row, count in uses.items() if count != epochs]
    lags = lag_of_tokens(kept)
    if not lags:
        found.append("no token was trained")
    elif max(lags) > bound or min(lags) < 0:
        found.append(f"tokens of lag {min(lags)} to {max(lags)} were trained, and the bound is {bound}")
    return found
