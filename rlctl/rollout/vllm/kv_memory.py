"""Giving the memory of the KV cache back while weights are updated, in vLLM's worker.

On accelerators that is vLLM's sleep mode. Its CPU worker only says that it has none, so there the tensors are let go
and made again by the runner's own allocation; both need that no request uses the cache.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from rlctl.errors import UnavailableError


def release(worker: Any) -> int:
    """Let the cache go; return the bytes that it had (0: it was gone, or stays because sleep mode is off)."""
    from vllm.platforms import current_platform

    runner = worker.model_runner
    nbytes = _nbytes(runner)
    if not current_platform.is_cpu():
        if not worker.vllm_config.model_config.enable_sleep_mode:
            return 0
        worker.discard(("kv_cache",))
        return nbytes
    from vllm.v1.worker.utils import clear_layer_kv_caches

    if not hasattr(runner, "initialize_kv_cache_tensors"):
        raise UnavailableError("this vLLM's CPU runner cannot allocate a KV cache again")
    runner.kv_caches.clear()
    clear_layer_kv_caches(worker.vllm_config.compilation_config.static_forward_context.values())
    trim()
    return nbytes


def restore(worker: Any) -> int:
    """Allocate the cache again, empty; return the bytes that it has. Nothing is done when it is there."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    runner = worker.model_runner
    if not current_platform.is_cpu():
        if worker.vllm_config.model_config.enable_sleep_mode:
            worker.wake_up(["kv_cache"])
    elif not runner.kv_caches:
        with set_current_vllm_config(worker.vllm_config):
            runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)  # noqa: SLF001
    return _nbytes(runner)


def trim() -> None:
    """Have the allocator hand what was freed to the system."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl needs none
        if malloc_trim is not None:
            malloc_trim(0)


def _nbytes(runner: Any) -> int:
    # Two layers may share one storage.
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    return sum(storages.values())
