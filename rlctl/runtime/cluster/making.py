"""What a configuration means for replicas and weight syncs between processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.process import Child, Start, run_token
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.runtime.ranks.starting import usable_cores
from rlctl.schema import Config
from rlctl.sync.engine import EngineOptions
from rlctl.sync.policy import SyncPolicy


def max_length(config: Config) -> int:
    """Return the most tokens of a prompt and its response together."""
    return config.task.max_prompt_tokens + config.rollout.max_new_tokens


def replica_setup(
    config: Config,
    source: str,
    name: str,
    adapter: AdapterConfig | None = None,
    *,
    logs: Path | None = None,
    vocab_size: int = 0,
) -> ReplicaSetup:
    """Return how a replica is made.

    Args:
        source: folder or hub name of the model.
        adapter: of those that are sent alone.
        logs: folder of what its processes print.
        vocab_size: number of token ids of the model; 0: not known.
    """
    kind, tp = config.cluster.device, config.placement.replica_tp
    return ReplicaSetup(
        engine=config.rollout.engine,
        source=source,
        dtype=config.model.dtype,
        max_slots=config.rollout.max_slots,
        max_length=max_length(config),
        replica=name,
        token=run_token(),
        device="cpu" if kind == "cpu" else f"{kind}:0",  # its place shows it no others
        trust_remote_code=config.model.trust_remote_code,
        tensor_parallel=tp,
        threads=replica_threads(config),
        lockstep=config.run.deterministic,
        adapter=None if adapter is None else adapter.to_dict(),
        vocab_size=vocab_size,
        options=_options(config.rollout.engine, name, logs),
    )


def _options(engine: str, replica: str, logs: Path | None) -> dict[str, Any]:
    """Return what an engine is told besides: an SGLang replica a log for its server, or, as ``sglang:URL,URL,...``
    says, the one of the servers that run already that is its; their key is in ``RLCTL_SGLANG_KEY``.

    Raises UsageError when there are fewer servers than replicas.
    """
    name, _, rest = engine.partition(":")
    if name != "sglang":
        return {}
    if not rest:
        return {} if logs is None else {"log": str((logs / f"server_{replica}.log").resolve())}
    urls, number = rest.split(","), int(replica.rpartition("-")[2])
    if number >= len(urls):
        raise UsageError(
            f"{len(urls)} servers for more replicas",
            where="rollout.engine",
            fix="name as many as placement.replicas says: rollout.engine=sglang:URL,URL",
        )
    return {"url": urls[number], "key": os.environ.get("RLCTL_SGLANG_KEY", "")}


def replica_threads(config: Config) -> int:
    """Return the compute threads of one replica: the configured number, or its share of the usable cores, at most 2."""
    placement = config.placement
    at_once = max(placement.replicas, 1) * placement.replica_tp
    if placement.layout == "separate":
        at_once += placement.trainer_ranks
    return config.run.threads or max(1, min(2, usable_cores() // at_once))


def engine_options(config: Config) -> EngineOptions:
    """Return what every checkpoint engine of the run is told."""
    return EngineOptions(
        bucket_size=config.sync.bucket_size,
        timeout=config.sync.timeout,
        verify=config.sync.verify,
        interface=config.cluster.links.interface,
        token=run_token(),
        device=config.cluster.device,
    )


def sync_policy(config: Config) -> SyncPolicy:
    """Return how syncs are done."""
    return SyncPolicy(
        timeout=config.sync.timeout, commit=config.sync.commit, interruption=config.trainer.interruption or "wait"
    )


def logged(start: Start, path: Path | None) -> Start:
    """Return ``start`` with what its processes print going to ``path``."""

    def start_logged(
        target: str,
        *,
        name: str,
        timeout: float = 60.0,
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        return start(target, name=name, timeout=timeout, output=output or path, env=env)

    return start_logged
