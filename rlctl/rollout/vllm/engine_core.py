"""What vLLM's engine core does around calls that write weights, in engines that rlctl updates.

- What was computed with the old weights is dropped. vLLM's ``LLM`` and its update calls leave the prefix cache alone: a
  prompt that was cached before an update would be continued with keys and values of the old weights. The core forgets
  them as soon as a call has written weights, also one that failed; requests that run are computed again.
- After an update of vLLM's own that failed half way (``update_weights``, not staged) the weights may be a mix: a core
  in a process of its own stands still, and refuses to be resumed, until a later update has succeeded. (In the caller's
  process nobody could wait for that; there the error is all.) rlctl's manager fences the replica itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rlctl.errors import UnavailableError
from rlctl.rollout.vllm.names import updated_by_rlctl

WRITING = frozenset({"update_weights", "finish_weight_update", "rlctl_load"})
_STAGED, _FENCED = "_rlctl_staged", "_rlctl_fenced"


def guard_updates() -> None:
    """Wrap the core's calls to its workers. Raises UnavailableError when this vLLM has them otherwise."""
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore.collective_rpc, "guards_updates", False):
        return
    known = {"collective_rpc": "method", "reset_prefix_cache": "reset_running_requests", "resume_scheduler": "self"}
    for name, parameter in known.items():
        if parameter not in inspect.signature(getattr(EngineCore, name, int)).parameters:
            raise UnavailableError(f"EngineCore has no {name}({parameter}), or has it otherwise")
    EngineCore.collective_rpc = _guarded_rpc(EngineCore.collective_rpc)
    EngineCore.resume_scheduler = _guarded_resume(EngineCore.resume_scheduler)


def _guarded_rpc(rpc: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCoreProc

    @functools.wraps(rpc)
    def guarded(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not updated_by_rlctl(self.vllm_config):
            return rpc(self, method, *args, **kwargs)
        if method == "init_weight_transfer_engine":
            # As (timeout, args, kwargs), in order or by name.
            given = kwargs.get("kwargs") or (args[2] if len(args) > 2 else None) or {}
            setattr(self, _STAGED, bool(given.get("init_info", {}).get("staged", False)))
        try:
            answer = rpc(self, method, *args, **kwargs)
        except BaseException:
            waits = isinstance(self, EngineCoreProc)
            if method == "update_weights" and waits and not getattr(self, _STAGED, False):
                setattr(self, _FENCED, True)
                self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            raise
        finally:
            if method in WRITING:
                self.reset_prefix_cache(reset_running_requests=True)
        if method == "finish_weight_update" and getattr(self, _FENCED, False):
            setattr(self, _FENCED, False)
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
        return answer

    guarded.guards_updates = True  # type: ignore[attr-defined]
    return guarded


def _guarded_resume(resume: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resume)
    def guarded(self: Any) -> Any:
        if getattr(self, _FENCED, False):
            raise RuntimeError("the last weight update failed half way: the next one that succeeds resumes the engine")
        return resume(self)

    return guarded
