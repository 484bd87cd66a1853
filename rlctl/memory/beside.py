"""Bytes of the models that stand beside the actor: reference, critic, reward model. Each is whole: on the first trainer
rank's device, or a reward model on each device of its pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rlctl.keys.model_spec import ModelSpec
from rlctl.memory.activations import (
    AUTOCAST,
    FLOAT32,
    MicroBatchShape,
    Precision,
    cast_weight_bytes,
    saved_bytes,
)
from rlctl.memory.model_sizes import MASTER_BYTES, MOMENT_BYTES
from rlctl.sync.weights import model_weights


@dataclass(frozen=True)
class BesideModels:
    """Their architectures, None where a run has none or where it is not known; ``reward_bytes`` is the size of one
    element of the reward model."""

    reference: ModelSpec | None = None
    critic: ModelSpec | None = None
    reward: ModelSpec | None = None
    reward_bytes: int = MASTER_BYTES

    def parts(self, shape: MicroBatchShape, precision: Precision) -> dict[str, int]:
        """Return part -> bytes on the device that holds it.

        Args:
            shape: the largest micro-batch of an update.
            precision: of the critic's pass.
        """
        found: dict[str, int] = {}
        if self.reference is not None:
            found["reference_weights"] = _elements(self.reference, head=True) * MASTER_BYTES
        if self.critic is not None:
            elements = _elements(self.critic, head=False)
            found["critic"] = elements * (MASTER_BYTES + MOMENT_BYTES)
            found["critic_gradients"] = elements * MASTER_BYTES
            whole = FLOAT32 if precision.product == FLOAT32.product else AUTOCAST  # it is whole on its rank
            found["critic_activations"] = saved_bytes(self.critic, shape, whole).kept
            found["critic_activations"] += cast_weight_bytes(elements, whole)
        if self.reward is not None:
            found["reward_weights"] = _elements(self.reward, head=False) * self.reward_bytes
        return found


@cache
def _elements(spec: ModelSpec, *, head: bool) -> int:
    """Return the elements of a model; without ``head`` those of its body, beside which a head of one output is
    nothing."""
    return sum(weight.elements for weight in model_weights(spec, "F32") if head or "lm_head" not in weight.name)
