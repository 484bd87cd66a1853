"""Building the reward model of a run: in this process, or on devices of its own."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from rlctl.errors import UnavailableError
from rlctl.hardware.placement import Slot, place
from rlctl.model.loading import LoadedModel
from rlctl.model.reward.base import RewardModel
from rlctl.model.reward.loading import load_classifier, load_config, load_tokenizer
from rlctl.model.reward.local import LocalRewardModel
from rlctl.model.reward.pool import RewardPool
from rlctl.model.reward.reading import Reader
from rlctl.model.reward.scorer import ResponseScorer
from rlctl.model.reward.serving import Settings
from rlctl.runtime.models_beside import device_of
from rlctl.schema import Config
from rlctl.tasks.base import Task


def build_scorer(
    config: Config,
    source: str,
    policy: LoadedModel,
    task: Task,
    *,
    stop_ids: tuple[int, ...],
    threads: int,
    output: Path | None,
) -> ResponseScorer:
    """Load the reward model in ``source`` and what it reads.

    Args:
        config: resolved.
        source: what ``from_pretrained`` is given.
        policy: the model that is trained.
        task: whose prompts are answered.
        stop_ids: tokens that end a response.
        threads: of each process.
        output: file for what processes of its own print.

    Raises:
        UsageError: it does not load, or cannot read the policy's responses.
        UnavailableError: its pool is on another node.
    """
    trust = config.model.trust_remote_code
    described = load_config(source, trust_remote_code=trust)
    reader = Reader(
        config.reward_model.input,
        own=load_tokenizer(source, trust_remote_code=trust),
        policy=policy.tokenizer,
        stop_ids=stop_ids,
        embeds=described.vocab_size,
        longest=getattr(described, "max_position_embeddings", None),
        task=task,
        system=config.task.system,
    )
    return ResponseScorer(_model(config, source, threads, output), reader)


def _model(config: Config, source: str, threads: int, output: Path | None) -> RewardModel:
    settings, budget = config.reward_model, config.trainer.micro_batch_tokens
    device, trust = device_of(config), config.model.trust_remote_code
    own = [slot for slot in place(config.cluster, config.placement) if slot.role == "reward"]
    if not own:
        model = load_classifier(source, dtype=settings.dtype, output=settings.output, trust_remote_code=trust)
        return LocalRewardModel(model, output=settings.output, micro_batch_tokens=budget, device=device)
    _require_one_node(own)
    each = Settings(source, settings.dtype, settings.output, trust, device, threads, settings.timeout)
    return RewardPool(
        [each if device == "cpu" else _on(each, slot.device) for slot in own],
        micro_batch_tokens=budget,
        timeout=settings.timeout,
        output=output,
    )


def _on(settings: Settings, device: int) -> Settings:
    return replace(settings, device=f"{settings.device}:{device}")


def _require_one_node(slots: list[Slot]) -> None:
    far = [slot for slot in slots if slot.node]
    if far:
        raise UnavailableError(
            f"the reward model's pool is on node {far[0].node}; this version of rlctl trains on one node",
            where="placement.reward_devices",
            fix="set it to 0, so that it shares the trainer's devices, or look at the layout with --dry-run",
        )
