"""A trainer and a worker of the mooncake engine in one process, and syncs between them."""

from __future__ import annotations

import torch

from rlctl.sync.backends.mooncake import MooncakeEngine
from rlctl.sync.calls import call

Weights = dict[str, torch.Tensor]
Pair = tuple[MooncakeEngine, MooncakeEngine]


def weights(seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    sizes = {"large": 3_000_001, "medium": 200_000, "small": 5000, "tiny": 3}
    made = {n: torch.randint(0, 256, (s,), generator=g, dtype=torch.uint8) for n, s in sizes.items()}
    made["tied"] = made["large"][1000:400_000]  # in the memory of another
    return made


def connect(*engines: MooncakeEngine) -> None:
    kwargs = MooncakeEngine.build_topology(1, 1, [engine.prepare() for engine in engines])
    for future in [call(lambda e=e, k=k: e.init_process_group(**k), "connect") for e, k in zip(engines, kwargs)]:  # type: ignore[misc]  # noqa: B905
        future.result(timeout=20)


def sync(pair: Pair, source: Weights, targets: Weights, version: int = 1) -> None:
    trainer, worker = pair
    connect(trainer, worker)
    sending = call(lambda: trainer.send_weights(source.items(), version), "send")
    worker.receive_into(version, targets)
    sending.result(timeout=20)
    for engine in pair:
        engine.finalize()
