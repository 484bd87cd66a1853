"""What training by Megatron-core would need. No torch here: it is said before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

from rlctl.errors import UnavailableError

_PACKAGES = {
    "megatron.core": "megatron-core",
    "transformer_engine": "transformer-engine",
    "megatron.bridge": "megatron-bridge",
}


def not_built() -> UnavailableError:
    """Return the error of whoever asks for it."""
    absent = [package for module, package in _PACKAGES.items() if not _is_there(module)]
    missing = f"; of these, {', '.join(absent)} is not installed here" if absent else ""
    return UnavailableError(
        "model engine megatron is not in this version of rlctl; it will need NVIDIA GPUs and the packages "
        f"{', '.join(_PACKAGES.values())}{missing}",
        where="model.engine",
        fix="set model.engine=fsdp2 (placement.trainer_tp cuts layers over tensor-parallel ranks); rlctl convert-keys "
        "reads and writes Megatron-core checkpoints",
    )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
