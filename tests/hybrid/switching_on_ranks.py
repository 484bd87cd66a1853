"""What ranks do in the tests of the checkpoint engine that moves weights in place."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from rlctl.hybrid.checkpoint_engine import ReshardEngine
from rlctl.hybrid.device_plan import embedded_layout, trainer_layout
from rlctl.hybrid.kept import kept_nbytes
from rlctl.hybrid.tp.engine import TensorParallelEngine
from rlctl.hybrid.tp.group import TensorGroup
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import CorruptedError
from rlctl.sync.slicing import Layouts
from tests.sync.sliced_models import random_config, trainer_shards, whole_model

ODD = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 101}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def engine_of(
    config: dict[str, Any], tp: int, train_tp: int, dtype: str, *, pad: bool = False, **options: Any
) -> ReshardEngine:
    ranks = dist.get_world_size()
    spec = ModelSpec.from_config(config)
    layouts = Layouts.of_model(spec, trainer_layout(ranks, train_tp), embedded_layout(1, tp, pad=pad), dtype=dtype)
    return ReshardEngine(
        Member("trainer", dist.get_rank(), ranks), EngineOptions(timeout=60.0, layouts=layouts, **options)
    )


def switch(engine: ReshardEngine, full: dict[str, torch.Tensor], version: int) -> None:
    assert engine.layouts is not None
    train, rank = engine.layouts.train, engine.member.rank
    held = trainer_shards(engine.layouts, full, rank)
    for name in [w.name for w in engine.layouts.weights if w.split.kind == "vocab"]:  # the trainer keeps them whole
        held[name] = full[name].chunk(train.shard)[rank // train.tp]
    kwargs = engine.build_topology(engine.member.world, 0, [engine.prepare()] * engine.member.world)
    engine.init_process_group(**kwargs[engine.member.rank])
    engine.send_weights(held.items(), version)
    engine.finalize()


def becomes(seed: int, tp: int, train_tp: int, dtype: str, delta: bool = False, pad: bool = False) -> dict[str, Any]:
    """Switch twice and compare each time with an engine that was given whole tensors."""
    config = random_config(random.Random(seed)) | {"num_key_value_heads": 4 if train_tp > 1 else 2}
    config |= ODD if pad else {}
    engine = engine_of(config, tp, train_tp, dtype, pad=pad, extras={"delta": delta})
    assert engine.layouts is not None
    devices = engine.plan.placement.rollout
    assert all(list(devices[i : i + tp]) == sorted(devices[i : i + tp]) for i in range(0, len(devices), tp))
    groups = [list(devices[i : i + tp]) for i in range(0, len(devices), tp)]
    own = [dist.new_group(members) for members in groups]
    group = None if tp == 1 else next(g for g, m in zip(own, groups, strict=True) if dist.get_rank() in m)
    said = []
    for version in (0, 1):
        full = whole_model(engine.layouts, seed + version)
        switch(engine, full, version)
        shards = dict(engine.receive_weights(version))
        made = AutoConfig.for_model(**config)
        how = {"group": TensorGroup(group), "dtype": DTYPES[dtype], "max_length": 64, "pad": pad}
        expected = TensorParallelEngine(made, **how)
        expected.load_weights(full.items(), version)
        adopting = TensorParallelEngine(made, **how)
        adopting.adopt(shards, version)
        assert adopting.version == version
        held, due = adopting._decoder.named_weights(), expected._decoder.named_weights()
        wrong = [n for n in due if not torch.equal(held[n].view(torch.uint8), due[n].view(torch.uint8))]
        assert not wrong and set(held) == set(due), wrong
        said.append([engine.stats.bytes_moved, engine.report.received_bytes])
    engine.release()
    assert not engine.shards
    ranks = dist.get_world_size()
    due = kept_nbytes(ModelSpec.from_config(config), dtype, ranks, train_tp, ranks // tp, tp, 0, pad=pad)[
        dist.get_rank()
    ]
    kept = {"kept": engine.report.kept_bytes, "due": sum(due)}
    return {"said": said, "planned": engine.plan.bytes_moved, "digest": engine.digest.hex(), **kept}


def flipped(seed: int, tp: int, who: int) -> str:
    """Have one bit flip on rank ``who`` between the wire and the check."""
    engine = engine_of(random_config(random.Random(seed)), tp, 1, "BF16")
    assert engine.layouts is not None
    full = whole_model(engine.layouts, seed)
    switch(engine, full, 0)
    bring = engine.bring

    def faulty(held: Any, version: int) -> Any:
        shards = bring(held, version)
        if dist.get_rank() == who:
            name = sorted(shards)[seed % len(shards)]
            shards[name].view(-1).view(torch.uint8)[-1] ^= 1
        return shards

    engine.bring = faulty  # type: ignore[method-assign]
    try:
        switch(engine, full, 1)
    except CorruptedError as error:
        assert not engine.shards
        return error.message
    return ""
