"""Several buckets that the mooncake engine reads in one call of the library."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch

from rlctl.sync.backends.mooncake_transport import Piece, Transport
from rlctl.sync.calls import call
from rlctl.sync.errors import GivenUpError, PeerLostError, TransferError
from tests.sync.mooncake_pair import Pair, connect, sync, weights


@pytest.mark.mooncake
def test_buckets_that_were_told_of_are_read_in_one_call(
    library: Transport, mooncakes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors come with the message; a bucket that needs its memory ends the row, and all arrive in order."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    g, order = torch.Generator().manual_seed(seed), random.Random(seed)
    source = {f"w{n}": torch.randint(0, 256, (900_000,), generator=g, dtype=torch.uint8) for n in range(24)}
    source |= {f"s{n}": torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8) for n in range(4)}
    source = {name: source[name] for name in order.sample(sorted(source), len(source))}
    targets = {name: torch.zeros_like(t) for name, t in source.items()}
    calls: list[list[Piece]] = []
    ahead, read = True, library.read

    def slow(segment: str, batch: Sequence[Piece]) -> bool:
        if batch[0].nbytes > 1:  # else the library is made to connect
            calls.append(list(batch))
        while len(calls) == 1 and ahead and mooncakes[0]._announcers[0].told < 16:
            time.sleep(0.001)
        return read(segment, batch)

    monkeypatch.setattr(library, "read", slow)
    mooncakes[0].bind(source)
    sync(mooncakes, source, targets, 1)
    assert all(torch.equal(targets[n], t) for n, t in source.items())
    pieces = [piece for call in calls for piece in call]
    assert max(len(call) for call in calls) == 8
    assert len(pieces) == 24 and all(piece.nbytes == 900_000 for piece in pieces)
    large = [name for name in source if name.startswith("w")]
    stranger = {name: t.clone() if name in (large[5], large[12]) else t for name, t in source.items()}
    ahead = False
    calls.clear()
    for target in targets.values():
        target.zero_()
    sync(mooncakes, stranger, targets, 2)  # two of them are not where they can be read: they are in their buckets
    assert all(torch.equal(targets[n], t) for n, t in source.items())
    assert len([piece for call in calls for piece in call]) == 24 and len(calls) >= 3


@pytest.mark.mooncake
def test_what_was_read_while_its_sender_gave_up_is_not_taken(
    library: Transport, mooncakes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, worker = mooncakes
    source = weights(5)
    targets = {name: torch.zeros_like(t) for name, t in source.items()}
    trainer.bind(source)
    connect(*mooncakes)
    read = library.read

    def given_up(segment: str, batch: Sequence[Piece]) -> bool:
        trainer.cancel()
        return read(segment, batch)

    monkeypatch.setattr(library, "read", given_up)
    sending = call(lambda: trainer.send_weights(source.items(), 1), "send")
    with pytest.raises((PeerLostError, GivenUpError)):
        worker.receive_into(1, targets)
    with pytest.raises(TransferError):
        sending.result(timeout=20)
