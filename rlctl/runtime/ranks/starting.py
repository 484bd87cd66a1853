"""The trainer's ranks of a configuration."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlctl.model.fsdp2.tensor_sizes import check_tensor_parallel
from rlctl.model.memory_settings import Memory
from rlctl.runtime.launch.launcher import Launcher, Place
from rlctl.runtime.launch.processes import ProcessLauncher
from rlctl.runtime.ranks.adapted import RankedLoraEngine
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.messages import RankSetup
from rlctl.runtime.ranks.supervisor import TrainerRanks
from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone


def start_ranks(
    config: Config,
    model_config: Any,
    source: str,
    *,
    total_updates: int,
    memory: Memory,
    logs: Path | None,
    stack: ExitStack,
    launcher: Launcher | None = None,
    noted: bool = False,
    kind: type[TrainerRanks] = TrainerRanks,
) -> RankedEngine:
    """Start the ranks and return the model that they are; closing ``stack`` ends them.

    Args:
        config: resolved.
        model_config: transformers configuration of the model.
        source: folder or hub name that the ranks load it from.
        total_updates: optimizer steps of the whole run, for the schedule.
        memory: how device memory is saved.
        logs: folder for the ranks' logs; None keeps them while the ranks are there.
        launcher: what starts their processes; None for children of this one.
        noted: have them remember digests of what weight syncs send.
        kind: of ranks.

    Raises:
        UsageError: the model cannot be cut so, or it does not load.
        RankError: a rank did not come up.
    """
    placement = config.placement
    check_tensor_parallel(model_config.to_dict(), placement.trainer_tp)
    if logs is None:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-ranks-")))
    if launcher is None:
        launcher = ProcessLauncher(config)
        stack.callback(launcher.close)
    near = launcher.one_machine()
    trainer = config.trainer
    setups = [
        RankSetup(
            rank=rank,
            world=placement.trainer_ranks,
            tp=placement.trainer_tp,
            store="",
            timeout=trainer.rank_timeout,
            device=config.cluster.device,
            threads=rank_threads(config.run.threads, placement.trainer_ranks),
            source=source,
            trust_remote_code=config.model.trust_remote_code,
            optimizer=trainer.optimizer,
            dtype=config.model.dtype,
            micro_batch_tokens=trainer.micro_batch_tokens,
            total_updates=total_updates,
            memory=memory,
            engine=config.model.engine or "local",
            interface="lo" if near else config.cluster.links.interface or "",
            noted=noted,
            lora=config.model.lora if config.model.lora.rank else None,
            seed=config.run.seed,
            adapter_alone=adapter_alone(config),
        )
        for rank in range(placement.trainer_ranks)
    ]
    starter = launcher.starter
    ranks = kind(
        setups,
        logs=logs,
        starter=lambda rank: starter(Place("trainer", rank)),
        meet_at=None if near else launcher.here(),
    )
    engine = RankedLoraEngine(ranks, source, model_config) if config.model.lora.rank else RankedEngine(ranks)
    stack.callback(engine.close)
    return engine


def rank_threads(configured: int, ranks: int) -> int:
    """Return the compute threads of one rank: the configured number, or its share of the usable cores, at most 2."""
    return configured or max(1, min(2, usable_cores() // ranks))


def usable_cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0))
