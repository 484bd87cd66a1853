"""The names under which vLLM knows rlctl's parts; of plain strings, so that they cost nothing to import."""

from __future__ import annotations

PREFIX = "rlctl-"
PACKAGE = "rlctl.rollout.vllm"
EXTENSION = f"{PACKAGE}.extension.WeightExtension"
#: Under these vLLM's requests name the adapter that rlctl sends: ``LoRARequest(ADAPTER, ADAPTER_ID, ADAPTER)``.
ADAPTER, ADAPTER_ID = "rlctl", 1


def backend_of(engine: str) -> str | None:
    """Return the checkpoint engine behind a weight-transfer backend of vLLM's, None when it is not rlctl's."""
    return engine.removeprefix(PREFIX) if engine.startswith(PREFIX) else None


def updated_by_rlctl(vllm_config: object) -> bool:
    """Whether weights of the engine with this ``VllmConfig`` are updated by rlctl: the plugin changes no other."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    parallel = getattr(vllm_config, "parallel_config", None)
    named = backend_of(str(getattr(transfer, "backend", ""))) is not None
    return named or getattr(parallel, "worker_extension_cls", "") == EXTENSION
