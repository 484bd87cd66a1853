"""What was computed with the old weights is dropped with every update.

vLLM's ``LLM`` and its update calls leave the prefix cache alone: a prompt that was cached before an update would be
continued with keys and values of the old weights. In engines that rlctl updates, the engine core forgets them as soon
as a call has written weights, also one that failed; requests that run are computed again from their tokens.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rlctl.errors import UnavailableError
from rlctl.rollout.vllm.names import updated_by_rlctl

WRITING = frozenset({"update_weights", "finish_weight_update", "rlctl_load"})


def reset_with_updates() -> None:
    """Wrap the engine core's calls to its workers. Raises UnavailableError when this vLLM has them otherwise."""
    from vllm.v1.engine.core import EngineCore

    rpc = getattr(EngineCore, "collective_rpc", None)
    if getattr(rpc, "resets_cache", False):
        return
    reset = getattr(EngineCore, "reset_prefix_cache", None)
    if rpc is None or reset is None or list(inspect.signature(rpc).parameters)[:2] != ["self", "method"]:
        raise UnavailableError("EngineCore has no collective_rpc(method, ...) or no reset_prefix_cache")
    if "reset_running_requests" not in inspect.signature(reset).parameters:
        raise UnavailableError("EngineCore.reset_prefix_cache cannot reset what running requests use")

    @functools.wraps(rpc)
    def rpc_and_reset(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return rpc(self, method, *args, **kwargs)
        finally:
            if method in WRITING and updated_by_rlctl(self.vllm_config):
                self.reset_prefix_cache(reset_running_requests=True)

    rpc_and_reset.resets_cache = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = rpc_and_reset
