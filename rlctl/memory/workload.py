"""What a configuration asks of memory: layouts, lengths and precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlctl.keys.model_spec import ModelSpec
from rlctl.memory.activations import AUTOCAST, BFLOAT16, FLOAT32, MicroBatchShape, Precision, micro_batch_shape
from rlctl.memory.beside import BesideModels
from rlctl.memory.model_sizes import ModelSizes
from rlctl.schema import Config
from rlctl.sync.layout import ParallelLayout


@dataclass(frozen=True)
class Workload:
    """A run as far as memory goes.

    Attributes:
        config: resolved.
        spec: the model.
        beside: models beside the actor.
        threads: compute threads of a process; the embedded engine pads its rows to them.
        kept: bytes that each device keeps while it trains so that only changes move: generation shards, and a copy of
            what it sent. Of runs with deltas.
    """

    config: Config
    spec: ModelSpec
    threads: int = 1
    beside: BesideModels = field(default_factory=BesideModels)
    kept: Callable[[Config, ModelSpec], Sequence[tuple[int, int]]] | None = None

    @property
    def precision(self) -> Precision:
        """Of the trainer's passes."""
        model = self.config.model
        if (model.activation_dtype or model.dtype) == "float32":
            return FLOAT32
        return BFLOAT16 if self.spread else AUTOCAST

    @property
    def spread(self) -> bool:
        """Whether the trained model is cut over ranks."""
        return self.config.placement.trainer_ranks > 1

    @property
    def engine_bytes(self) -> int:
        """Bytes of one element in the rollout engine."""
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def sizes(self) -> ModelSizes:
        """The model in both layouts. Raises UsageError when heads or experts cannot be dealt out."""
        place = self.config.placement
        return ModelSizes(
            self.spec,
            train=ParallelLayout.fsdp(max(place.trainer_ranks // place.trainer_tp, 1), tp=place.trainer_tp),
            rollout=ParallelLayout.vllm(
                tp=place.replica_tp, replicas=max(place.replicas, place.hybrid_replicas, 1), layers=self.spec.layers
            ),
            pad=place.pad,
            engine_dtype="BF16" if self.engine_bytes == 2 else "F32",
            lora_rank=self.config.model.lora.rank,
            lora_targets=tuple(self.config.model.lora.target_modules),
        )

    @property
    def sequence(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self.config.task.max_prompt_tokens + self.config.rollout.max_new_tokens

    @property
    def update_rows(self) -> int:
        """Sequences of one update on one trainer rank."""
        trainer, place = self.config.trainer, self.config.placement
        prompts = min(trainer.mini_batch_prompts or trainer.prompts_per_step, trainer.prompts_per_step)
        ranks = max(place.trainer_ranks // place.trainer_tp, 1)
        return -(-prompts * self.config.rollout.samples_per_prompt // ranks)

    @property
    def micro_batch(self) -> MicroBatchShape:
        """The largest micro-batch."""
        return micro_batch_shape(
            budget=self.config.trainer.micro_batch_tokens,
            prompt=self.config.task.max_prompt_tokens,
            response=self.config.rollout.max_new_tokens,
            rows=self.update_rows,
        )

    @property
    def single_pass(self) -> bool:
        """Whether an update is one micro-batch, so that its gradients grow only while its activations go."""
        return self.micro_batch.rows >= self.update_rows

    @property
    def replica_rows(self) -> int:
        """Responses that one replica decodes at once."""
        config = self.config
        replicas = max(config.placement.replicas + config.placement.hybrid_replicas, 1)
        wanted = -(-config.trainer.prompts_per_step * config.rollout.samples_per_prompt // replicas)
        return min(config.rollout.max_slots, max(wanted, 1))

    @property
    def embedded(self) -> bool:
        """Whether the rollout engine is the one in the trainer's process."""
        return self.config.rollout.engine == "transformers"
