"""An engine of vLLM's in a process that trains, which is left as it was but for the engine."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rlctl.errors import UnavailableError
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.vllm import plugin
from rlctl.rollout.vllm.environment import set_defaults
from rlctl.rollout.vllm.starting import engine_arguments, require_vllm

if TYPE_CHECKING:
    from rlctl.hybrid.sampler import Sampling


def prepare_process(device: str) -> None:
    """Make this process one in which vLLM can be imported, and import it.

    Raises:
        UnavailableError: it is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    set_defaults(os.environ, torch.device(device).type)
    if "torch._dynamo" in sys.modules:  # it has read the environment already
        torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # noqa: SLF001
    require_vllm()
    plugin.register()
    if not dist.is_initialized():  # a device that is alone
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def engine_config(folder: Path, how: Sampling, *, world: int, replica: str) -> Any:
    """Return vLLM's configuration of one replica's engine.

    Args:
        folder: holds the model's config.json.
        world: ranks of the replica.

    Raises:
        UsageError, UnavailableError: see ``engine_arguments``.
    """
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    device = torch.device(how.device)
    setup = ReplicaSetup(
        engine="vllm", source=str(folder), dtype=how.dtype, max_slots=how.max_slots, max_length=how.max_length,
        replica=replica, token="", device=str(device), tensor_parallel=world,
    )  # fmt: skip
    seconds = max(int(how.deadline), 1)
    arguments = {
        **engine_arguments(setup),
        "distributed_executor_backend": "external_launcher",
        "distributed_timeout_seconds": seconds,
        "cpu_distributed_timeout_seconds": seconds,
        "async_scheduling": False,  # all ranks of a replica decide alike
    }
    if device.type != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        arguments["gpu_memory_utilization"] = 0.9 * free / total  # masters and moments are on the device, too
    return EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)


def start(config: Any, rank: int, device: str) -> Any:
    """Return the ``LLMEngine`` of ``rank`` of a replica, whose groups are vLLM's current ones."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlctl.hybrid.vllm.executor import RankExecutor

    executor = RankExecutor.of(rank, torch.device(device).index or 0)
    return LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)


@contextmanager
def described(config: Any) -> Iterator[Path]:
    """Give a folder that describes the model, for as long as vLLM reads it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if config.model_type not in CLASSES:
        raise UnavailableError(f"there is no causal language model of type {config.model_type}")
    with tempfile.TemporaryDirectory(prefix="rlctl-vllm-") as name:
        plain = type(config).from_dict(config.to_dict())
        plain.architectures = plain.architectures or [CLASSES[config.model_type]]
        plain.save_pretrained(name)
        yield Path(name)


@contextmanager
def leave_as_found() -> Iterator[None]:
    """Undo what making an engine does to a process: seeds, and on a CPU a ``torch.set_num_threads`` without effect."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
