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
from rlctl.trainers.lora_rules import LORA
from rlctl.trainers.reward_rules import REWARD
from rlctl.trainers.rules import GENERAL
from rlctl.trainers.task_rules import TASK


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


CORRECTION = "algorithm.rollout_correction"
ONE_SYNC = {"one_update_round_per_sync": "violated"}
CASES: list[tuple[str, list[str], dict[str, str]]] = [
    # general rules
    ("sync", ["trainer.stall_timeout=5"], {"slow_rewards_are_no_stall": "violated"}),
    ("sync", ["placement.trainer_ranks=2"], {"devices_suffice": "violated", "replicas_use_all_shared_devices": "note"}),
    ("sync", ["cluster.devices_per_node=2"], {"devices_are_used": "note"}),
    (
        "sync",
        ["cluster.devices_per_node=2", "placement.trainer_ranks=2", "placement.replicas=2", "model.engine=local"],
        {"engine_spreads_over_ranks": "violated"},
    ),
    ("sync", ["model.engine=fsdp2", "model.lora.rank=4"], {}),
    ("sync", ["model.engine=megatron", "model.lora.rank=4"], {"adapter_is_whole_in_a_layer": "violated"}),
    (
        "sync",
        ["cluster.devices_per_node=4", "placement.trainer_ranks=4", "placement.replicas=4", "placement.trainer_tp=3"],
        {"trainer_tp_divides_ranks": "violated", "tensor_parallel_stays_in_a_node": "violated"},
    ),
    (
        "sync",
        ["cluster.devices_per_node=3", "placement.layout=separate", "sync.backend=gloo", "placement.replica_tp=2"],
        {"tensor_parallel_stays_in_a_node": "violated", "engine_fits": "violated"},
    ),
    ("sync", ["placement.replicas=0"], {"someone_generates": "violated", "replicas_use_all_shared_devices": "note"}),
    (
        "sync",
        ["cluster.devices_per_node=4", "placement.trainer_ranks=2", "placement.replicas=4"],
        {"replicas_fit_on_trainer_devices": "violated"},
    ),
    ("sync", ["trainer.mini_batch_prompts=5"], {"mini_batch_divides_train_batch": "violated"}),
    ("sync", ["trainer.mini_batch_prompts=32"], {"mini_batch_divides_train_batch": "violated"}),
    (
        "sync",
        ["cluster.devices_per_node=3", "placement.trainer_ranks=3", "placement.replicas=3"],
        {"mini_batch_divides_over_ranks": "violated"},
    ),
    ("sync", ["trainer.micro_batch_tokens=100"], {"micro_batch_holds_a_sequence": "violated"}),
    ("sync", ["sync.backend=gloo"], {"backend_fits_layout": "violated"}),
    ("separate_async", ["sync.backend=naive"], {"backend_fits_layout": "violated"}),
    ("separate_async", ["sync.backend=nccl"], {"backend_fits_device": "violated"}),
    ("separate_async", ["sync.backend=hccl"], {"backend_fits_device": "violated"}),
    ("separate_async", ["sync.backend=gloo"], {}),
    ("separate_async", ["sync.backend=somebody-elses"], {}),
    ("sync", ["placement.layout=hybrid"], {"backend_fits_layout": "violated"}),
    ("sync", ["placement.layout=hybrid", "sync.backend=reshard"], {}),
    ("sync", ["placement.layout=hybrid", "sync.backend=reshard", "sync.delta=true"], {}),
    ("sync", ["sync.delta=true"], {"deltas_have_a_base": "violated"}),
    (
        "sync",
        ["placement.layout=hybrid", "sync.backend=reshard", "sync.delta=true", "model.lora.rank=2"],
        {"deltas_have_a_base": "violated"},
    ),
    (
        "separate_async",
        ["cluster.nodes=2", "cluster.devices_per_node=1", "cluster.links.interface=eth0"],
        {"backend_reaches_every_node": "violated"},
    ),
    (
        "separate_async",
        ["cluster.nodes=2", "cluster.devices_per_node=1", "sync.backend=gloo"],
        {"interface_is_named": "violated"},
    ),
    ("sync", ["rollout.engine=sglang"], {"engine_fits": "violated"}),
    ("sync", ["rollout.engine=vllm", "run.deterministic=true"], {"decodes_when_told": "violated"}),
    ("separate_async", ["run.deterministic=true"], {}),
    ("sync", ["rollout.samples_per_prompt=1"], {"groups_can_differ": "note"}),
    ("sync", ["rollout.temperature=0"], {"groups_can_differ": "note"}),
    ("sync", ["rollout.samples_per_prompt=1", "algorithm.advantage=reinforce_pp"], {}),
    # algorithm
    ("sync", ["algorithm.advantage=gae"], {"values_have_a_critic": "violated"}),
    ("sync", ["algorithm.advantage=gae", "algorithm.critic.model=actor"], {}),
    ("sync", ["algorithm.preset=ppo"], {}),
    ("sync", ["algorithm.critic.model=actor"], {"critic_has_a_use": "violated"}),
    ("sync", ["algorithm.kl.reference=somewhere"], {"reference_has_a_use": "violated"}),
    ("sync", ["algorithm.kl.place=loss", "algorithm.kl.estimator=k1"], {"kl_in_the_loss_has_a_gradient": "violated"}),
    ("sync", ["algorithm.kl.place=reward", "algorithm.kl.estimator=k1"], {}),
    ("sync", [f"{CORRECTION}.rollout_rs=token_k2"], {"correction_is_well_formed": "violated"}),
    (
        "sync",
        [f"{CORRECTION}.rollout_is=token", "rollout.temperature=0"],
        {"correction_has_log_probs": "violated", "groups_can_differ": "note"},
    ),
    (
        "sync",
        ["trainer.old_log_probs=rollout", "rollout.top_p=0.9"],
        {"correction_sees_all_of_the_distribution": "note"},
    ),
    (
        "sync",
        [f"{CORRECTION}.preset=bypass_pg_is", f"{CORRECTION}.rollout_is_batch_normalize=true"],
        {"batch_is_there_to_normalise": "note"},
    ),
    (
        "sync",
        ["trainer.old_log_probs=rollout", f"{CORRECTION}.rollout_is=token"],
        {"weights_meet_a_loss_that_takes_them": "violated"},
    ),
    ("separate_async", [f"{CORRECTION}.preset=decoupled_token_is"], {}),
    (
        "sync",
        [f"{CORRECTION}.preset=bypass_pg_is", "algorithm.loss=ppo_clip"],
        {"weights_meet_a_loss_that_takes_them": "violated", "presets_stand_as_they_are": "note"},
    ),
    (
        "sync",
        [f"{CORRECTION}.preset=bypass_pg_is", "algorithm.preset=dapo"],
        {"presets_stand_as_they_are": "note"},
    ),
    (
        "sync",
        ["algorithm.loss=cispo", "algorithm.dual_clip=3"],
        {"dual_clip_meets_a_loss_that_takes_it": "violated"},
    ),
    (
        "sync",
        ["algorithm.filter_groups=true", "rollout.samples_per_prompt=1"],
        {"filtered_groups_can_differ": "violated", "groups_can_differ": "note"},
    ),
    ("sync", ["task.mixture=[{name: cycle}]", "task.epochs=2"], {"mixture_stands_alone": "violated"}),
    ("sync", ["task.mixture=[{name: cycle}, {name: cycle}]"], {"members_are_told_apart": "violated"}),
    ("sync", ["model.lora.alpha=32"], {"adapter_has_a_rank": "violated"}),
    ("sync", ["model.lora.rank=8", "model.lora.target_modules=[]"], {"adapter_has_targets": "violated"}),
    (
        "sync",
        ["model.lora.rank=8", "model.lora.target_modules=[all-linear,q_proj]"],
        {"adapter_has_targets": "violated"},
    ),
    ("sync", ["reward_model.weight=2"], {"reward_model_is_named": "violated"}),
    (
        "sync",
        ["task.verifier=none"],
        {"tasks_without_rewards_are_scored": "violated", "held_out_answers_are_judged": "note"},
    ),
    ("sync", ["task.verifier=none", "reward_model.path=rm", "run.validate_prompts=0"], {}),
    (
        "sync",
        ["reward_model.path=rm", "reward_model.weight=0", "reward_model.task_weight=0"],
        {"something_is_rewarded": "violated", "scores_count": "note"},
    ),
    ("sync", ["reward_model.path=rm", "reward_model.weight=0"], {"scores_count": "note"}),
    ("sync", ["placement.reward_devices=1"], {"devices_suffice": "violated", "reward_pool_has_a_model": "note"}),
    ("sync", ["reward_model.path=rm", "placement.reward_devices=1"], {"devices_suffice": "violated"}),
    ("sync", ["reward_model.path=rm", "placement.reward_devices=1", "cluster.devices_per_node=2"], {}),
    (
        "sync",
        ["reward_model.path=rm", "algorithm.filter_groups=true"],
        {"groups_are_filtered_before_scores": "note"},
    ),
    # sync
    ("sync", ["trainer.parameter_sync_step=4"], ONE_SYNC),
    ("sync", ["placement.hybrid_replicas=1"], {"no_lending": "violated"}),
    ("sync", ["trainer.warmup_batches=1"], {"nothing_is_made_ahead": "violated"}),
    ("sync", ["trainer.partial_rollout=true"], {"responses_are_never_continued": "violated"}),
    ("sync", ["trainer.interruption=abort"], {"requests_end_before_a_sync": "violated"}),
    ("sync", ["trainer.max_staleness=3"], {"staleness_is_none": "violated"}),
    ("sync", ["trainer.old_log_probs=rollout"], {}),
    # colocate_async
    ("colocate_async", ["trainer.parameter_sync_step=2"], ONE_SYNC),
    ("colocate_async", ["trainer.interruption=keep"], {"interruption_suits_the_memory": "violated"}),
    ("colocate_async", ["trainer.interruption=wait"], {}),
    ("colocate_async", ["trainer.partial_rollout=false"], {"aborted_tokens_are_not_lost": "note"}),
    ("colocate_async", ["trainer.max_staleness=0"], {"warm_up_is_within_staleness": "note"}),
    ("colocate_async", ["placement.hybrid_replicas=1"], {"no_lending": "violated"}),
    # separate_async
    ("separate_async", ["trainer.mini_batch_prompts=8"], {"train_batch_is_p_mini_batches": "violated"}),
    (
        "separate_async",
        ["trainer.prompts_per_step=18"],
        {"mini_batch_divides_train_batch": "violated", "train_batch_is_p_mini_batches": "violated"},
    ),
    (
        "separate_async",
        ["placement.layout=colocated", "cluster.devices_per_node=1"],
        {"rollout_has_devices_of_its_own": "violated"},
    ),
    (
        "separate_async",
        ["placement.replicas=0", "cluster.devices_per_node=1"],
        {"someone_generates": "violated", "rollout_has_devices_of_its_own": "violated"},
    ),
    ("separate_async", ["placement.hybrid_replicas=1"], {}),
    ("separate_async", ["placement.hybrid_replicas=2"], {"lent_replicas_fit_on_trainer_devices": "violated"}),
    ("separate_async", ["reward_model.path=rm"], {"reward_model_has_its_own_pool": "violated"}),
    (
        "separate_async",
        ["reward_model.path=rm", "placement.reward_devices=1", "cluster.devices_per_node=3"],
        {},
    ),
    ("separate_async", ["trainer.partial_rollout=false"], {"kept_requests_are_continued": "violated"}),
    ("separate_async", ["trainer.warmup_batches=6"], {"warm_up_is_within_staleness": "note"}),
    (
        "separate_async",
        ["trainer.parameter_sync_step=1", "trainer.warmup_batches=0", "trainer.max_staleness=0"],
        {},
    ),
    # one_step_off
    ("one_step_off", ["trainer.warmup_batches=2"], {"exactly_one_batch_is_made_ahead": "violated"}),
    ("one_step_off", ["trainer.max_staleness=2"], {"staleness_is_one": "violated"}),
    ("one_step_off", ["trainer.partial_rollout=true"], {"responses_are_never_continued": "violated"}),
    ("one_step_off", ["trainer.parameter_sync_step=2", "trainer.mini_batch_prompts=16"], ONE_SYNC),
]


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
    rules = {rule.name for rule in (*GENERAL, *TASK, *ENGINE, *LORA, *REWARD, *ALGORITHM)} | {
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
        assert len(results) == sum(map(len, (GENERAL, TASK, ENGINE, LORA, REWARD, ALGORITHM, contract.rules)))


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
