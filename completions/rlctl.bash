# Completion of rlctl for bash. Written by `make completions`; starts no Python.
# Use: source this file, or copy it to ~/.local/share/bash-completion/completions/rlctl

_rlctl_sections='algorithm cluster model placement reward_model rollout run sync task trainer'
_rlctl_keys='cluster.nodes cluster.devices_per_node cluster.device cluster.device_name cluster.device_memory cluster.host_memory cluster.launcher cluster.ray_address cluster.links.intra_node_gbps cluster.links.inter_node_gbps cluster.links.host_device_gbps cluster.links.nics_per_node cluster.links.interface placement.layout placement.trainer_ranks placement.trainer_tp placement.replicas placement.replica_tp placement.pad placement.hybrid_replicas placement.reward_devices model.path model.dtype model.engine model.activation_dtype model.gradient_checkpointing model.trust_remote_code model.lora.rank model.lora.alpha model.lora.target_modules model.lora.use_rslora model.lora.use_dora model.lora.sync model.lora.adapter task.name task.mixture task.verifier task.step task.tolerance task.prompt_field task.answer_field task.chat task.system task.max_turns task.epochs task.max_prompt_tokens task.overlong_prompts task.held_out task.reward_timeout reward_model.path reward_model.weight reward_model.task_weight reward_model.normalize reward_model.clip reward_model.input reward_model.output reward_model.dtype reward_model.timeout trainer.mode trainer.prompts_per_step trainer.mini_batch_prompts trainer.micro_batch_tokens trainer.parameter_sync_step trainer.warmup_batches trainer.max_staleness trainer.admission trainer.partial_rollout trainer.interruption trainer.old_log_probs trainer.rank_timeout trainer.stall_timeout trainer.optimizer.lr trainer.optimizer.beta1 trainer.optimizer.beta2 trainer.optimizer.eps trainer.optimizer.weight_decay trainer.optimizer.max_grad_norm trainer.optimizer.schedule trainer.optimizer.warmup_steps trainer.optimizer.min_lr_ratio trainer.offload.params trainer.offload.optimizer algorithm.preset algorithm.advantage algorithm.normalize_std algorithm.leave_one_out algorithm.gamma algorithm.lam algorithm.whiten_advantages algorithm.loss algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.aggregation algorithm.entropy_coef algorithm.filter_groups algorithm.filter_max_batches algorithm.overlong_responses algorithm.kl.place algorithm.kl.estimator algorithm.kl.coef algorithm.kl.target algorithm.kl.horizon algorithm.kl.reference algorithm.critic.model algorithm.critic.lr algorithm.critic.value_clip algorithm.critic.warmup_steps algorithm.rollout_correction.preset algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_is_batch_normalize algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold rollout.engine rollout.samples_per_prompt rollout.max_new_tokens rollout.temperature rollout.top_p rollout.top_k rollout.max_slots sync.backend sync.bucket_size sync.timeout sync.commit sync.verify sync.delta run.steps run.seed run.threads run.deterministic run.record run.record_window run.record_keep run.record_pins run.checkpoint_every run.keep_checkpoints run.validate_every run.validate_prompts run.validate_before run.validate_only run.trackers run.tracker_project run.tracker_timeout'

# The words that a key may be set to.
_rlctl_key_words() {
  _rlctl_words=''
  case $1 in
    cluster.device) _rlctl_words='cpu cuda npu' ;;
    cluster.launcher) _rlctl_words='processes ray' ;;
    placement.layout) _rlctl_words='colocated separate hybrid' ;;
    placement.pad) _rlctl_words='true false' ;;
    model.dtype) _rlctl_words='float32 bfloat16' ;;
    model.engine) _rlctl_words='local fsdp2 megatron' ;;
    model.activation_dtype) _rlctl_words='float32 bfloat16' ;;
    model.gradient_checkpointing) _rlctl_words='true false' ;;
    model.trust_remote_code) _rlctl_words='true false' ;;
    model.lora.use_rslora) _rlctl_words='true false' ;;
    model.lora.use_dora) _rlctl_words='true false' ;;
    model.lora.sync) _rlctl_words='auto merged adapter' ;;
    task.chat) _rlctl_words='auto template plain' ;;
    task.overlong_prompts) _rlctl_words='refuse truncate drop' ;;
    reward_model.normalize) _rlctl_words='none sigmoid batch' ;;
    reward_model.input) _rlctl_words='auto tokens chat text' ;;
    reward_model.dtype) _rlctl_words='float32 bfloat16' ;;
    trainer.mode) _rlctl_words='sync colocate_async separate_async one_step_off' ;;
    trainer.admission) _rlctl_words='pacing drop wait' ;;
    trainer.partial_rollout) _rlctl_words='true false' ;;
    trainer.interruption) _rlctl_words='abort keep wait' ;;
    trainer.old_log_probs) _rlctl_words='recompute rollout' ;;
    trainer.optimizer.schedule) _rlctl_words='constant linear cosine' ;;
    trainer.offload.params) _rlctl_words='true false' ;;
    trainer.offload.optimizer) _rlctl_words='true false' ;;
    algorithm.preset) _rlctl_words='dr_grpo dapo gspo cispo rloo ppo' ;;
    algorithm.advantage) _rlctl_words='grpo rloo reinforce_pp reinforce_pp_baseline gae' ;;
    algorithm.normalize_std) _rlctl_words='true false' ;;
    algorithm.leave_one_out) _rlctl_words='true false' ;;
    algorithm.whiten_advantages) _rlctl_words='true false' ;;
    algorithm.loss) _rlctl_words='ppo_clip gspo cispo reinforce' ;;
    algorithm.aggregation) _rlctl_words='token-mean seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm' ;;
    algorithm.filter_groups) _rlctl_words='true false' ;;
    algorithm.overlong_responses) _rlctl_words='truncate mask drop' ;;
    algorithm.kl.place) _rlctl_words='none loss reward' ;;
    algorithm.kl.estimator) _rlctl_words='k1 k2 k3' ;;
    algorithm.rollout_correction.preset) _rlctl_words='decoupled_token_is decoupled_seq_is decoupled_token_icepop decoupled_seq_is_rs decoupled_geo_rs decoupled_geo_rs_seq_tis decoupled_geo_rs_token_tis decoupled_k3_rs decoupled_k3_rs_seq_tis decoupled_k3_rs_token_tis bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs bypass_pg_is bypass_pg_token_icepop bypass_pg_geo_rs bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis' ;;
    algorithm.rollout_correction.rollout_is) _rlctl_words='token sequence' ;;
    algorithm.rollout_correction.rollout_is_batch_normalize) _rlctl_words='true false' ;;
    rollout.engine) _rlctl_words='transformers vllm sglang recorded' ;;
    sync.backend) _rlctl_words='naive ipc reshard gloo nccl hccl nixl mooncake kimi file' ;;
    sync.commit) _rlctl_words='inplace staged' ;;
    sync.verify) _rlctl_words='full sampled off' ;;
    sync.delta) _rlctl_words='true false' ;;
    run.deterministic) _rlctl_words='true false' ;;
    run.record) _rlctl_words='off events batches full' ;;
    run.validate_before) _rlctl_words='true false' ;;
    run.validate_only) _rlctl_words='true false' ;;
    run.trackers) _rlctl_words='tensorboard wandb trackio' ;;
  esac
}

# What follows an option that takes a value; fails for any other word.
_rlctl_option_value() {
  case $1:$2 in
    :--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    train:--profile) _rlctl_words='auto cpu-quickstart cpu-hybrid cpu-separate cpu-vllm 1xH200-colocate 8xA100-hybrid 8xAscend910B-colocate 8xH100-colocate 16xH100-separate 64xH100-separate' _rlctl_paths='files' ;;
    train:--config) _rlctl_words='' _rlctl_paths='files' ;;
    train:--mode) _rlctl_words='sync colocate_async separate_async one_step_off' _rlctl_paths='' ;;
    train:--model) _rlctl_words='' _rlctl_paths='folders' ;;
    train:--task) _rlctl_words='' _rlctl_paths='files' ;;
    train:--steps) _rlctl_words='' _rlctl_paths='' ;;
    train:--seed) _rlctl_words='' _rlctl_paths='' ;;
    train:--run-dir) _rlctl_words='' _rlctl_paths='folders' ;;
    train:--resume) _rlctl_words='auto' _rlctl_paths='folders' ;;
    train:--ray-address) _rlctl_words='' _rlctl_paths='' ;;
    train:--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    sync-bench:--backend) _rlctl_words='naive ipc reshard gloo nccl hccl nixl mooncake kimi file' _rlctl_paths='' ;;
    sync-bench:--model) _rlctl_words='' _rlctl_paths='folders' ;;
    sync-bench:--size) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--tensors) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--trainers) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--rollouts) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--bucket) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:-b | sync-bench:--begin) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:-e | sync-bench:--end) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:-f | sync-bench:--factor) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--iters) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--warmup) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--option) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--change) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--verify) _rlctl_words='full sampled off' _rlctl_paths='' ;;
    sync-bench:--fail-below) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--compare) _rlctl_words='' _rlctl_paths='files' ;;
    sync-bench:--plot) _rlctl_words='' _rlctl_paths='files' ;;
    sync-bench:--listen) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--connect) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--token-file) _rlctl_words='' _rlctl_paths='files' ;;
    sync-bench:--wait) _rlctl_words='' _rlctl_paths='' ;;
    sync-bench:--profile) _rlctl_words='cpu-quickstart cpu-hybrid cpu-separate cpu-vllm 1xH200-colocate 8xA100-hybrid 8xAscend910B-colocate 8xH100-colocate 16xH100-separate 64xH100-separate' _rlctl_paths='files' ;;
    sync-bench:--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    topology:--from) _rlctl_words='' _rlctl_paths='' ;;
    topology:--profile) _rlctl_words='auto cpu-quickstart cpu-hybrid cpu-separate cpu-vllm 1xH200-colocate 8xA100-hybrid 8xAscend910B-colocate 8xH100-colocate 16xH100-separate 64xH100-separate' _rlctl_paths='files' ;;
    topology:--model) _rlctl_words='' _rlctl_paths='folders' ;;
    topology:--backend) _rlctl_words='naive ipc reshard gloo nccl hccl nixl mooncake kimi file' _rlctl_paths='' ;;
    topology:--child-devices) _rlctl_words='' _rlctl_paths='' ;;
    topology:--plot) _rlctl_words='' _rlctl_paths='files' ;;
    topology:--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    memory-profile:--profile) _rlctl_words='auto cpu-quickstart cpu-hybrid cpu-separate cpu-vllm 1xH200-colocate 8xA100-hybrid 8xAscend910B-colocate 8xH100-colocate 16xH100-separate 64xH100-separate' _rlctl_paths='files' ;;
    memory-profile:--config) _rlctl_words='' _rlctl_paths='files' ;;
    memory-profile:--mode) _rlctl_words='sync colocate_async separate_async one_step_off' _rlctl_paths='' ;;
    memory-profile:--model) _rlctl_words='' _rlctl_paths='folders' ;;
    memory-profile:--timeout) _rlctl_words='' _rlctl_paths='' ;;
    memory-profile:--plot) _rlctl_words='' _rlctl_paths='files' ;;
    memory-profile:--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    replay:--step) _rlctl_words='' _rlctl_paths='' ;;
    replay:--level) _rlctl_words='' _rlctl_paths='' ;;
    replay:--what-if) _rlctl_words='' _rlctl_paths='' ;;
    replay:--html) _rlctl_words='' _rlctl_paths='files' ;;
    replay:--samples) _rlctl_words='' _rlctl_paths='' ;;
    replay:--diff) _rlctl_words='' _rlctl_paths='files' ;;
    replay:--export) _rlctl_words='' _rlctl_paths='files' ;;
    replay:--keep) _rlctl_words='' _rlctl_paths='' ;;
    replay:--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    convert-keys:--to) _rlctl_words='hf hf-fused megatron vllm peft vllm-lora' _rlctl_paths='' ;;
    convert-keys:--from) _rlctl_words='' _rlctl_paths='' ;;
    convert-keys:--base) _rlctl_words='' _rlctl_paths='files' ;;
    convert-keys:--adapter) _rlctl_words='' _rlctl_paths='files' ;;
    convert-keys:--dtype) _rlctl_words='' _rlctl_paths='' ;;
    convert-keys:--tp) _rlctl_words='' _rlctl_paths='' ;;
    convert-keys:--pp) _rlctl_words='' _rlctl_paths='' ;;
    convert-keys:--ep) _rlctl_words='' _rlctl_paths='' ;;
    convert-keys:--megatron-modules) _rlctl_words='te local' _rlctl_paths='' ;;
    convert-keys:--max-shard-size) _rlctl_words='' _rlctl_paths='' ;;
    convert-keys:--map) _rlctl_words='' _rlctl_paths='files' ;;
    convert-keys:--inspect) _rlctl_words='' _rlctl_paths='files' ;;
    convert-keys:--color) _rlctl_words='auto always never' _rlctl_paths='' ;;
    *) return 1 ;;
  esac
}

# The options and other words of a command.
_rlctl_command() {
  case $1 in
    '') _rlctl_value '--version --help --json --debug --verbose --quiet --color train sync-bench topology memory-profile replay convert-keys' '' '' "$2" ;;
    train)
      if [[ $2 == -* ]]; then
        _rlctl_value '--profile --config --mode --model --task --steps --seed --run-dir --resume --overwrite --dry-run --show-config --list-profiles --print-sbatch --ray-address --submit --json --debug --verbose --quiet --color --help' '' '' "$2"
      else
        _rlctl_key "$2"
      fi
      ;;
    sync-bench)
      if [[ $2 == -* ]]; then
        _rlctl_value '--backend --model --size --tensors --trainers --rollouts --bucket --begin --end --factor --iters --warmup --option --delta --change --verify --raw --fail-below --compare --csv --plot --listen --connect --token-file --wait --simulate --profile --json --debug --verbose --quiet --color --help' '' '' "$2"
      else
        _rlctl_value '' '' '' "$2"
      fi
      ;;
    topology)
      if [[ $2 == -* ]]; then
        _rlctl_value '--from --profile --model --backend --check --child-devices --env --merge --plot --require-gpus --json --debug --verbose --quiet --color --help' '' '' "$2"
      else
        _rlctl_key "$2"
      fi
      ;;
    memory-profile)
      if [[ $2 == -* ]]; then
        _rlctl_value '--profile --config --mode --model --measure --timeout --plot --json --debug --verbose --quiet --color --help' '' '' "$2"
      else
        _rlctl_key "$2"
      fi
      ;;
    replay)
      if [[ $2 == -* ]]; then
        _rlctl_value '--step --anomalies --level --what-if --list --show --html --samples --diff --export --prune --keep --dry-run --json --debug --verbose --quiet --color --help' '' '' "$2"
      else
        _rlctl_value '' 'files' '' "$2"
      fi
      ;;
    convert-keys)
      if [[ $2 == -* ]]; then
        _rlctl_value '--to --from --base --adapter --merge --untie --base-is-moved --dtype --tp --pp --ep --megatron-modules --max-shard-size --map --dry-run --verify --strict --no-strict --overwrite --inspect --json --debug --verbose --quiet --color --help' '' '' "$2"
      else
        _rlctl_value '' 'files' '' "$2"
      fi
      ;;
  esac
}

# Completes a value: words, and files or folders besides.
_rlctl_value() {
  local words=$1 paths=$2 prefix=$3 cur=$4 IFS=$'\n'
  COMPREPLY=($(compgen -P "$prefix" -W "${words// /$'\n'}" -- "$cur"))
  case $paths in
    files) COMPREPLY+=($(compgen -P "$prefix" -f -- "$cur")) ;;
    folders) COMPREPLY+=($(compgen -P "$prefix" -d -- "$cur")) ;;
    *) return ;;
  esac
  compopt -o filenames 2>/dev/null
}

# Completes section.key=value.
_rlctl_key() {
  local cur=$1 prefix=''
  if [[ $cur == *=* ]]; then
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=${cur%%=*}=
    _rlctl_key_words "${cur%%=*}"
    _rlctl_value "$_rlctl_words" '' "$prefix" "${cur#*=}"
    return
  fi
  if [[ $cur == *.* ]]; then
    COMPREPLY=($(compgen -S = -W "$_rlctl_keys" -- "$cur"))
  else
    COMPREPLY=($(compgen -S . -W "$_rlctl_sections" -- "$cur"))
  fi
  compopt -o nospace 2>/dev/null
}

_rlctl() {
  local cur prev command='' word i words=() prefix='' assigned='' _rlctl_words='' _rlctl_paths=''
  COMPREPLY=()
  # Bash cuts words at "=" and ":"; put them together again.
  for ((i = 1; i <= COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if ((${#words[@]})) && [[ $word == [=:]* || ${COMP_WORDS[i-1]} == [=:] ]]; then
      words[${#words[@]}-1]+=$word
    else
      words+=("$word")
    fi
  done
  cur=${words[${#words[@]}-1]} prev=''
  ((${#words[@]} > 1)) && prev=${words[${#words[@]}-2]}
  for ((i = 0; i < ${#words[@]} - 1; i++)); do
    case ${words[i]} in
      --color) ((i++)) ;;
      -*) ;;
      *) command=${words[i]} && break ;;
    esac
  done

  if [[ $cur == --*=* ]]; then
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=${cur%%=*}=
    prev=${cur%%=*} cur=${cur#*=} assigned=1
  fi
  if _rlctl_option_value "$command" "$prev"; then
    _rlctl_value "$_rlctl_words" "$_rlctl_paths" "$prefix" "$cur"
  elif [[ -z $assigned ]]; then
    _rlctl_command "$command" "$cur"
  fi
}

complete -F _rlctl rlctl
