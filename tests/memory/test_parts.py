"""Parts by arithmetic: cases with known values."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from rlctl.config import load_config
from rlctl.keys.presets import preset
from rlctl.memory.activations import FLOAT32, MicroBatchShape
from rlctl.memory.beside import BesideModels
from rlctl.memory.estimate import estimate
from rlctl.memory.imbalance import heavier_ranks
from rlctl.memory.kv_cache import embedded_cache_bytes, kv_bytes_per_token
from rlctl.memory.model_sizes import ModelSizes
from rlctl.memory.staging import wake_peaks
from rlctl.memory.workload import Workload
from rlctl.rollout.embedded.fused import FusedDecoder
from rlctl.rollout.embedded.fused_weights import fused_shape
from rlctl.sync.layout import ParallelLayout
from rlctl.trainers.memory_phases import phases_of_layout

GIB = 1 << 30


def test_waking_in_stages_fits_where_waking_at_once_does_not() -> None:
    peaks = wake_peaks(
        trainer=20 * GIB, new_weights=15 * GIB, engine_weights=15 * GIB, kv_cache=40 * GIB, stays=20 * GIB
    )
    assert peaks.at_once == 90 * GIB
    assert peaks.staged == 75 * GIB
    assert dict(peaks.stages)["load"] == 50 * GIB
    assert [name for name, _ in peaks.stages] == ["wake weights", "load", "drop copy", "wake KV cache"]


def test_a_rank_that_carries_more_is_named() -> None:
    (heavy,) = heavier_ranks([71.5, 52.7, 52.9, 52.6])
    assert heavy.rank == 0
    assert heavy.above == pytest.approx(18.7)
    assert heavier_ranks([52.0, 52.5, 53.0, 52.9]) == []
    assert heavier_ranks([]) == []


def test_kv_heads_are_kept_several_times_beyond_their_number() -> None:
    spec = preset("qwen2.5-0.5b")  # 24 layers, 2 kv heads of 64
    assert kv_bytes_per_token(spec, 2) == 24 * 2 * 2 * 64 * 2
    assert kv_bytes_per_token(spec, 2, tp=2) == kv_bytes_per_token(spec, 2) // 2
    assert kv_bytes_per_token(spec, 2, tp=8) == kv_bytes_per_token(spec, 2, tp=2)


def test_latent_attention_keeps_one_vector() -> None:
    assert kv_bytes_per_token(preset("deepseek-v3"), 2, tp=8) == 61 * (512 + 64) * 2


@pytest.mark.parametrize("length", [30, 100, 448, 1000])
def test_the_embedded_cache_is_what_the_decoder_sets_aside(length: int) -> None:
    import torch

    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=50,
    )  # fmt: skip
    shape = fused_shape(config)
    assert shape is not None
    decoder = FusedDecoder(config, shape, dtype=torch.float32, device="cpu", max_rows=10, max_length=length)
    decoder.allocate_cache()
    held = decoder._keys.nbytes + decoder._values.nbytes
    from rlctl.keys.model_spec import ModelSpec

    spec = ModelSpec.from_config(config.to_dict())
    threads = torch.get_num_threads()
    assert embedded_cache_bytes(spec, 4, slots=10, length=length, threads=threads) == held


def test_shards_add_up_and_moments_are_twice_the_masters() -> None:
    spec = preset("qwen3-8b")
    sizes = ModelSizes(spec, ParallelLayout.fsdp(8), ParallelLayout.vllm(tp=2, replicas=3, layers=36), "BF16")
    whole = 8190735360 * 4  # parameters of Qwen3-8B, float32
    assert sum(rank.weights for rank in sizes.trained) == whole
    assert all(rank.optimizer == 2 * rank.weights == 2 * rank.gradients for rank in sizes.trained)
    assert len(sizes.engine) == 6
    assert whole / 2 < sum(sizes.engine[:2]) < whole / 2 * 1.001  # norms are on both ranks


def test_models_beside_the_actor_are_whole_on_the_first_rank() -> None:
    spec = preset("qwen2.5-0.5b")
    whole = 494032768  # parameters; the head is the embedding
    beside = BesideModels(reference=spec, critic=spec, reward=spec, reward_bytes=2)
    parts = beside.parts(MicroBatchShape(100, 50, 2), FLOAT32)
    assert parts["reference_weights"] == whole * 4
    assert (parts["critic"], parts["critic_gradients"], parts["reward_weights"]) == (whole * 12, whole * 4, whole * 2)
    config = load_config("8xH100-colocate", env={}, overrides=["reward_model.path=rm"]).config
    work = Workload(config, spec, beside=BesideModels(reward=spec))
    phases = [phase for phase in phases_of_layout(config) if phase.name in ("score", "sleep")]
    found = estimate(work, phases, limit=0)
    assert [rank.bytes_in(phases[1]) - rank.bytes_in(phases[0]) for rank in found.ranks[:3]] == [
        rank.parts["trainer_weights"] + rank.parts["optimizer"] + (whole * 4 if rank.rank == 0 else 0)
        for rank in found.ranks[:3]
    ]
    assert BesideModels().parts(MicroBatchShape(100, 50, 2), FLOAT32) == {}


def test_an_adapter_alone_has_gradients() -> None:
    spec = preset("qwen2.5-0.5b")
    sizes = ModelSizes(spec, ParallelLayout.fsdp(1), ParallelLayout.vllm(layers=24), "F32", lora_rank=8)
    (rank,) = sizes.trained
    linears = [(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)]
    adapter = 24 * 8 * sum(out + into for out, into in linears)
    assert rank.gradients == 4 * adapter
    assert rank.optimizer == 8 * adapter
    assert rank.weights == 4 * (494032768 + adapter)
