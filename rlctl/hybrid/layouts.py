"""The two layouts of a hybrid engine, and the plan between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.errors import UsageError
from rlctl.hybrid.device_plan import device_plan, rollout_layout
from rlctl.hybrid.lora.parts import adapter_weights
from rlctl.hybrid.sizes import check_sizes
from rlctl.keys.lora.contents import LoraModule
from rlctl.keys.model_spec import ModelSpec
from rlctl.registry import suggest
from rlctl.rollout.registry import RANK_ENGINES
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.plan import Plan
from rlctl.sync.weights import model_weights

TRAINING = ("dp+fsdp", "dp+fsdp+tp")
ROLLOUT = ("tp", "dp")
EMBEDDING = ("fsdp", "whole")


@dataclass(frozen=True)
class Sizes:
    """How ``tp_size`` x ``dp_size`` ranks are used in the two lives.

    Attributes:
        training: ``dp+fsdp``: FSDP2 over all ranks; ``dp+fsdp+tp``: FSDP2 over ``dp`` groups, each ``tp`` wide.
        rollout: ``tp``: ``dp`` replicas of ``tp`` ranks; ``dp``: a whole copy on each rank.
        tp, dp: the sizes.
        embedding: of generation: ``fsdp``: embedding and head are spread over a replica's ranks; ``whole``: every
            rank has them whole, which saves two collectives a token and costs memory and bytes of a switch.
            Training spreads them over all ranks either way.
        engine: what generates, as ``rollout.engine`` names it.
        pad: of generation: heads and feed-forward that ``tp`` does not divide are padded with zeros.
    """

    training: str
    rollout: str
    tp: int
    dp: int
    embedding: str
    engine: str = "transformers"
    pad: bool = False

    def check(self, world: int) -> None:
        """Raise UsageError for names that there are not, or sizes that are not those of ``world`` ranks."""
        for name, value, known in (
            ("training_parallel", self.training, TRAINING),
            ("rollout_parallel", self.rollout, ROLLOUT),
            ("embedding_sharding", self.embedding, EMBEDDING),
            ("rollout_engine", self.engine, RANK_ENGINES.names()),
        ):
            if value not in known:
                near = suggest(value, known)
                fix = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
                raise UsageError(f"{name} {value!r} is not known", fix=fix)
        if self.engine == "vllm" and self.whole_vocab:
            raise UsageError(
                "vLLM cuts embedding and head over the ranks of a replica",
                fix="give embedding_sharding='fsdp', or rollout_engine='transformers'",
            )
        if self.tp * self.dp != world:
            pairs = ", ".join(f"{n} x {world // n}" for n in range(1, world + 1) if world % n == 0)
            raise UsageError(
                f"tp_size {self.tp} x dp_size {self.dp} is not the {world} ranks that there are",
                fix=f"tp_size x dp_size: {pairs}",
            )

    @property
    def training_tp(self) -> int:
        """Tensor parallelism while training."""
        return self.tp if self.training == "dp+fsdp+tp" else 1

    @property
    def rollout_tp(self) -> int:
        """Ranks of a replica."""
        return self.tp if self.rollout == "tp" else 1

    @property
    def whole_vocab(self) -> bool:
        """Whether a replica's ranks have embedding and head whole."""
        return self.embedding == "whole"

    @property
    def replicas(self) -> int:
        """Replicas that generate."""
        return self.tp * self.dp // self.rollout_tp

    def plan(
        self, config: Mapping[str, Any], dtype: str, *, devices_per_node: int, adapted: Sequence[LoraModule] = ()
    ) -> Plan:
        """Return the plan from training to generation.

        Args:
            config: the model's config.json.
            dtype: safetensors code of what generation computes in.
            devices_per_node: neighbouring ranks on one node.
            adapted: layers whose adapter is trained; the adapter moves, too.

        Raises:
            UsageError: the model cannot be cut that way.
        """
        world = self.tp * self.dp
        train = ParallelLayout.fsdp(world // self.training_tp, tp=self.training_tp, whole_vocab=True)
        rollout = rollout_layout(self.engine, self.replicas, self.rollout_tp, pad=self.pad)
        rollout = replace(rollout, whole_vocab=self.whole_vocab)
        spec = ModelSpec.from_config(config)
        check_sizes(spec, self.training_tp, world)
        if not self.pad:
            check_sizes(spec, self.rollout_tp, world, pads=self.engine != "vllm")
        weights = model_weights(spec, dtype)
        weights += adapter_weights(adapted, weights)
        return device_plan(weights, train, rollout, devices_per_node=devices_per_node)
