"""A case for each rule of the modes: what breaks it."""

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
