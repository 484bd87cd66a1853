"""What the environment tells torch's device allocator, as far as it matters to engines that sleep."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The setting's name since torch 2.9, and the one before, which still counts."""
_KEY = "expandable_segments"


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the variable that turns expandable segments on, or None.

    The value is a list ``key:value,key:value``; torch takes ``True`` alone for on, and the last of equal keys.
    """
    for name in VARIABLES:
        state = None
        for item in environment.get(name, "").split(","):
            key, _, value = item.partition(":")
            if key.strip() == _KEY:
                state = value.strip()
        if state is not None:
            return name if state == "True" else None
    return None


def sleeping_engine_note(environment: Mapping[str, str]) -> str | None:
    """Return what a user should know who lets an engine sleep on shared CUDA devices, None for nothing.

    An engine's sleep gives back blocks of a memory pool of its own, and expandable segments cannot be in one
    (pytorch#147851); a handle to another process cannot be made of them either.
    """
    name = expandable_segments(environment)
    if name is None:
        return None
    return (
        f"{name} turns on expandable segments: vLLM 0.32 takes its sleeping pool out of them, earlier versions refuse "
        f"to start; rlctl turns them off while weights change hands. If the engine does not start, leave {_KEY} out"
    )
