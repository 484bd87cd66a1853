"""The order of a weight sync beside the trainer, and when a validation goes with it. Pure: a sync follows it, and a run
that is told again is compared with it."""

from __future__ import annotations

from typing import Literal

from rlctl.schema import Config

Edge = Literal["pause", "version", "transfer", "lend", "update"]


def sync_edges(*, lend: bool) -> tuple[Edge, ...]:
    """Return the edges that a sync goes through, until the loop has been told of the version; the resume follows on
    that, and where replicas were lent for the validation, they are taken back when it is over."""
    return ("pause", "version", "transfer", "lend", "update") if lend else ("pause", "version", "transfer", "update")


def end_after_failure(*, serves: bool) -> Literal["resume", "stop"]:
    """Return how a sync ends after an edge failed: resumed where a replica serves, else dead; never paused."""
    return "resume" if serves else "stop"


def validates_beside(config: Config, held_out: int, *, step: int, steps: int) -> bool:
    """Whether ``held_out`` prompts are answered while the training goes on after ``step`` of ``steps``. A deterministic
    run stops for that, and the validations before and after the training stand by themselves."""
    every = config.run.validate_every
    return bool(not config.run.deterministic and held_out and every and 0 < step < steps and step % every == 0)
