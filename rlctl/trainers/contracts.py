"""What each mode assumes and requires, as data: defaults, rules, memory phases. Nothing is ever overridden silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from rlctl.config.keytable import get_value, set_value
from rlctl.schema import Config
from rlctl.trainers import mode_rules
from rlctl.trainers.algorithm_rules import ALGORITHM
from rlctl.trainers.engine_rules import ENGINE, model_engine
from rlctl.trainers.in_place_rules import IN_PLACE
from rlctl.trainers.lora_rules import LORA
from rlctl.trainers.memory_phases import Phase, phases_of_layout
from rlctl.trainers.reward_rules import REWARD
from rlctl.trainers.rules import GENERAL, Rule, shares_devices
from rlctl.trainers.task_rules import TASK

#: A default that depends on other keys.
Derived = Callable[[Config], Any]


@dataclass(frozen=True)
class ModeContract:
    """A trainer mode's side of the bargain.

    Attributes:
        name: of the mode.
        summary: one sentence on how it works.
        defaults: dotted key -> value, or a function of the configuration, for keys that nobody set. Later ones may
            depend on earlier ones.
        rules: what must hold besides the general rules.
        memory_phases: what lies in device memory when, in the order of a step.
    """

    name: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    memory_phases: Callable[[Config], tuple[Phase, ...]] = phases_of_layout


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one rule: its name, "ok", "violated" or "note", what was found, where and what to do."""

    rule: str
    status: Literal["ok", "violated", "note"]
    message: str
    where: str | None = None
    fix: str | None = None


def _interruption(config: Config) -> str:
    return "abort" if shares_devices(config) else "keep"


def _mini_batch(config: Config) -> int:
    return max(1, config.trainer.prompts_per_step // (config.trainer.parameter_sync_step or 1))


def _offloads(config: Config) -> bool:
    return config.cluster.device != "cpu" and shares_devices(config)


_EVERY_MODE: Mapping[str, Any] = {
    "model.engine": model_engine,
    "trainer.offload.params": _offloads,
    "trainer.offload.optimizer": _offloads,
}

_WHOLE_BATCHES = {
    "trainer.parameter_sync_step": 1,
    "trainer.admission": "pacing",
    "trainer.partial_rollout": False,
    "trainer.interruption": "wait",
    "trainer.mini_batch_prompts": _mini_batch,
    "trainer.old_log_probs": "recompute",
}

CONTRACTS: Mapping[str, ModeContract] = MappingProxyType(
    {
        "sync": ModeContract(
            "sync",
            "strictly on-policy: generate, train, sync, each waiting for the one before",
            {**_WHOLE_BATCHES, "trainer.warmup_batches": 0.0, "trainer.max_staleness": 0},
            mode_rules.SYNC,
        ),
        "colocate_async": ModeContract(
            "colocate_async",
            "one batch ahead on the same devices; long responses are cut at the end of a batch and continued",
            {
                "trainer.parameter_sync_step": 1,
                "trainer.warmup_batches": 1.0,
                "trainer.max_staleness": 2,
                "trainer.admission": "pacing",
                "trainer.partial_rollout": True,
                "trainer.interruption": _interruption,
                "trainer.mini_batch_prompts": _mini_batch,
                "trainer.old_log_probs": "recompute",
            },
            mode_rules.COLOCATE_ASYNC,
        ),
        "separate_async": ModeContract(
            "separate_async",
            "generation never stops but for a sync; a train batch is several updates on what is ready",
            {
                "trainer.parameter_sync_step": 4,
                "trainer.warmup_batches": 4.0,
                "trainer.max_staleness": 4,
                "trainer.admission": "pacing",
                "trainer.partial_rollout": True,
                "trainer.interruption": _interruption,
                "trainer.mini_batch_prompts": _mini_batch,
                "trainer.old_log_probs": "rollout",
            },
            mode_rules.SEPARATE_ASYNC,
        ),
        "one_step_off": ModeContract(
            "one_step_off",
            "the next whole batch is made while this one is trained",
            {**_WHOLE_BATCHES, "trainer.warmup_batches": 1.0, "trainer.max_staleness": 1},
            mode_rules.ONE_STEP_OFF,
        ),
    }
)


def defaults(contract: ModeContract, config: Config) -> dict[str, Any]:
    """Return the mode's values for ``config``, in which what a user set stands already.

    A derived default sees the user's value of a key where there is one, else the mode's.
    """
    trial, values = deepcopy(config), {}
    for key, given in (*_EVERY_MODE.items(), *contract.defaults.items()):
        values[key] = given(trial) if callable(given) else given
        if get_value(trial, key) is None:
            set_value(trial, key, values[key])
    return values


def check(config: Config, contract: ModeContract) -> list[CheckResult]:
    """Return the outcome of every rule: general ones, the task's, the algorithm's, the mode's. ``config`` has the
    mode's defaults."""
    return [
        _outcome(rule, config)
        for rule in (*GENERAL, *IN_PLACE, *TASK, *ENGINE, *LORA, *REWARD, *ALGORITHM, *contract.rules)
    ]


def _outcome(rule: Rule, config: Config) -> CheckResult:
    finding = rule.test(config)
    if finding is None:
        return CheckResult(rule.name, "ok", rule.title)
    return CheckResult(rule.name, rule.severity, finding.message, finding.where, finding.fix)
