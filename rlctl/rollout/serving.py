"""What a replica's process serves, made as its setup says."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from rlctl.errors import UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.model_spec import ModelSpec
from rlctl.rollout.adapter_updates import AdapterUpdates
from rlctl.rollout.registry import ROLLOUT_ENGINES, SERVED_ENGINES
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.served import Served, ServedEngine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_served(setup: ReplicaSetup) -> Served:
    """Return what serves a replica, without weights: of SERVED_ENGINES, else any engine of ROLLOUT_ENGINES, one of
    another package too. Raises UsageError when there is no such engine, or it cannot be made so."""
    name = setup.engine.partition(":")[0]
    if name in SERVED_ENGINES.names():
        return SERVED_ENGINES.load(name)(setup)
    engine = ROLLOUT_ENGINES.load(name, where="rollout.engine")
    if setup.tensor_parallel != 1:
        raise UsageError(
            f"a replica of {setup.tensor_parallel} devices, and the rollout engine {name} runs on one",
            where="placement.replica_tp",
        )
    config = AutoConfig.from_pretrained(setup.source, trust_remote_code=setup.trust_remote_code)
    made = engine(
        config,
        dtype=_DTYPES[setup.dtype],
        max_slots=setup.max_slots,
        max_length=setup.max_length,
        replica=setup.replica,
        device=setup.device,
        trust_remote_code=setup.trust_remote_code,
        **setup.options,
    )
    adapters: AdapterUpdates | None = None
    if setup.adapter is not None:
        adapter = AdapterConfig.parse(setup.adapter)
        experts = ModelSpec.from_config(config.to_dict()).moe if adapter.target_parameters else None
        adapters = AdapterUpdates(made, adapter, experts=experts)
    return ServedEngine(made, setup.token, lockstep=setup.lockstep, adapters=adapters)
