"""What a user probably meant by a key that does not exist."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache

from rlctl.config.keytable import key_table, sections
from rlctl.registry import suggest

# Names that other tools give to the same thing, so that a ported file is mended in one pass.
_SYNONYMS = {
    "adam_beta1": "trainer.optimizer.beta1",
    "adam_beta2": "trainer.optimizer.beta2",
    "adam_epsilon": "trainer.optimizer.eps",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "batch_size": "trainer.prompts_per_step",
    "bucket_size_mb": "sync.bucket_size",
    "checkpoint_engine": "sync.backend",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "cliprange": "algorithm.clip_high",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "run.validate_every",
    "gpus_per_node": "cluster.devices_per_node",
    "group_size": "rollout.samples_per_prompt",
    "learning_rate": "trainer.optimizer.lr",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "loss_agg_mode": "algorithm.aggregation",
    "loss_type": "algorithm.loss",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "lr_warmup_steps": "trainer.optimizer.warmup_steps",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "mini_batch_size": "trainer.mini_batch_prompts",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "n_gpus_per_node": "cluster.devices_per_node",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "nnodes": "cluster.nodes",
    "num_epochs": "task.epochs",
    "num_generations": "rollout.samples_per_prompt",
    "num_steps": "run.steps",
    "num_train_epochs": "task.epochs",
    "per_device_train_batch_size": "trainer.prompts_per_step",
    "ppo_mini_batch_size": "trainer.mini_batch_prompts",
    "r": "model.lora.rank",
    "rollout_batch_size": "trainer.prompts_per_step",
    "save_freq": "run.checkpoint_every",
    "save_steps": "run.checkpoint_every",
    "staleness_threshold": "trainer.max_staleness",
    "tensor_model_parallel_size": "placement.replica_tp",
    "tensor_parallel_size": "placement.replica_tp",
    "test_freq": "run.validate_every",
    "torch_dtype": "model.dtype",
    "total_epochs": "task.epochs",
    "total_training_steps": "run.steps",
    "train_batch_size": "trainer.prompts_per_step",
    "train_micro_batch_size": "trainer.micro_batch_tokens",
    "trigger_parameter_sync_step": "trainer.parameter_sync_step",
    "update_weights_bucket_megabytes": "sync.bucket_size",
    "val_before_train": "run.validate_before",
}


@lru_cache(maxsize=1)
def _by_leaf() -> dict[str, list[str]]:
    leaves: dict[str, list[str]] = {}
    for path in key_table():
        leaves.setdefault(path.rpartition(".")[2], []).append(path)
    return leaves


def nearest_key(path: str) -> str | None:
    """Return the dotted key nearest to an unknown one, or None.

    Tried in order: the same name with other hyphens, case or camel case; a slip in one part of the path; a name from
    another tool; the same last part in another section; a last part like it.
    """
    keys = key_table()
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path[:200]).replace("-", "_").lower()
    if plain in keys:
        return plain
    repaired = _repair(plain)
    if repaired is not None:
        return repaired
    parent, _, leaf = plain.rpartition(".")
    by_leaf = _by_leaf()
    if leaf in by_leaf and len(by_leaf[leaf]) == 1:
        return by_leaf[leaf][0]
    if leaf in _SYNONYMS:
        return _SYNONYMS[leaf]
    if leaf in by_leaf:
        return max(by_leaf[leaf], key=lambda p: difflib.SequenceMatcher(None, p, plain).ratio())
    under = [p for p in keys if parent and p.startswith(parent + ".")]
    near = suggest(leaf, [p.rpartition(".")[2] for p in under])
    if near is not None:
        return next(p for p in under if p.rpartition(".")[2] == near)
    close = difflib.get_close_matches(leaf, [*by_leaf, *_SYNONYMS], n=1, cutoff=0.75)
    if not close:
        return None
    return by_leaf[close[0]][0] if close[0] in by_leaf else _SYNONYMS[close[0]]


def _repair(path: str) -> str | None:
    """Follow ``path`` down the schema, taking the nearest name at every part; None when one has no near name."""
    names, found = [*key_table(), *sections()], ""
    for part in path.split("."):
        children = {n[len(found) :].split(".")[0] for n in names if n.startswith(found)} - {""}
        near = part if part in children else suggest(part, sorted(children))
        if near is None:
            return None
        found += near + "."
    return found[:-1] if found[:-1] in key_table() else None


def unknown_key_fix(path: str) -> str:
    """Return the sentence that follows "unknown key": the nearest key with its type, or what the section holds."""
    near = nearest_key(path)
    if near is not None:
        return f'did you mean "{near}" ({key_table()[near].type_name})?'
    parent = path.rpartition(".")[0]
    if parent in sections():
        names = [p[len(parent) + 1 :] for p in key_table() if p.startswith(parent + ".")]
        return f"{parent} has: {', '.join(names)}"
    return f"sections: {', '.join(s for s in sections() if '.' not in s)}"
