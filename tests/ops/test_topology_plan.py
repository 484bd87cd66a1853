"""A profile on paper: who runs where and who sends what to whom."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.profiles import profile_names
from rlctl.errors import UsageError
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.topo_dump import parse_topo
from rlctl.ops.backend_patterns import PATTERNS
from rlctl.ops.planned_model import planned_model
from rlctl.ops.topology_plan import TopologyPlan, plan_topology
from rlctl.ops.topology_sources import read_request
from rlctl.ops.topology_summary import summarise
from rlctl.schema import Config
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.traits import BACKEND_TRAITS

DUMPS = Path(__file__).parents[1] / "hardware" / "dumps"


def plan_sources(profile: str, graph: NodeGraph | None = None, **given: Any) -> tuple[TopologyPlan, list[str]]:
    request = read_request(profile, **given)
    return request.plan(graph), list(request.notes)


def received(plan: TopologyPlan, rank: int, role: str = "rollout") -> int:
    return sum(f.nbytes for f in plan.flows if (f.target.role, f.target.rank) == (role, rank))


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_is_laid_out_and_every_rank_gets_its_weights(profile: str) -> None:
    plan, notes = plan_sources(profile, model="qwen3-0.6b")
    assert notes == []
    assert plan.model is not None and plan.rollout is not None
    one = plan.model.nbytes
    for place in plan.placement:
        if place.role in ("rollout", "hybrid"):
            # A rank of a replica holds its share, and whole what is not cut.
            got = received(plan, place.rank, place.role)
            assert one // plan.rollout.tp <= got <= one
            if plan.rollout.tp == 1:
                assert got == one
    assert plan.moved + summarise(plan).links.get("device", (0, 0))[1] == sum(f.nbytes for f in plan.flows)


@pytest.mark.parametrize("profile", profile_names())
def test_the_profiles_own_model_is_known_here(profile: str) -> None:
    plan, notes = plan_sources(profile)
    assert (notes, plan.model is not None) == ([], True)


def test_64_h100_with_32b_by_nixl() -> None:
    plan, _ = plan_sources("64xH100-separate", model="qwen3-32b", backend="nixl")
    assert (plan.backend, len(plan.placement), len(plan.flows)) == ("nixl", 64, 1024)
    assert plan.model is not None and plan.model.nbytes == 2 * 32_762_123_264
    summary = summarise(plan)
    assert summary.links == {"network": (1024, plan.moved)}
    assert [r.role for r in summary.runs] == ["trainer"] * 4 + ["rollout"] * 8
    assert len(summary.nodes) == 16
    assert sum(pair.nbytes for pair in summary.nodes) == summary.wanted == plan.moved
    # vLLM's ranks load whole tensors: one rank of each replica is sent all of them.
    assert (plan.delivery, summary.carried) == ("whole", 8 * plan.model.nbytes)
    assert plan.prediction is not None
    assert plan.prediction.seconds == pytest.approx(plan.model.nbytes / 50e9, rel=0.05)  # over one card each
    sent, got = summary.cards_sent, summary.cards_received
    assert (len(sent), len(got)) == (32, 32)
    assert sum(sent.values()) == sum(got.values()) == plan.moved
    # The cards carry it evenly: within a thousandth.
    assert max(sent.values()) < 1.001 * plan.moved / 32
    place, nbytes, targets = summary.senders[0]
    assert (nbytes, targets) == (max(sent.values()), 32)
    assert plan.document()["placement"][0]["nic"] == f"NIC{place.device}" == "NIC0"


def test_a_login_node_plans_it_without_torch_in_time() -> None:
    code = (
        "import sys, time; from rlctl.cli import main; start = time.process_time();"
        "words = 'topology --profile 64xH100-separate --model kimi-k2 --backend nixl --json';"
        "code = main(words.split());"
        "print(time.process_time() - start, [m for m in ('torch', 'transformers', 'vllm') if m in sys.modules],"
        "file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    seconds, _, loaded = done.stderr.strip().partition(" ")
    assert loaded == "[]"
    assert float(seconds) < 10
    found = json.loads(done.stdout)
    assert len(found["flows"]) == 1024
    assert found["flows"][0] == {
        "from": "trainer 0", "to": "rollout 0", "bytes": found["flows"][0]["bytes"], "link": "network",
        "path": "NIC0 > NIC0", "from_node": 0, "to_node": 4,
    }  # fmt: skip
    assert set(found) >= {"devices", "links", "nics", "placement", "flows", "checks"}


def test_a_real_nodes_cards_and_links_are_used() -> None:
    graph = parse_topo((DUMPS / "a100_4gpu_4nic_heads.txt").read_text())
    keys = ["cluster.devices_per_node=4", "placement.trainer_ranks=4", "placement.replicas=4"]
    plan, _ = plan_sources("8xH100-colocate", model="qwen3-0.6b", graph=graph, overrides=keys)
    assert plan.cards == {i: f"mlx5_{i}" for i in range(4)}
    paths = {(f.source.device, f.target.device): f.path for f in plan.flows if f.link == "node"}
    assert (paths[0, 1], paths[0, 2]) == ("NV4", "SYS")


def test_a_hybrid_engine_puts_rollout_ranks_where_their_weights_lie() -> None:
    plan, _ = plan_sources("8xA100-hybrid", model="qwen2.5-7b")
    assert {p.device for p in plan.placement if p.role == "rollout"} == set(range(8))
    kept = summarise(plan).links["device"][1]
    plain, _ = plan_sources(
        "8xA100-hybrid", model="qwen2.5-7b", overrides=["placement.layout=colocated"], backend="naive"
    )
    assert kept > summarise(plain).links["device"][1]


def test_what_cannot_be_cut_or_placed_is_an_error() -> None:
    with pytest.raises(UsageError, match="tensor parallelism 3 does not divide the 16 parts"):
        plan_sources(
            "8xH100-colocate", model="qwen3-0.6b", overrides=["placement.replica_tp=3", "placement.replicas=2"]
        )
    with pytest.raises(UsageError, match="finds no device: the cluster has 8"):
        plan_sources("8xH100-colocate", overrides=["placement.trainer_ranks=9"])
    with pytest.raises(UsageError, match="unknown name 'nixxl'; did you mean 'nixl'") as caught:
        plan_sources("64xH100-separate", backend="nixxl")
    assert "--backend" in str(caught.value)
    plan, notes = plan_sources("8xH100-colocate", overrides=["model.path=nobody/knows-this"])
    assert (plan.flows, plan.model) == ((), None)
    assert "give --model" in notes[0]


def test_every_backend_says_how_it_carries() -> None:
    assert set(PATTERNS) == set(BACKEND_TRAITS)


@pytest.mark.parametrize("seed", range(20))
def test_random_layouts_deliver_exactly_what_is_wanted(seed: int) -> None:
    rng = random.Random(seed)
    config = Config()
    config.cluster.nodes, config.cluster.devices_per_node = rng.randint(1, 3), rng.choice([2, 4, 8])
    config.cluster.device, config.cluster.links.nics_per_node = "cuda", rng.choice([0, 1, 2, 4])
    total = config.cluster.nodes * config.cluster.devices_per_node
    config.placement.replica_tp = rng.choice([t for t in (1, 2, 4) if t <= config.cluster.devices_per_node // 2])
    config.placement.layout = rng.choice(["colocated", "separate", "hybrid"])
    config.placement.trainer_ranks = max(total // 2, 1)
    config.placement.replicas = max(total // 2 // config.placement.replica_tp, 1)
    model = planned_model("cycle-tiny")
    plan = plan_topology("random", config, model)
    layout = ParallelLayout.vllm(tp=config.placement.replica_tp, replicas=config.placement.replicas)
    if config.placement.layout == "hybrid":  # the sampler on the trainer's ranks pads no vocabulary
        layout = replace(layout, vocab_multiple=1)
    wanted = [0] * layout.ranks
    for weight in model.weights:
        for share in layout.shares(weight):
            size = weight.nbytes
            for (low, high), whole in zip(share.box, weight.shape, strict=True):
                size = size * (high - low) // whole
            for rank in share.ranks:
                wanted[rank] += size
    assert [received(plan, rank) for rank in range(layout.ranks)] == wanted, seed
    for flow in plan.flows:
        same = (flow.source.node, flow.source.device) == (flow.target.node, flow.target.device)
        kind = "device" if same else "node" if flow.source.node == flow.target.node else "network"
        assert flow.link == kind
