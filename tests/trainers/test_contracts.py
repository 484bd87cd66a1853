"""The modes' contracts: defaults, and each rule broken on purpose in a configuration that else is fine."""

import random

import pytest

from rlctl.algorithms.presets import ALGORITHM_PRESETS, CORRECTION_PRESETS, preset_values
from rlctl.config import load_config
from rlctl.config.keytable import flatten, get_value
from rlctl.ops.resolve import resolve
from rlctl.rollout.traits import EngineTraits
from rlctl.schema import Config
from rlctl.trainers.algorithm_rules import ALGORITHM
from rlctl.trainers.contracts import CONTRACTS, check, defaults
from rlctl.trainers.engine_rules import ENGINE
from rlctl.trainers.in_place_rules import IN_PLACE
from rlctl.trainers.lora_rules import LORA
from rlctl.trainers.reward_rules import REWARD
from rlctl.trainers.rules import GENERAL
from rlctl.trainers.task_rules import TASK
from tests.trainers.rule_cases import CASES, CORRECTION


def configured(mode: str, *overrides: str, profile: str | None = None) -> Config:
    """Return a valid configuration of ``mode``, then changed."""
    profile = profile or ("cpu-separate" if mode in ("separate_async", "one_step_off") else "cpu-quickstart")
    return load_config(
        profile,
        env={},
        overrides=[f"trainer.mode={mode}", *overrides],
        preset_values=preset_values,
        mode_defaults=lambda name, config: defaults(CONTRACTS[name], config),
    ).config


def broken(config: Config) -> dict[str, str]:
    results = check(config, CONTRACTS[config.trainer.mode])
    return {r.rule: r.status for r in results if r.status != "ok"}


def test_defaults_of_the_modes() -> None:
    keys = (
        "warmup_batches", "partial_rollout", "parameter_sync_step", "old_log_probs", "interruption", "max_staleness",
        "mini_batch_prompts", "admission",
    )  # fmt: skip
    rows = {mode: tuple(getattr(configured(mode).trainer, key) for key in keys) for mode in CONTRACTS}
    assert rows == {
        "sync": (0, False, 1, "recompute", "wait", 0, 16, "pacing"),
        "colocate_async": (1, True, 1, "recompute", "abort", 2, 16, "pacing"),
        "separate_async": (4, True, 4, "rollout", "keep", 4, 4, "pacing"),
        "one_step_off": (1, False, 1, "recompute", "wait", 1, 16, "pacing"),
    }
    assert configured("sync").trainer.offload.params is False  # the CPU's memory is where it would go
    on_gpu = configured("sync", "trainer.offload.params=false", profile="8xH100-colocate")
    assert (on_gpu.model.engine, on_gpu.trainer.offload.params, on_gpu.trainer.offload.optimizer) == (
        "fsdp2",
        False,
        True,
    )
    # Where the engine's memory is not released, requests are kept.
    assert configured("colocate_async", profile="cpu-separate").trainer.interruption == "keep"
    # A derived default follows the keys that a user set.
    set_by_user = configured("separate_async", "trainer.parameter_sync_step=2", "trainer.prompts_per_step=64")
    assert set_by_user.trainer.mini_batch_prompts == 32


@pytest.mark.parametrize("mode", CONTRACTS)
def test_every_mode_has_every_null_key_filled_and_holds_its_own_rules(mode: str) -> None:
    config = configured(mode)
    filled = [key for key, value in flatten(config).items() if key.startswith("trainer.") and value is None]
    assert filled == []
    assert broken(config) == {}


@pytest.mark.parametrize(("mode", "overrides", "expected"), CASES, ids=str)
def test_each_rule_broken(mode: str, overrides: list[str], expected: dict[str, str]) -> None:
    assert broken(configured(mode, *overrides)) == expected


def test_an_engine_without_log_probs_cannot_be_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = EngineTraits(("cpu",), tensor_parallel=False, logprobs=False)
    monkeypatch.setattr("rlctl.trainers.algorithm_rules.ENGINE_TRAITS", {"transformers": traits})
    assert broken(configured("sync")) == {}
    for override in (f"{CORRECTION}.rollout_is=token", "trainer.old_log_probs=rollout"):
        assert broken(configured("sync", override)) == {"correction_has_log_probs": "violated"}


@pytest.mark.parametrize("name", [*ALGORITHM_PRESETS, *CORRECTION_PRESETS])
def test_every_preset_holds_every_rule_and_says_where_its_values_come_from(name: str) -> None:
    section = "algorithm" if name in ALGORITHM_PRESETS else CORRECTION
    assert broken(configured("sync", f"{section}.preset={name}")) == {}
    resolved = resolve(env={}, overrides=[f"{section}.preset={name}"]).resolved
    (values,) = preset_values(resolved.config).values()
    for key, value in values.items():
        assert get_value(resolved.config, key) == value
        assert resolved.origin(key) == f"preset {name}"


def test_every_rule_is_broken_by_some_case_and_every_finding_helps() -> None:
    seen: set[str] = set()
    for mode, overrides, _ in CASES:
        for result in check(configured(mode, *overrides), CONTRACTS[mode]):
            if result.status != "ok":
                seen.add(result.rule)
                assert result.message
                assert result.where is None or result.where in flatten(Config()) or result.where == "placement"
                assert result.status == "note" or result.fix
    rules = {rule.name for rule in (*GENERAL, *TASK, *IN_PLACE, *ENGINE, *LORA, *REWARD, *ALGORITHM)} | {
        rule.name for c in CONTRACTS.values() for rule in c.rules
    }
    assert rules == seen


def test_fixes_that_name_a_value_are_right() -> None:
    for mode, overrides in [
        ("separate_async", ["trainer.mini_batch_prompts=8"]),
        ("separate_async", ["trainer.prompts_per_step=18", "trainer.mini_batch_prompts=7"]),
        ("sync", ["trainer.micro_batch_tokens=100"]),
    ]:
        config = configured(mode, *overrides)
        (fix, *_) = [
            r.fix for r in check(config, CONTRACTS[mode]) if r.status == "violated" and "set " in (r.fix or "")
        ]
        assert fix is not None
        values = [part for part in fix.replace(",", "").split() if "=" in part]
        keys = [value.partition("=")[0] for value in values]
        kept = [o for o in overrides if o.partition("=")[0] not in keys]
        assert broken(configured(mode, *kept, *values)) == {}


@pytest.mark.parametrize("seed", range(30))
def test_rules_never_fail_on_any_numbers(seed: int) -> None:
    rng = random.Random(seed)
    numbers = [1, 2, 3, 4, 7, 8, 12, 16, 64]
    overrides = [
        f"{key}={rng.choice(numbers)}"
        for key in (
            "cluster.nodes", "cluster.devices_per_node", "placement.trainer_ranks", "placement.trainer_tp",
            "placement.replicas", "placement.replica_tp", "placement.hybrid_replicas", "placement.reward_devices",
            "trainer.prompts_per_step", "trainer.mini_batch_prompts", "trainer.parameter_sync_step",
            "rollout.samples_per_prompt", "trainer.micro_batch_tokens",
        )
    ]  # fmt: skip
    overrides.append(f"placement.layout={rng.choice(['colocated', 'separate', 'hybrid'])}")
    for mode, contract in CONTRACTS.items():
        results = check(configured(mode, *overrides), contract)
        assert len(results) == sum(map(len, (GENERAL, TASK, IN_PLACE, ENGINE, LORA, REWARD, ALGORITHM, contract.rules)))


def test_models_beside_the_actor_have_their_phases() -> None:
    words = ["cluster.device=cuda", "algorithm.preset=ppo", "algorithm.kl.place=loss", "reward_model.path=rm"]
    phases = {p.name: p.holds for p in CONTRACTS["sync"].memory_phases(configured("sync", *words))}
    names = list(phases)
    assert names[names.index("sleep") + 1 :][:3] == ["score", "critic update", "forward backward"]
    for name in ("score", "critic update", "forward backward", "optimizer step"):
        assert {"reference_weights", "critic", "trainer_weights"} <= set(phases[name])
    assert [name for name, holds in phases.items() if "reward_weights" in holds] == ["score"]
    assert [name for name, holds in phases.items() if "critic_gradients" in holds] == ["critic update"]
    assert "critic" not in phases["rollout"]
    pool = ["placement.reward_devices=1", "cluster.devices_per_node=2"]
    found = CONTRACTS["sync"].memory_phases(configured("sync", *words, *pool))
    assert [(p.name, p.devices) for p in found if "reward_weights" in p.holds] == [("score", "reward")]
    # Where the device is the host, what is offloaded stays where it was.
    for phase in CONTRACTS["sync"].memory_phases(configured("sync", *words[1:])):
        assert {"reference_weights", "critic", "reward_weights"} <= set(phase.holds)
    adapter = configured("sync", *words, "model.lora.rank=4")
    assert all("reference_weights" not in phase.holds for phase in CONTRACTS["sync"].memory_phases(adapter))


@pytest.mark.parametrize("mode", CONTRACTS)
def test_memory_phases_follow_the_layout(mode: str) -> None:
    contract = CONTRACTS[mode]
    names = [phase.name for phase in contract.memory_phases(configured(mode))]
    assert names[0] == "load"
    assert names[-1] == "wake KV cache"
    colocated = CONTRACTS["sync"].memory_phases(configured("sync", "cluster.device=cuda"))
    order = [p.name for p in colocated if p.name.startswith(("sync", "wake"))]
    assert order == ["sync: wake weights", "sync: load", "sync: offload trainer", "wake KV cache"]
    for phase in CONTRACTS["sync"].memory_phases(configured("sync"))[1:]:
        # In host memory an offloaded trainer stays where it was.
        assert {"trainer_weights", "optimizer"} <= set(phase.holds)
    for phase in colocated:
        # The KV cache never lies beside gradients or the trainer's weights where devices are shared.
        assert not ("kv_cache" in phase.holds and "trainer_weights" in phase.holds)
    kept = configured("sync", "trainer.offload.optimizer=false", profile="1xH200-colocate")
    load, *later = CONTRACTS["sync"].memory_phases(kept)
    assert "optimizer" not in load.holds  # moments come with the first step
    assert all("optimizer" in phase.holds for phase in later)
    lent = contract.memory_phases(configured("separate_async", "placement.hybrid_replicas=1"))
    assert lent[-1].name == "reclaim"
