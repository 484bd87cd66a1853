"""Runs as one rank: loads our rank folders into Megatron-core's GPTModel, strictly, and keeps its logits.

python -m tests.keys.megatron_ranks RANK WORLD PORT WORK, with WORK/<model>/tp<N> beside WORK/<model>/hf/config.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DISTRIBUTED = ("qwen2", "qwen2_moe")  # also kept as Megatron's torch_dist: it starts processes, and takes its time


def stub_cuda() -> None:
    """Stand in for the few calls to CUDA that a forward pass makes without needing it."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    @contextlib.contextmanager
    def fork(*_: Any, **__: Any) -> Iterator[None]:
        yield

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda *_: None
    random.CudaRNGStatesTracker.fork = fork
    moe_utils.te_general_gemm = None  # only bound where Transformer Engine is installed
    for name in ("TELinear", "TEColumnParallelLinear"):  # asked with isinstance, and None without it
        setattr(multi_latent_attention, name, type(name, (), {}))


def experts_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's settings of a mixture of experts; empty for a dense model."""
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not experts:
        return {}
    kind = config["model_type"]
    dense = {*(config.get("mlp_only_layers") or ()), *range(config.get("first_k_dense_replace", 0))}
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size") or config.get("n_shared_experts", 0) * width
    options = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": kind != "mixtral" and not config.get("norm_topk_prob"),
        "moe_layer_freq": [int(i not in dense) for i in range(config["num_hidden_layers"])],
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": kind == "qwen2_moe",
    }
    if kind == "deepseek_v3":
        options |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            "moe_router_num_groups": config["n_group"],
            "moe_router_group_topk": config["topk_group"],
        }
    return options


def latent_attention_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's settings of multi-head latent attention; empty for a model without it."""
    if "kv_lora_rank" not in config:
        return {"kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    return {
        "multi_latent_attention": True,
        "kv_channels": config["v_head_dim"],
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": int(config["rope_parameters"]["rope_theta"]),
        "apply_rope_fusion": False,
    }


def build(config: dict[str, Any], tp: int, *, predicting: bool) -> torch.nn.Module:
    """Return Megatron-core's model of a Hugging Face configuration, with its multi-token prediction if asked for."""
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    class LatentDotProduct(DotProductAttention):
        """Megatron's own attention does not take two arguments that its latent attention passes."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **rest: Any) -> None:
            super().__init__(*args, **rest)

    kind = config["model_type"]
    latent, experts = latent_attention_of(config), experts_of(config)
    model_config = (MLATransformerConfig if len(latent) > 1 else TransformerConfig)(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        ffn_hidden_size=config["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=bool(config.get("mlp_bias")),
        add_qkv_bias=kind in ("qwen2", "qwen2_moe"),
        qk_layernorm=kind in ("qwen3", "qwen3_moe", "deepseek_v3"),
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=config["num_nextn_predict_layers"] if predicting else None,
        **latent,
        **experts,
    )
    if experts:
        layers = get_gpt_decoder_block_spec(model_config, use_transformer_engine=False)
        for layer in layers.layer_specs if len(latent) > 1 else ():
            layer.submodules.self_attention.submodules.core_attention = LatentDotProduct
    else:
        layers = get_gpt_layer_local_spec(qk_layernorm=model_config.qk_layernorm)
    block = get_gpt_mtp_block_spec(model_config, layers, use_transformer_engine=False) if predicting else None
    return GPTModel(
        model_config,
        layers,
        mtp_block_spec=block,
        vocab_size=-(-config["vocab_size"] // (128 * tp)) * 128 * tp,
        max_sequence_length=64,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(config["rope_parameters"]["rope_theta"]),
        parallel_output=False,
    ).eval()


@torch.no_grad()
def run(folder: Path, tp: int) -> None:
    """Load one model's ranks at one tensor-parallel size and keep the logits (and, at size 2, a torch_dist copy)."""
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(tp, 1)
    config = json.loads((folder / "hf" / "config.json").read_text())
    model = build(config, tp, predicting=folder.name.endswith("-predicting"))
    rank = parallel_state.get_tensor_model_parallel_rank()
    file = folder / f"tp{tp}" / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    model.load_state_dict(torch.load(file, weights_only=True)["model"], strict=True)
    (folder / f"loaded{tp}").touch()
    if model.mtp_process:  # its forward pass is one of training, with labels
        parallel_state.destroy_model_parallel()
        return
    length = 9
    tokens = torch.arange(2 * length).reshape(2, length) * 7 % 97
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    logits = model(tokens, torch.arange(length).expand(2, length), hidden)
    if dist.get_rank() == 0:
        torch.save(logits[..., : config["vocab_size"]], folder / f"logits{tp}.pt")
    if tp == 2 and folder.name in DISTRIBUTED:
        if dist.get_rank() == 0:
            (folder / "dist").mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder / "dist"))
    parallel_state.destroy_model_parallel()


def main(rank: int, world: int, port: int, work: Path) -> None:
    """Run every model under ``work`` at each tensor-parallel size up to ``world``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    stub_cuda()
    for folder in sorted(work.iterdir()):
        for tp in range(1, world + 1):
            run(folder, tp)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
