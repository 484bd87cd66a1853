"""What vLLM's workers are given beside their own methods: ``worker_extension_cls`` names this class.

Arguments are of types that msgpack knows and answers are bytes, an error among them, so that nothing needs pickle and
an error keeps its type on the way out of the engine's process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
from safetensors.torch import load as read_tensors

from rlctl.rollout.vllm.before_cuts import log_before_cuts
from rlctl.rollout.vllm.worker_state import WorkerState
from rlctl.sync.error_data import ErrorData
from rlctl.sync.inlet import LoadOrder


class WeightExtension:
    """Mixed into vLLM's worker class; the names begin with ``rlctl_`` because the worker has many of its own."""

    def rlctl_targets(self) -> bytes:
        """Return [weights (TensorMeta), way of writing them]."""
        return _answer(lambda: _state(self).targets())

    def rlctl_load(self, order: bytes, seconds: float) -> bytes:
        """Load what a checkpoint-engine worker hands on (an encoded LoadOrder); return the LoadReport."""
        return _answer(lambda: _state(self).load(msgspec.msgpack.decode(order, type=LoadOrder), seconds))

    def rlctl_expect_adapters(self, config: bytes) -> bytes:
        """From now on ``rlctl_load`` takes adapters of this configuration (JSON), alone or behind a base."""
        return _answer(lambda: _state(self).adapter.expect(msgspec.json.decode(config)))

    def rlctl_load_adapter(self, config: bytes, tensors: bytes, version: int) -> bytes:
        """Compute with this adapter: its configuration as JSON, its tensors as a safetensors file; return the
        LoadReport."""
        return _answer(lambda: _state(self).adapter.load(msgspec.json.decode(config), read_tensors(tensors), version))

    def rlctl_adapter_version(self) -> bytes:
        """Return the version of the adapter; None before the first, or when an update broke off."""
        return _answer(lambda: _state(self).adapter.version)

    def rlctl_version(self) -> bytes:
        """Return the version that was loaded last; None while the weights are not known to be whole."""
        return _answer(lambda: _state(self).version)

    def rlctl_digests(self, names: list[str] | None = None) -> bytes:
        """Return name -> [dtype, shape, digest] of what the engine computes with; of all names, or of these."""
        return _answer(lambda: _state(self).digests(names))

    def rlctl_read(self, name: str) -> bytes:
        """Return the regions of one tensor that this worker holds, each [[[start, stop], ...], dtype, bytes]."""
        return _answer(lambda: _state(self).read(name))

    def rlctl_release_kv(self) -> bytes:
        """Give the memory of the KV cache back; return the bytes."""
        return _answer(lambda: _state(self).release_kv())

    def rlctl_restore_kv(self) -> bytes:
        """Allocate it again; return the bytes."""
        return _answer(lambda: _state(self).restore_kv())

    def rlctl_sleep(self, level: int) -> bytes:
        """Free memory: level 1 the KV cache (and device memory of the weights), level 2 the weights for good."""
        return _answer(lambda: _state(self).sleep(level))

    def rlctl_wake(self, tags: list[str]) -> bytes:
        """Allocate again what ``tags`` names: "weights", "kv_cache"."""
        return _answer(lambda: _state(self).wake(tags))

    def rlctl_shared_memory(self) -> bytes:
        """Return what the names begin with of the files in shared memory through which workers on a CPU talk."""
        return _answer(lambda: os.environ.get("VLLM_DIST_IDENT", ""))

    def rlctl_log_before_cuts(self) -> bytes:
        """Report log-probs before top-p and top-k cuts from now on; return whether this vLLM can."""
        return _answer(lambda: log_before_cuts(_state(self).runner))


def decoded(answer: bytes) -> Any:
    """Return what a method of ``WeightExtension`` answered, or raise the error that it had."""
    error, result = msgspec.msgpack.decode(answer, type=tuple[ErrorData | None, Any])
    if error is not None:
        raise error.error()
    return result


def _state(worker: Any) -> WorkerState:
    state: WorkerState | None = getattr(worker, "_rlctl_state", None)
    if state is None:
        state = worker._rlctl_state = WorkerState(worker)  # noqa: SLF001 - the worker is this class's own
    return state


def _answer(action: Callable[[], object]) -> bytes:
    try:
        answer: tuple[ErrorData | None, object] = (None, action())
    except Exception as error:  # noqa: BLE001 - raised again by ``decoded``
        answer = (ErrorData.of(error), None)
    return msgspec.msgpack.encode(answer)
