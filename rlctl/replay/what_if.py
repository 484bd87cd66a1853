"""What a step would have come to under other settings: trained on its recorded responses, from the weights before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from rlctl.config import Layer, load_config
from rlctl.config.keytable import flatten
from rlctl.errors import Finding as Fault
from rlctl.errors import FindingsError, RlctlError, UsageError
from rlctl.replay.findings import Difference, Finding
from rlctl.replay.rebuild import Rebuilt
from rlctl.replay.step_record import StepRecord
from rlctl.replay.telling import tell
from rlctl.replay.walk import UnreachableError, Walk
from rlctl.schema import Config
from rlctl.trainers.contracts import CONTRACTS, check

ANSWERED = (
    "algorithm.",
    "trainer.optimizer.",
    "trainer.mini_batch_prompts",
    "trainer.micro_batch_tokens",
    "trainer.old_log_probs",
    "reward_model.weight",
    "reward_model.task_weight",
    "reward_model.normalize",
    "reward_model.clip",
    "model.activation_dtype",
    "model.gradient_checkpointing",
    "run.threads",
)
"""Keys, or their beginnings, that change what a step makes of its responses and nothing before it."""
UNANSWERED = ("algorithm.preset", "algorithm.filter_groups", "algorithm.filter_max_batches")
"""Keys among those whose effect a step's record does not hold."""


def config_under(config: Config, settings: Sequence[str]) -> Config:
    """Return the configuration with ``KEY=VALUE`` settings.

    Raises:
        UsageError: a key that a step's record cannot answer for.
        FindingsError: a value that does not fit, or settings that do not go together.
    """
    for setting in settings:
        if not setting.partition("=")[0].strip() or "=" not in setting:
            raise UsageError(f"{setting!r} sets no key", where="--what-if", fix="write KEY=VALUE")
    saved = Layer("config.json", flatten(config))
    found = load_config(None, env={}, layers=[saved], overrides=list(settings)).config
    for key in (setting.partition("=")[0].strip() for setting in settings):
        preset = key.startswith(UNANSWERED) or key.endswith(".preset")
        if key.startswith(ANSWERED) and not preset:
            continue
        why = "it names other keys" if preset and "preset" in key else "the recorded responses were made without it"
        raise UsageError(
            f"{key} cannot be asked of a record: {why}",
            where="--what-if",
            fix=f"keys that can: {', '.join(name + '*' if name.endswith('.') else name for name in ANSWERED)}",
        )
    before = _violated(config)
    faults = [fault for fault in _violated(found) if fault not in before]
    if faults:
        raise FindingsError("what-if", faults)
    return found


def _violated(config: Config) -> list[Fault]:
    contract = CONTRACTS.get(config.trainer.mode)
    results = check(config, contract) if contract is not None else []
    return [Fault(r.message, r.where, r.fix) for r in results if r.status == "violated"]


def train_under(walk: Walk, record: StepRecord, config: Config, settings: Sequence[str]) -> Finding:
    """Return what a step comes to under another configuration; it is compared with the record."""
    step, named = record.step, ", ".join(settings)
    try:
        walk.go_to(step - 1)
    except UnreachableError as error:
        return Finding(step=step, level="R2", status="unavailable", reason=str(error))
    except RlctlError as error:  # a checkpoint that is not what was written, or a record on the way from it
        reason = f"the weights before the step cannot be had: {error.where}: {error.message}"
        return Finding(step=step, level="R2", status="unavailable", reason=reason)
    if walk.parted is not None:
        reason = f"step {walk.parted}, on the way from the checkpoint, does not come out as it was recorded"
        return Finding(step=step, level="R2", status="unavailable", reason=reason)
    with ExitStack() as stack:
        other = Rebuilt(config, record.total_steps, stack)
        try:
            other.load(step - 1, walk.rebuilt.states())
        except RlctlError as error:
            reason = f"the weights before the step do not fit {named}: {error.message}"
            return Finding(step=step, level="R2", status="unavailable", reason=reason)
        told = tell(step, record.rounds, config, other.stages.table)
        digest = other.model.params_digest()
    same = digest == record.params_digest and told.difference is None
    difference = told.difference
    if not same and difference is None:
        difference = Difference("parameters", "digest")
    return Finding(
        step=step,
        level="R2",
        status="exact" if same else "differs",
        reason=f"trained under {named}" + (": it makes no difference" if same else ""),
        first_difference=difference,
        params_digest=digest,
        metrics=told.metrics,
    )
