"""A trainer rank that generates, too: what it does beside training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from rlctl.errors import RlctlError
from rlctl.process import Channel
from rlctl.runtime.ranks.rank import OPERATIONS, Operation, Rank, serve

if TYPE_CHECKING:
    from rlctl.rollout.base import Output
    from rlctl.rollout.on_ranks import RankRollout


class _Made:
    """The rollout life of this process, from ``host`` on."""

    rollout: RankRollout


_MADE = _Made()


def _host(rank: Rank, setup: dict[str, Any]) -> Any:
    from rlctl.rollout.on_ranks import RankRolloutSetup
    from rlctl.rollout.registry import RANK_ENGINES

    told = msgspec.convert({**setup, "device": rank.device}, RankRolloutSetup)
    _MADE.rollout = RANK_ENGINES.load(told.engine, where="rollout.engine")(told)
    return msgspec.to_builtins(_MADE.rollout.seat)


def _switch(rank: Rank, version: int) -> Any:
    return msgspec.to_builtins(_MADE.rollout.switch(rank.engine, version))


def _decode(rank: Rank, requests: list[list[Any]], ticks: int) -> Any:
    del rank
    with _waiting():
        _MADE.rollout.submit(_requests(requests))
        return _outputs(_MADE.rollout.decode(ticks))


def _generate(rank: Rank, requests: list[list[Any]]) -> Any:
    del rank
    mine = _requests(requests)
    with _waiting():
        return _outputs(_MADE.rollout.generate(mine) if mine else [])


@contextmanager
def _waiting() -> Iterator[None]:
    """Raise what torch.distributed raised, by which the run knows that this rank only waited for another one."""
    try:
        yield
    except RlctlError as error:
        if isinstance(error.__cause__, RuntimeError):
            raise error.__cause__ from None
        raise


def _abort(rank: Rank) -> Any:
    del rank
    return _outputs(_MADE.rollout.abort())


def _requests(by_replica: list[list[Any]]) -> list[Any]:
    """Return those of this rank's replica."""
    from rlctl.rollout.base import Request

    replica = _MADE.rollout.seat.replica
    return msgspec.convert(by_replica[replica], list[Request]) if replica >= 0 else []


def _outputs(outputs: list[Output]) -> Any:
    """Return them as plain data where this rank speaks for its replica."""
    return msgspec.to_builtins(outputs) if _MADE.rollout.seat.part == 0 else []


GENERATION: dict[str, Operation] = {
    "host": _host,
    "switch": _switch,
    "wake": lambda _rank: _MADE.rollout.wake(),
    "sleep": lambda _rank: _MADE.rollout.sleep(),
    "decode": _decode,
    "generate": _generate,
    "abort": _abort,
}


def main(channel: Channel) -> None:
    """Entry point of the process."""
    serve(channel, {**OPERATIONS, **GENERATION})
