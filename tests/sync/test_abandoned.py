"""What a failed sync left behind does nothing to the next."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member
from rlctl.sync.errors import TransferError
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.traits import BACKEND_TRAITS
from tests.sync.squad import TWO_SIDED, runnable
from tests.sync.wire_cases import assert_same, blank, hard_tensors

CROSSING = [name for name in TWO_SIDED if name not in ("naive", "file")]


@contextmanager
def connected(trainer: CheckpointEngine, worker: CheckpointEngine, pool: ThreadPoolExecutor) -> Iterator[None]:
    kwargs = trainer.build_topology(1, 1, [trainer.prepare(20), worker.prepare(20)])
    one = pool.submit(lambda: trainer.init_process_group(**kwargs[0]))
    worker.init_process_group(**kwargs[1])
    one.result()
    yield


@pytest.mark.parametrize("backend", CROSSING)
def test_a_stream_left_in_the_middle_is_closed_in_a_later_sync(backend: str) -> None:
    runnable(backend)
    extras = {"way": "ring"} if BACKEND_TRAITS[backend].ways else {}
    options = EngineOptions(bucket_size=4096, timeout=20.0, token="abandoned", extras=extras)  # noqa: S106
    kind = CHECKPOINT_ENGINES.load(backend)
    trainer, worker = kind(Member("trainer", 0, 1), options), kind(Member("rollout", 0, 1), options)
    weights = hard_tensors(0)
    with ThreadPoolExecutor(1) as pool:
        with connected(trainer, worker, pool):
            sending = pool.submit(lambda: trainer.send_weights(weights.items(), 1))
            left = worker.receive_weights(1)
            next(left)
            worker.finalize()
            with pytest.raises(TransferError):
                sending.result(20)
            trainer.finalize()
        with connected(trainer, worker, pool):
            left.close()  # type: ignore[attr-defined]
            sending = pool.submit(lambda: trainer.send_weights(weights.items(), 2))
            targets: dict[str, torch.Tensor] = blank(0)
            assert worker.receive_into(2, targets).complete
            sending.result(20)
            assert_same(weights, targets)
        for engine in (trainer, worker):
            engine.finalize()
            engine.close()
