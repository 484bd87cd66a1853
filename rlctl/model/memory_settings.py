"""How a model engine saves device memory. No torch here: it is told to other processes before they load it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """How an engine saves device memory. None of it but ``activation_dtype`` changes a result.

    Attributes:
        activation_dtype: element type of passes; that of the weights handed to rollouts when None.
        gradient_checkpointing: a layer's activations are computed again in the backward pass instead of being kept.
        offload_params, offload_optimizer: what ``offload`` moves to host memory.
    """

    activation_dtype: str | None = None
    gradient_checkpointing: bool = False
    offload_params: bool = True
    offload_optimizer: bool = True


NOTHING_SAVED = Memory()
"""Passes keep what they need; all of the model leaves the device in ``offload``."""
