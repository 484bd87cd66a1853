"""What must hold in one mode or another. Each rule is one small pure function."""

from __future__ import annotations

from rlctl.errors import Finding
from rlctl.schema import Config
from rlctl.trainers.arithmetic import step_arithmetic
from rlctl.trainers.rules import Rule, shares_devices


def one_update_round_per_sync(config: Config) -> Finding | None:
    rounds = config.trainer.parameter_sync_step
    if rounds in (None, 1):
        return None
    return Finding(
        f"{config.trainer.mode} syncs after every train batch, and parameter_sync_step is {rounds}",
        "trainer.parameter_sync_step",
        "set it to 1, or take trainer.mode=separate_async",
    )


def train_batch_is_p_mini_batches(config: Config) -> Finding | None:
    rounds, step = config.trainer.parameter_sync_step or 1, step_arithmetic(config)
    if step.prompts == rounds * step.mini_batch_prompts:
        return None
    near = max(1, round(step.prompts / rounds))
    return Finding(
        f"the train batch of {step.prompts} prompts is not {rounds} (parameter_sync_step) x "
        f"{step.mini_batch_prompts} (mini_batch_prompts)",
        "trainer.mini_batch_prompts",
        f"set trainer.mini_batch_prompts={near}"
        + (f" and trainer.prompts_per_step={near * rounds}" if near * rounds != step.prompts else ""),
    )


def rollout_has_devices_of_its_own(config: Config) -> Finding | None:
    if config.placement.layout == "separate" and config.placement.replicas > 0:
        return None
    return Finding(
        f"{config.trainer.mode} generates while it trains and needs rollout devices of its own; the layout is "
        f"{config.placement.layout} with {config.placement.replicas} replicas",
        "placement.layout",
        "set placement.layout=separate and placement.replicas to 1 or more, or take a profile such as cpu-separate",
    )


def no_lending(config: Config) -> Finding | None:
    if config.placement.hybrid_replicas == 0:
        return None
    return Finding(
        f"{config.trainer.mode} does not lend the trainer's devices, and hybrid_replicas is "
        f"{config.placement.hybrid_replicas}",
        "placement.hybrid_replicas",
        "set it to 0, or take trainer.mode=separate_async",
    )


def lent_replicas_fit_on_trainer_devices(config: Config) -> Finding | None:
    placement = config.placement
    if placement.hybrid_replicas * placement.replica_tp <= placement.trainer_ranks:
        return None
    return Finding(
        f"{placement.hybrid_replicas} hybrid replicas x {placement.replica_tp} devices do not fit on the trainer's "
        f"{placement.trainer_ranks} devices",
        "placement.hybrid_replicas",
        f"set it to {placement.trainer_ranks // placement.replica_tp} or less",
    )


def reward_model_has_its_own_pool(config: Config) -> Finding | None:
    if config.reward_model.path is None or config.placement.reward_devices > 0:
        return None
    return Finding(
        f"{config.trainer.mode} scores while it trains, so the reward model needs devices of its own",
        "placement.reward_devices",
        "set it to 1 or more",
    )


def nothing_is_made_ahead(config: Config) -> Finding | None:
    if not config.trainer.warmup_batches:
        return None
    return Finding(
        f"{config.trainer.mode} makes nothing ahead, and warmup_batches is {config.trainer.warmup_batches:g}",
        "trainer.warmup_batches",
        "set it to 0",
    )


def exactly_one_batch_is_made_ahead(config: Config) -> Finding | None:
    if config.trainer.warmup_batches in (None, 1):
        return None
    return Finding(
        f"{config.trainer.mode} makes exactly one batch ahead, and warmup_batches is {config.trainer.warmup_batches:g}",
        "trainer.warmup_batches",
        "set it to 1",
    )


def responses_are_never_continued(config: Config) -> Finding | None:
    if not config.trainer.partial_rollout:
        return None
    return Finding(
        f"{config.trainer.mode} waits for every response, so partial_rollout has nothing to continue",
        "trainer.partial_rollout",
        "set it to false",
    )


def requests_end_before_a_sync(config: Config) -> Finding | None:
    if config.trainer.interruption in (None, "wait"):
        return None
    return Finding(
        f"{config.trainer.mode} syncs when no request runs, and interruption is {config.trainer.interruption}",
        "trainer.interruption",
        "set it to wait",
    )


def interruption_suits_the_memory(config: Config) -> Finding | None:
    if config.trainer.interruption != "keep" or not shares_devices(config):
        return None
    return Finding(
        f"the {config.placement.layout} layout releases the engine's memory to the trainer, so running requests "
        "cannot be kept",
        "trainer.interruption",
        "set it to abort (tokens made so far are continued) or wait",
    )


def kept_requests_are_continued(config: Config) -> Finding | None:
    if config.trainer.interruption != "keep" or config.trainer.partial_rollout:
        return None
    return Finding(
        "interruption keep continues responses under new weights, and partial_rollout is off",
        "trainer.partial_rollout",
        "set it to true, or trainer.interruption=wait",
    )


def aborted_tokens_are_not_lost(config: Config) -> Finding | None:
    if config.trainer.interruption != "abort" or config.trainer.partial_rollout:
        return None
    return Finding(
        "partial_rollout is off: every interrupted response starts again from its prompt", "trainer.partial_rollout"
    )


def staleness_is_none(config: Config) -> Finding | None:
    return _staleness(config, 0)


def staleness_is_one(config: Config) -> Finding | None:
    return _staleness(config, 1)


def _staleness(config: Config, exactly: int) -> Finding | None:
    if config.trainer.max_staleness in (None, exactly):
        return None
    return Finding(
        f"tokens of {config.trainer.mode} are exactly {exactly} versions old when trained, and max_staleness is "
        f"{config.trainer.max_staleness}",
        "trainer.max_staleness",
        f"set it to {exactly}",
    )


def warm_up_is_within_staleness(config: Config) -> Finding | None:
    ahead, bound = config.trainer.warmup_batches or 0, config.trainer.max_staleness or 0
    if ahead <= bound:
        return None
    return Finding(
        f"{ahead:g} batches ahead would be more than {bound} versions old: part of the warm-up is held back or dropped",
        "trainer.warmup_batches",
        f"raise trainer.max_staleness to {ahead:.0f}, or lower it",
    )


_ONE_ROUND = Rule("weights are synced after every train batch", one_update_round_per_sync)
_NO_LENDING = Rule("no replica joins and leaves", no_lending)
_OWN_DEVICES = Rule("rollout has devices of its own", rollout_has_devices_of_its_own)
_OWN_REWARD = Rule("a reward model has devices of its own", reward_model_has_its_own_pool)
_WHOLE = (
    Rule("every response is waited for", responses_are_never_continued),
    Rule("no request runs during a sync", requests_end_before_a_sync),
)
_CUT = (
    Rule("interruption suits the memory", interruption_suits_the_memory),
    Rule("kept requests are continued", kept_requests_are_continued),
    Rule("tokens of interrupted responses are not lost", aborted_tokens_are_not_lost, "note"),
    Rule("the warm-up is within the staleness bound", warm_up_is_within_staleness, "note"),
)

SYNC: tuple[Rule, ...] = (
    _ONE_ROUND,
    _NO_LENDING,
    *_WHOLE,
    Rule("nothing is made ahead", nothing_is_made_ahead),
    Rule("tokens are trained under the version that made them", staleness_is_none),
)
COLOCATE_ASYNC: tuple[Rule, ...] = (_ONE_ROUND, _NO_LENDING, *_CUT)
SEPARATE_ASYNC: tuple[Rule, ...] = (
    Rule("the train batch is parameter_sync_step x mini batch", train_batch_is_p_mini_batches),
    _OWN_DEVICES,
    Rule("replicas lent by the trainer fit on its devices", lent_replicas_fit_on_trainer_devices),
    _OWN_REWARD,
    *_CUT,
)
ONE_STEP_OFF: tuple[Rule, ...] = (
    _ONE_ROUND,
    _OWN_DEVICES,
    _NO_LENDING,
    _OWN_REWARD,
    *_WHOLE,
    Rule("exactly one batch is made ahead", exactly_one_batch_is_made_ahead),
    Rule("tokens are trained one version later", staleness_is_one),
)
