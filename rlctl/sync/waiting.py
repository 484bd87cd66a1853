"""Waiting for many answers at once; nobody's silence outlasts the deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlctl.errors import RlctlError
from rlctl.sync.deadline import Deadline
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import MemberLostError
from rlctl.sync.owed import fetched

K = TypeVar("K")

# A future is done soon after its deadline, whatever its member does; past this it is given up.
GRACE = 0.75


@dataclass
class Answers(Generic[K]):
    """What came: results and errors by key."""

    results: dict[K, Any] = field(default_factory=dict)
    errors: dict[K, RlctlError] = field(default_factory=dict)


def gather(
    futures: Mapping[K, Future[Any]],
    deadline: Deadline,
    what: str,
    *,
    on_error: Callable[[K], None] | None = None,
) -> Answers[K]:
    """Return every future's result or error.

    Args:
        futures: what to wait for.
        deadline: a future that is not done soon after it has a MemberLostError: what it will do is not known.
        what: names the wait in that error.
        on_error: called as soon as one has failed, while the others go on.
    """
    answers: Answers[K] = Answers()
    pending = {future: key for key, future in futures.items()}
    patience = Deadline(deadline.remaining + GRACE)
    while pending and not patience.over:
        done = fetched(pending, patience) or wait(pending, patience.remaining, FIRST_EXCEPTION).done
        for future in done:
            key = pending.pop(future)
            error = future.exception()
            if error is None:
                answers.results[key] = future.result()
                continue
            answers.errors[key] = error if isinstance(error, RlctlError) else ErrorData.of(error).error()
            if on_error is not None:
                on_error(key)
    for key in pending.values():
        answers.errors[key] = MemberLostError(deadline.error(what).message)
    return answers
