"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.schema.algorithm import AlgorithmConfig
from rlctl.schema.keys import section
from rlctl.schema.layout import ClusterConfig, PlacementConfig
from rlctl.schema.reward_model import RewardModelConfig
from rlctl.schema.running import RolloutConfig, RunConfig, SyncConfig
from rlctl.schema.training import TrainerConfig
from rlctl.schema.work import ModelConfig, TaskConfig


@dataclass
class Config:
    """All keys, by section. A profile, a file, environment variables and arguments fill it, in that order."""

    cluster: ClusterConfig = section(ClusterConfig, "The machines.")
    placement: PlacementConfig = section(PlacementConfig, "Which rank runs where.")
    model: ModelConfig = section(ModelConfig, "The model that learns.")
    task: TaskConfig = section(TaskConfig, "Prompts and their rewards.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "A model that scores responses beside the task.")
    trainer: TrainerConfig = section(TrainerConfig, "The mode and its settings.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages and loss.")
    rollout: RolloutConfig = section(RolloutConfig, "How responses are made.")
    sync: SyncConfig = section(SyncConfig, "How fresh weights reach the rollout engines.")
    run: RunConfig = section(RunConfig, "The run itself.")
