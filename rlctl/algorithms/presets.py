"""Named settings: keys of the configuration that belong together. What a user sets beside a preset wins, visibly.

No torch here: the configuration is resolved with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlctl.algorithms.correction.settings import SECTION
from rlctl.schema import Config

Keys = Mapping[str, Any]

ALGORITHM_PRESETS: Mapping[str, Keys] = MappingProxyType(
    {
        # arXiv 2503.20783: no deviation, and a constant in place of the response's length.
        "dr_grpo": {
            "algorithm.advantage": "grpo",
            "algorithm.normalize_std": False,
            "algorithm.loss": "ppo_clip",
            "algorithm.aggregation": "seq-mean-token-sum-norm",
        },
        # arXiv 2503.14476: clip higher, token mean, groups without signal replaced, cut responses not trained.
        "dapo": {
            "algorithm.advantage": "grpo",
            "algorithm.loss": "ppo_clip",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.aggregation": "token-mean",
            "algorithm.filter_groups": True,
            "algorithm.overlong_responses": "mask",
        },
        # arXiv 2507.18071, section 5.1.
        "gspo": {
            "algorithm.advantage": "grpo",
            "algorithm.loss": "gspo",
            "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4,
            "algorithm.aggregation": "seq-mean-token-mean",
        },
        # arXiv 2506.13585: the weight is bounded from above alone.
        "cispo": {
            "algorithm.advantage": "grpo",
            "algorithm.loss": "cispo",
            "algorithm.clip_low": 1.0,
            "algorithm.clip_high": 4.0,
            "algorithm.aggregation": "token-mean",
        },
        "rloo": {
            "algorithm.advantage": "rloo",
            "algorithm.loss": "reinforce",
            "algorithm.aggregation": "seq-mean-token-sum",
        },
        "ppo": {
            "algorithm.advantage": "gae",
            "algorithm.loss": "ppo_clip",
            "algorithm.clip_high": 0.2,
            "algorithm.critic.model": "actor",
        },
    }
)


def _keys(bypass: str | None = None, level: str | None = None, threshold: str = "2.0", rs: str = "") -> Keys:
    keys: dict[str, Any] = {"trainer.old_log_probs": "rollout" if bypass else "recompute"}
    if bypass:
        keys["algorithm.loss"] = bypass
    if level:
        keys |= {f"{SECTION}.rollout_is": level, f"{SECTION}.rollout_is_threshold": threshold}
    if rs:
        option, _, bound = rs.partition(":")
        keys |= {f"{SECTION}.rollout_rs": option, f"{SECTION}.rollout_rs_threshold": bound}
    return MappingProxyType(keys)


_GEO, _K3 = "seq_mean_k1:0.999_1.001", "seq_mean_k3:0.01"
_ICEPOP = "0.5_5.0"

CORRECTION_PRESETS: Mapping[str, Keys] = MappingProxyType(
    {
        "decoupled_token_is": _keys(level="token"),
        "decoupled_seq_is": _keys(level="sequence"),
        "decoupled_token_icepop": _keys(level="token", threshold=_ICEPOP),
        "decoupled_seq_is_rs": _keys(level="sequence", rs="seq_sum_k1:0.5_2.0"),
        "decoupled_geo_rs": _keys(rs=_GEO),
        "decoupled_geo_rs_seq_tis": _keys(level="sequence", rs=_GEO),
        "decoupled_geo_rs_token_tis": _keys(level="token", rs=_GEO),
        "decoupled_k3_rs": _keys(rs=_K3),
        "decoupled_k3_rs_seq_tis": _keys(level="sequence", rs=_K3),
        "decoupled_k3_rs_token_tis": _keys(level="token", rs=_K3),
        "bypass_ppo_clip": _keys("ppo_clip"),
        "bypass_ppo_clip_geo_rs": _keys("ppo_clip", rs=_GEO),
        "bypass_ppo_clip_k3_rs": _keys("ppo_clip", rs=_K3),
        "bypass_pg_is": _keys("reinforce", "sequence"),
        "bypass_pg_token_icepop": _keys("reinforce", "token", _ICEPOP),
        "bypass_pg_geo_rs": _keys("reinforce", rs=_GEO),
        "bypass_pg_geo_rs_seq_tis": _keys("reinforce", "sequence", rs=_GEO),
        "bypass_pg_geo_rs_token_tis": _keys("reinforce", "token", rs=_GEO),
    }
)


def preset_values(config: Config) -> dict[str, Keys]:
    """Return the presets that ``config`` names, as "preset NAME" -> its keys; the correction's comes first, since it
    is about less. A name that is not known is somebody else's to refuse."""
    chosen = {}
    for name, table in (
        (config.algorithm.rollout_correction.preset, CORRECTION_PRESETS),
        (config.algorithm.preset, ALGORITHM_PRESETS),
    ):
        if name is not None and name in table:
            chosen[f"preset {name}"] = table[name]
    return chosen
