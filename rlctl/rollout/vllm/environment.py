"""The environment of a replica's process, set before vLLM is imported: vLLM and its children read it once."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from rlctl.process import TOKEN_VARIABLE

#: Process id of a replica: the engine core that it starts ends with it.
PARENT_VARIABLE = "RLCTL_VLLM_PARENT"


def set_environment(
    environ: MutableMapping[str, str], *, source: str, device: str, tensor_parallel: int, threads: int, token: str
) -> None:
    """Set what vLLM needs to run as a replica; what a user has set stays, but for what rlctl builds on.

    Args:
        environ: changed in place.
        source: folder or hub name of the model.
        device: as torch names it.
        tensor_parallel: workers of the engine.
        threads: compute threads of each worker; 0 leaves it to the libraries.
        token: of the run.
    """
    environ[TOKEN_VARIABLE] = token
    environ[PARENT_VARIABLE] = str(os.getpid())
    # The engine core is a process of its own either way. A single worker lives in it, several are its children.
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if tensor_parallel == 1 else "1"
    if device == "cpu" and threads:
        environ["OMP_NUM_THREADS"] = str(threads)
    if Path(source).is_dir():
        environ.setdefault("HF_HUB_OFFLINE", "1")
    set_defaults(environ, device)


def set_defaults(environ: MutableMapping[str, str], device: str) -> None:
    """Set, where a user has not, what a process wants in which vLLM computes; see ``set_environment``."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if device == "cpu":
        # Log-probs alone would be compiled for 14 s; threads that spin while they wait take the cores from the trainer.
        defaults |= {
            "TORCH_COMPILE_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"
        }  # fmt: skip
    for name, value in defaults.items():
        environ.setdefault(name, value)
