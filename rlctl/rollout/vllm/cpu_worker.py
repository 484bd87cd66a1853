"""vLLM's CPU worker with a sleep mode: it gives memory back by level, and takes it again by tag.

vLLM's own only says that it has none. In engines that rlctl serves ``worker_cls`` names this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rlctl.rollout.base import WAKE_TAGS
from rlctl.rollout.vllm import kv_memory, plugin, weight_memory


class SleepingCPUWorker(CPUWorker):
    """See above. Its weights are in host memory anyway, so level 1, which on an accelerator moves them there, frees the
    KV cache; level 2 drops the weights too, and a sync has to bring them after waking."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Also where rlctl is not installed, and vLLM so finds no entry point.
        plugin.register()
        self._rlctl_asleep: weight_memory.Emptied = []
        super().__init__(*args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, at level 2 the weights too. No request may be using them."""
        kv_memory.release(self)
        if level >= 2:
            self._rlctl_asleep += weight_memory.release(self.model_runner.get_model())
        kv_memory.trim()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate again what ``tags`` names (None: all); weights that were dropped hold anything until an update."""
        wanted = WAKE_TAGS if tags is None else tags
        if "weights" in wanted:
            weight_memory.restore(self._rlctl_asleep)
            self._rlctl_asleep = []
        if "kv_cache" in wanted:
            kv_memory.restore(self)

    def discard(self, tags: Sequence[str]) -> None:
        """Free what ``tags`` names, without a copy of it."""
        if "kv_cache" in tags:
            kv_memory.release(self)
        if "weights" in tags:
            self._rlctl_asleep += weight_memory.release(self.model_runner.get_model())
        kv_memory.trim()
