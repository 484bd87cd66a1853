"""FSDP2 and FSDP2 x TP in real processes over gloo: the gradients, steps and states are those of one process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlctl.algorithms.objective import Objective
from rlctl.experience.row_data import pack_rows
from rlctl.model.base import LossSpec
from rlctl.model.local import LocalEngine
from rlctl.model.memory_settings import Memory
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.messages import RankSetup, TensorHead, tensor_from
from rlctl.runtime.ranks.supervisor import RankError, TrainerRanks
from rlctl.schema.training import OptimizerConfig
from tests.model.fsdp2_families import KINDS, WHOLE_LAYERS
from tests.model.tiny import LOSS, random_rows

TARGET = "tests.model.fsdp2_targets:main"
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
BUDGET = 100  # tokens of a micro-batch: a share of the rows takes several


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for kind, config in {**KINDS, **WHOLE_LAYERS}.items():
        torch.manual_seed(len(kind))
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones hide what a wrong gradient of them does
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        found[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(found[kind])
    return found


def setups(world: int, tp: int, source: Path, *, timeout: float = 60.0) -> list[RankSetup]:
    return [
        RankSetup(
            rank=rank, world=world, tp=tp, store="", timeout=timeout, device="cpu", threads=1, source=str(source),
            trust_remote_code=False, optimizer=OPTIMIZER, dtype="float32", micro_batch_tokens=BUDGET,
            total_updates=10, memory=Memory(),
        )
        for rank in range(world)
    ]  # fmt: skip


# On three ranks parts are uneven, and some are empty.
LAYOUTS = [
    pytest.param((2, 1), id="fsdp2-2"),
    pytest.param((4, 2), id="fsdp2-2-tp-2"),
    pytest.param((3, 1), id="fsdp2-3", marks=pytest.mark.slow),
]


# What tensor parallelism has no part in.
FSDP_ALONE = pytest.mark.parametrize("ranks", [LAYOUTS[0], LAYOUTS[2]], indirect=True)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, folders, tmp_path_factory) -> Iterator[TrainerRanks]:
    world, tp = request.param
    started = TrainerRanks(
        setups(world, tp, folders["llama-tied"]), logs=tmp_path_factory.mktemp("logs"), target=TARGET
    )
    yield started
    started.close()


def local(folder: Path, **options) -> LocalEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return LocalEngine(model, OPTIMIZER, micro_batch_tokens=BUDGET, **options)


def rebuilt(ranks: TrainerRanks, source: Path, **memory) -> RankedEngine:
    ranks.call("rebuild", source=str(source), memory=Memory(**memory))
    return RankedEngine(ranks)


def gradients(ranks: TrainerRanks, rows, loss: LossSpec, rate: float) -> dict[str, dict[str, torch.Tensor]]:
    for piece in pack_rows(rows):
        ranks.call("rows", rows=piece)
    found: dict[str, dict[str, torch.Tensor]] = {"gradient": {}, "stepped": {}}
    for report in ranks.stream("gradients", loss=msgspec.to_builtins(loss), rate=rate):
        if report.kind == "tensor":
            head = msgspec.convert(report.result, TensorHead)
            found[head.kind][head.name] = tensor_from(head, lambda: ranks.piece("gradients"))
    return found


def one_process(engine: LocalEngine, rows, loss: LossSpec, rate: float) -> dict[str, dict[str, torch.Tensor]]:
    engine.accumulate(rows, loss)
    named = dict(engine.model.named_parameters())
    gradient = {name: p.grad.clone() for name, p in named.items()}
    torch.optim.SGD(named.values(), lr=rate).step()
    return {"gradient": gradient, "stepped": {name: p.detach() for name, p in named.items()}}


def compare(found, expected) -> None:
    assert found["gradient"].keys() == expected["gradient"].keys()
    for name, gradient in expected["gradient"].items():
        error = (found["gradient"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, (name, float(error))
    for name, parameter in expected["stepped"].items():
        assert (found["stepped"][name] - parameter).abs().max() < 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_a_step_are_those_of_one_process(ranks, folders, kind, seed):
    rows = random_rows(9)
    for row in rows[::3]:
        row.mask[len(row.mask) // 2 :] = False
    for row in rows:
        row.ref_logprobs = np.full(len(row.response_ids), -2.5, np.float32)
    objective = Objective("ppo_clip", {"clip_low": 0.2}, kl="k3", kl_coef=0.1, entropy_coef=0.01)
    loss = LossSpec(objective, random.choice(["token-mean", "seq-mean-token-mean"]), horizon=20, temperature=0.8)
    rebuilt(ranks, folders[kind])
    compare(gradients(ranks, rows, loss, 0.1), one_process(local(folders[kind]), rows, loss, 0.1))


@FSDP_ALONE
@pytest.mark.parametrize("kind", WHOLE_LAYERS)
def test_other_families_are_spread_whole_layers_at_a_time(ranks, folders, kind, seed, tmp_path):
    rows, many = random_rows(7), rebuilt(ranks, folders[kind])
    many.save_pretrained(tmp_path / "many")
    one = local(folders[kind])
    one.save_pretrained(tmp_path / "one")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("many", "one")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    compare(gradients(ranks, rows, LOSS, 0.1), one_process(one, rows, LOSS, 0.1))


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_without_rows_keep_step(ranks, folders, count, seed):
    rows = random_rows(count)
    rebuilt(ranks, folders["qwen2-untied"], gradient_checkpointing=True)
    compare(gradients(ranks, rows, LOSS, 0.1), one_process(local(folders["qwen2-untied"]), rows, LOSS, 0.1))


def test_updates_scores_and_weights_are_those_of_one_process(ranks, folders, seed):
    rows = random_rows(10)
    many, one = rebuilt(ranks, folders["llama-tied"]), local(folders["llama-tied"])
    for _ in range(3):
        for a, b in zip(many.log_probs(rows, temperature=0.7), one.log_probs(rows, temperature=0.7), strict=True):
            assert np.abs(a - b).max() < 1e-4
        found, expected = many.update(rows, LOSS), one.update(rows, LOSS)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
        assert found.tokens == expected.tokens
        for a, b in zip(found.logprobs, expected.logprobs, strict=True):
            assert np.abs(a - b).max() < 1e-4
    assert found.metrics["grad_norm"] > OPTIMIZER.max_grad_norm / 2
    given = dict(many.per_tensor_params())
    assert given.keys() == dict(one.per_tensor_params()).keys()
    for name, tensor in one.per_tensor_params():
        # AdamW's steps are lr * sign(gradient) at first: only a gradient near zero may differ.
        assert (given[name] - tensor).abs().mean() < 1e-5, name
    assert all(ranks.call("copies").values())


def test_a_kept_policy_answers_while_the_current_one_stays(ranks, folders, seed):
    rows, many = random_rows(10), rebuilt(ranks, folders["llama-tied"])
    before = many.log_probs(rows, temperature=0.7)
    many.keep_policy()
    many.update(rows, LOSS)
    now, digest = many.log_probs(rows, temperature=0.7), many.params_digest()
    kept = many.kept_log_probs(rows, temperature=0.7)
    assert all((a == b).all() for a, b in zip(before, kept, strict=True))
    assert any((a != b).any() for a, b in zip(now, kept, strict=True))
    assert many.params_digest() == digest


def test_state_goes_on_bit_for_bit_and_from_one_process(ranks, folders, seed, tmp_path):
    rows = [random_rows(6) for _ in range(4)]
    many = rebuilt(ranks, folders["qwen2-untied"])
    for batch in rows[:2]:
        many.update(batch, LOSS)
    saved = many.state()
    assert saved["updates"] == 2
    for batch in rows[2:]:
        many.update(batch, LOSS)
    digest, after = many.params_digest(), many.state()
    again = rebuilt(ranks, folders["qwen2-untied"])
    again.load(saved)
    for batch in rows[2:]:
        again.update(batch, LOSS)
    assert again.params_digest() == digest
    one = local(folders["qwen2-untied"])
    one.load(saved)
    assert one.params_digest() != digest
    for batch in rows[2:]:
        one.update(batch, LOSS)
    again.load(one.state())
    assert again.params_digest() == one.params_digest()
    one.load(after)
    assert one.params_digest() == digest
    one.save_pretrained(tmp_path / "one")
    again.load(after)
    again.save_pretrained(tmp_path / "many")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many")]
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(a, b), name
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == sorted(p.name for p in (tmp_path / "many").iterdir())


@FSDP_ALONE
def test_offloading_changes_nothing(ranks, folders, seed):
    rows = random_rows(6)
    digests = []
    for params, optimizer in ((False, False), (True, True), (False, True)):
        many = rebuilt(ranks, folders["llama-tied"], offload_params=params, offload_optimizer=optimizer)
        for _ in range(3):
            many.offload()
            assert (ranks.call("largest")["bytes"] == 0) is params
            weights = dict(many.per_tensor_params())
            state = many.state()
            assert all(torch.equal(weights[name], t) for name, t in state["params"].items())
            many.offload()
            many.onload()
            many.onload()
            many.update(rows, LOSS)
        many.offload()
        digests.append(many.params_digest())
    assert len(set(digests)) == 1


def test_checkpointing_and_activation_dtype(ranks, folders, seed):
    rows = random_rows(8)
    plain = gradients(*_again(ranks, folders), rows, LOSS, 0.1)
    saving = gradients(*_again(ranks, folders, gradient_checkpointing=True), rows, LOSS, 0.1)
    for name, gradient in plain["gradient"].items():
        assert torch.equal(saving["gradient"][name], gradient), name
    rough = rebuilt(ranks, folders["qwen3-tied"], activation_dtype="bfloat16")
    exact = local(folders["qwen3-tied"]).log_probs(rows, temperature=1.0)
    gaps = [np.abs(a - b).max() for a, b in zip(rough.log_probs(rows, temperature=1.0), exact, strict=True)]
    assert 1e-4 < max(gaps) < 0.1
    rough.update(rows, LOSS)
    assert {t.dtype for _, t in rough.per_tensor_params()} == {torch.float32}


def _again(ranks, folders, **memory) -> tuple[TrainerRanks]:
    rebuilt(ranks, folders["qwen3-tied"], **memory)
    return (ranks,)


def test_each_rank_holds_its_part(ranks, folders):
    rebuilt(ranks, folders["qwen2-untied"])
    whole = sum(p.numel() for p in local(folders["qwen2-untied"]).model.parameters())
    here = ranks.call("largest")["here"]
    # Embedding, head and norms are not cut over the tensor-parallel group.
    assert here < whole * 0.55 if ranks.size == 2 else here < whole * 0.45


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_those_that_a_weight_sync_cuts_slices_from(ranks, folders, kind):
    rebuilt(ranks, folders[kind])
    found = ranks.call("slices")
    assert 0 < found["here"] < found["all"] < 2 * found["whole"]


@FSDP_ALONE
def test_a_skipped_update_is_skipped_everywhere(ranks, folders, seed):
    rows, many = random_rows(6), rebuilt(ranks, folders["llama-tied"])
    before = many.params_digest()
    rows[0].advantages[:] = np.inf
    assert many.update(rows, LOSS).metrics["skipped_updates"] == 1.0
    assert many.params_digest() == before
    assert many.update(random_rows(6), LOSS).metrics["skipped_updates"] == 0.0


def test_ends_name_the_rank(ranks, folders):
    """Last of the tests that use these ranks: it ends them."""
    rebuilt(ranks, folders["llama-tied"])
    ranks.call("hurry", seconds=2.0)
    ranks._timeout = 2.0
    begin = time.monotonic()
    if ranks.size == 2:
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with pytest.raises(RankError, match=r"trainer rank 1 of 2 stalled in params_digest(.|\n)*rank 1: hurry"):
            RankedEngine(ranks).params_digest()
    else:
        with pytest.raises(RankError, match=rf"trainer rank 2 of {ranks.size} stalled in sleep(.|\n)*fsdp2_targets.py"):
            ranks.call("sleep", who=2, seconds=60.0)
    # The deadline and a second; a machine that is busy with others' work may take longer to end the processes.
    assert 1.5 < time.monotonic() - begin < (3.0 if os.getloadavg()[0] < (os.cpu_count() or 1) else 6.0)
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks.pids)
    with pytest.raises(RankError, match="have ended"):
        ranks.call("offload")
