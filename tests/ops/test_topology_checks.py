"""All rules together: a profile, a model, a node and a host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import CheckError, UsageError
from rlctl.hardware.host import HostFacts
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.rules.outcome import Outcome
from rlctl.hardware.topo_dump import parse_topo
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset, preset_config
from rlctl.ops.model_rules import bucket_size, tensor_parallel_heads, valid_sizes
from rlctl.ops.planned_model import planned_model
from rlctl.ops.topology_checks import Surroundings, require_passed, run_checks
from rlctl.ops.topology_sources import read_request
from rlctl.ops.topology_view import Asked, look
from rlctl.schema import Config
from rlctl.sync.layout import ParallelLayout

DUMPS = Path(__file__).parents[1] / "hardware" / "dumps"
H100 = DUMPS / "h100_8gpu_10nic_legend.txt"


def outcomes(profile: str, *overrides: str, model: str | None = None, around: Surroundings | None = None,
             backend: str | None = None) -> dict[str, Outcome]:  # fmt: skip
    """Return the worst outcome of each rule."""
    request = read_request(profile, model=model, overrides=overrides, backend=backend)
    around = around or Surroundings(parse_topo(H100.read_text()), {})
    found = run_checks(around, request.resolution, request.model)
    order = ["skipped", "ok", "warn", "fail"]
    return {o.rule: o for o in sorted(found, key=lambda o: order.index(o.status))}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("qwen3-8b", [1, 2, 4, 8, 16, 32]),
        ("qwen2.5-0.5b", [1, 2]),
        ("qwen2.5-7b", [1, 2, 4]),
        ("qwen3-235b-a22b", [1, 2, 4, 8, 16, 32, 64]),
        ("kimi-k2", [1, 2, 4, 8, 16, 32, 64]),
        ("llama-3.1-70b", [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_valid_tensor_parallel_sizes(model: str, sizes: list[int]) -> None:
    assert valid_sizes(preset(model)) == sizes


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen2.5-0.5b", "qwen2.5-7b"])
def test_valid_sizes_are_those_that_the_layout_can_cut(model: str) -> None:
    planned = planned_model(model)
    assert planned.spec is not None
    first = [w for w in planned.weights if w.layer in (None, 0)]

    def cuts(tp: int) -> bool:
        layout = ParallelLayout.vllm(tp=tp)
        try:
            return all(layout.shares(weight) for weight in first)
        except UsageError:
            return False

    assert valid_sizes(planned.spec, 32) == [tp for tp in range(1, min(planned.spec.heads, 32) + 1) if cuts(tp)]


def test_heads_against_tensor_parallelism() -> None:
    config = Config()
    config.placement.replica_tp = 3
    (bad,) = tensor_parallel_heads(config, planned_model("qwen3-8b"))
    assert (bad.status, bad.fix) == ("fail", "valid sizes: 1, 2, 4, 8, 16, 32")
    assert "replica_tp 3 does not cut qwen3-8b evenly (32 heads, 8 key-value heads" in bad.message
    config.placement.replica_tp = 16
    (repeated,) = tensor_parallel_heads(config, planned_model("qwen3-8b"))
    assert (repeated.status, "each is kept 2 times, its cache too" in repeated.message) == ("warn", True)
    config.placement.replica_tp = config.placement.trainer_tp = 8
    assert [o.status for o in tensor_parallel_heads(config, planned_model("qwen3-8b"))] == ["ok"]
    assert tensor_parallel_heads(config, None)[0].status == "skipped"


@pytest.mark.parametrize(
    ("rows", "hidden", "bucket", "minimum"),
    [(248320, 5120, 2048 << 20, "2425 MiB"), (151936, 2048, 512 << 20, "594 MiB")],
)
def test_a_tensor_larger_than_the_bucket_is_found_before_the_run(
    tmp_path: Path, rows: int, hidden: int, bucket: int, minimum: str
) -> None:
    values = {**preset_config("qwen3-8b"), "vocab_size": rows, "hidden_size": hidden}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelSpec.from_folder(tmp_path).vocab == rows
    config = Config()
    config.sync.bucket_size = bucket
    outcome = bucket_size(config, planned_model(str(tmp_path)))
    assert (outcome.status, outcome.fix) == ("warn", f"sync.bucket_size of at least {minimum} carries it whole")
    assert f"the largest tensor: {minimum}" in outcome.message
    assert "it travels in 2 pieces" in outcome.message
    config.sync.bucket_size = 4 << 30
    assert bucket_size(config, planned_model(str(tmp_path))).status == "ok"


def test_a_good_node_passes() -> None:
    found = outcomes("8xH100-colocate", "sync.bucket_size=2GiB")
    assert {o.status for o in found.values()} <= {"ok", "skipped"}, found
    require_passed(list(found.values()))


def test_what_is_wrong_with_a_node_for_a_profile() -> None:
    small = Surroundings(parse_topo((DUMPS / "a100_4gpu_4nic_heads.txt").read_text()), {"CUDA_VISIBLE_DEVICES": "0,1"})
    found = outcomes("16xH100-separate", around=small)
    assert found["tensor-parallel-links"].status == "fail"
    assert found["card-count"].fix == "cluster.links.nics_per_node=4"
    assert "shows 2 GPUs, and a node of the run takes 8" in found["visible-devices"].message
    with pytest.raises(CheckError, match="checks failed: ") as caught:
        require_passed(list(found.values()))
    assert caught.value.exit_code == 4


def test_backends_and_layouts() -> None:
    found = outcomes("64xH100-separate", backend="ipc", model="qwen3-8b")
    assert found["backend"].status == "fail"
    assert "nixl" in (found["backend"].fix or "")
    assert outcomes("8xH100-colocate", backend="nccl")["backend"].status == "fail"
    assert outcomes("64xH100-separate", "placement.trainer_ranks=65", model="qwen3-8b")["placement"].status == "fail"


def test_shared_memory_of_a_backend_that_keeps_copies_there() -> None:
    host = HostFacts(shm_total=8 << 30, shm_free=8 << 30, memlock=None)
    around = Surroundings(NodeGraph((), ()), {}, ("lo",), host, None, {})
    found = outcomes("cpu-separate", model="qwen3-8b", backend="file", around=around)
    assert found["shared-memory"].status == "fail"
    assert "what backend file keeps there (3 copies of the weights)" in found["shared-memory"].message
    assert outcomes("cpu-separate", backend="file", around=around)["shared-memory"].status == "ok"


def test_a_layout_that_cannot_be_is_a_check_and_without_checks_an_error() -> None:
    view = look(
        Asked(str(H100), "8xH100-colocate", overrides=("placement.replica_tp=3", "placement.replicas=2"), check=True)
    )
    assert view.plan is None
    assert "tensor-parallel-heads" in {o.rule for o in view.checks if o.status == "fail"}
    assert view.document()["placement"] == []
