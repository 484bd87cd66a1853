"""Starting all processes of a run at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.model.adapting import adapter_config
from rlctl.model.loading import LoadedModel
from rlctl.runtime.cluster.agreement import DigestAgreement, LogProbAgreement
from rlctl.runtime.cluster.bases import Bases
from rlctl.runtime.cluster.fleet import START_SECONDS, Fleet, Tell
from rlctl.runtime.cluster.making import engine_options, max_length
from rlctl.runtime.cluster.probed_replica import Agreement
from rlctl.runtime.launch.launcher import Launcher
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.members import RankMembers
from rlctl.runtime.ranks.starting import start_ranks
from rlctl.runtime.trained_model import memory_of
from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone
from rlctl.sync.deadline import Deadline
from rlctl.sync.report import SyncEvent


@dataclass
class Started:
    """The processes of a run.

    Attributes:
        model: the trainer's ranks.
        replicas: those with devices of their own, or of the colocated layout.
        hybrids: those that the trainer's devices lend; they are asleep.
    """

    model: RankedEngine
    replicas: Fleet
    hybrids: Fleet


def start_processes(
    config: Config,
    loaded: LoadedModel,
    launcher: Launcher,
    *,
    total_updates: int,
    logs: Path | None,
    stack: ExitStack,
    before_kv: Callable[[], None],
    tell: Tell,
    on_event: Callable[[SyncEvent], None],
) -> Started:
    """Start trainer ranks, replicas and checkpoint-engine workers; closing ``stack`` ends them.

    Args:
        config: resolved.
        loaded: the model, and where the others load it from.
        launcher: starts all of them.
        total_updates: optimizer steps of the whole run, for the schedule.
        logs: folder of what they print.
        before_kv: called in a sync before a replica's KV cache comes back.
        tell: told of deaths and restarts of replicas.
        on_event: told what happens in syncs.

    Raises:
        RlctlError: one did not come up.
    """
    deadline, placement = Deadline(START_SECONDS), config.placement
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    by_digest = config.model.dtype != "float32" or bool(config.trainer.offload.params)
    models: list[RankedEngine] = []  # it comes after those that ask it
    agreement: Agreement = DigestAgreement(lambda: models[0].sent())  # noqa: PLW0108 - it is not there yet
    if not by_digest:
        agreement = LogProbAgreement(
            lambda rows: models[0].log_probs(rows, temperature=1.0),
            vocabulary=vocabulary,
            max_length=max_length(config),
            seed=config.run.seed,
        )
    alone = adapter_alone(config)
    common: dict[str, Any] = {
        "adapter": adapter_config(loaded.model, config.model.lora, base=loaded.source) if alone else None,
        "source": loaded.source,
        "vocab_size": vocabulary,
        "launcher": launcher,
        "logs": logs,
        "agreement": agreement,
        "before_kv": before_kv,
        "tell": tell,
    }
    replicas = Fleet(config, "replica", [str(number) for number in range(placement.replicas)], **common)
    stack.callback(replicas.close)
    hybrids = Fleet(config, "hybrid", [f"hybrid-{number}" for number in range(placement.hybrid_replicas)], **common)
    stack.callback(hybrids.close)
    beginning = [*replicas.begin(deadline), *hybrids.begin(deadline)]
    model = start_ranks(
        config,
        loaded.model.config,
        loaded.source,
        total_updates=total_updates,
        memory=memory_of(config),
        logs=logs,
        stack=stack,
        launcher=launcher,
        noted=by_digest,
    )
    models.append(model)
    for future in beginning:
        future.result()
    members = RankMembers(model.ranks)
    members.open(config.sync.backend, engine_options(config), deadline)
    for fleet in (replicas, hybrids):
        fleet.manage(members, on_event, bases=Bases(model.send_base) if alone else None)
    hybrids.each("sleep", lambda replica: replica.sleep(2, deadline), deadline)
    return Started(model, replicas, hybrids)
