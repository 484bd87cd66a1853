"""Link speeds, predicted seconds and the assignment of ranks to devices."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from rlctl.errors import UsageError
from rlctl.schema.layout import LinkConfig
from rlctl.sync.assignment import assign
from rlctl.sync.links import LinkModel, LinkSpeed
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.traffic import Traffic

LINKS = LinkModel(device=LinkSpeed(1e12), node=LinkSpeed(1e11, 1e-3), network=LinkSpeed(1e10, 1e-2))


def test_a_probe_gives_back_latency_and_bandwidth() -> None:
    rng = random.Random(3)
    samples = [
        (n, (2e-4 + n / 3e9) * rng.uniform(0.97, 1.03)) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 26) for _ in range(5)
    ]
    speed = LinkSpeed.fit(samples)
    assert speed.bytes_per_second == pytest.approx(3e9, rel=0.05)
    assert speed.latency == pytest.approx(2e-4, rel=0.05)
    fast_small = LinkSpeed.fit([(1000, 1e-6), (10**9, 2.0)])  # a line through these starts below zero
    assert fast_small.latency >= 0
    for bad in ([(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)], [(1000, 2.0), (2000, 1.0)]):
        with pytest.raises(UsageError):
            LinkSpeed.fit(bad)


def test_a_profile_without_a_speed_cannot_predict() -> None:
    model = LinkModel.of_profile(LinkConfig(intra_node_gbps=450, inter_node_gbps=50, host_device_gbps=60))
    assert model.node.bytes_per_second == 450e9
    assert model.network.bytes_per_second == 50e9
    with pytest.raises(UsageError, match="inter_node_gbps must be above 0"):
        LinkModel.of_profile(LinkConfig(inter_node_gbps=0))


def test_the_busiest_link_sets_the_time() -> None:
    # Two nodes of four devices, two cards each: devices 0 and 1 share the first card.
    traffic = Traffic(Placement(Cluster(4, 2), (0, 1, 2, 3), (4, 5, 3)))
    traffic.add(0, 0, "network", 10**9)
    traffic.add(1, 1, "network", 10**9)  # the same card out, and the same card in (devices 4 and 5)
    traffic.add(2, 2, "node", 10**9)
    traffic.add(3, 2, "device", 10**9)
    assert traffic.moved == 3 * 10**9
    assert traffic.card_sent.tolist()[:2] == [2 * 10**9, 0]
    assert traffic.card_received.tolist()[2] == 2 * 10**9
    prediction = traffic.predict(LINKS, bucket_nbytes=10**8)
    # 2 GB at 10 GB/s, and twice ten messages.
    assert prediction.seconds == pytest.approx(0.2 + 20 * 1e-2)
    assert prediction.bottleneck == "network out"
    assert prediction.by_resource["node in"] == pytest.approx(0.01 + 10 * 1e-3)
    assert prediction.by_resource["device in"] == pytest.approx(1e-3)
    assert Traffic(Placement(Cluster(4, 2), (0,), (1,))).predict(LINKS).seconds == 0


def test_placements() -> None:
    cluster = Cluster(8, 4)
    assert [cluster.nic(d) for d in (0, 1, 2, 7, 8)] == [0, 0, 1, 3, 4]
    assert [cluster.link(*pair) for pair in ((3, 3), (3, 4), (7, 8))] == ["device", "node", "network"]
    assert Placement.separate(cluster, 4, 4).rollout == (4, 5, 6, 7)  # beside the trainer on its node
    assert Placement.separate(cluster, 5, 4).rollout == (8, 9, 10, 11)  # a node of its own
    assert Placement.colocated(cluster, 2, 2).rollout == (0, 1)


def test_the_assignment_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for rows in range(1, 6):
        for columns in range(rows, 7):
            for _ in range(6):
                values = rng.integers(0, 5, (rows, columns)).astype(float)
                found = assign(values)
                assert len(set(found)) == rows
                best = max(
                    sum(values[r, c] for r, c in enumerate(chosen))
                    for chosen in itertools.permutations(range(columns), rows)
                )
                assert sum(values[r, c] for r, c in enumerate(found)) == best


def test_a_host_bounds_what_its_devices_move_together() -> None:
    placement = Placement(Cluster(4, 4), (0, 1), (2, 3))
    traffic = Traffic(placement)
    traffic.add(0, 0, "node", 10**9)
    traffic.add(1, 1, "node", 10**9)
    alone = traffic.predict(LINKS)
    assert alone.seconds == pytest.approx(1e-3 + 1e-2)
    shared = LinkModel(LINKS.device, LINKS.node, LINKS.network, host=LinkSpeed(1e11))
    assert traffic.predict(shared).seconds == pytest.approx(2e-2)
    assert traffic.predict(shared).bottleneck == "host"
    apart = Placement(Cluster(1, 1), (0, 1), (2, 3))
    traffic = Traffic(apart)
    traffic.add(0, 0, "network", 10**8)
    assert traffic.predict(shared).by_resource["host"] == pytest.approx(1e-3)


def test_a_flow_and_a_syncs_own_seconds_count() -> None:
    traffic = Traffic(Placement(Cluster(4, 4), (0, 1), (2, 3)))
    traffic.add(0, 0, "node", 10**9)
    traffic.add(1, 0, "node", 10**9)
    slow = LinkModel(LINKS.device, LinkSpeed(1e11), LINKS.network, flow=LinkSpeed(2.5e10, 1e-3), sync=0.5)
    found = traffic.predict(slow, bucket_nbytes=5 * 10**8)
    assert found.by_resource["node in"] == pytest.approx(2e-2)
    assert found.by_resource["flow"] == pytest.approx(4e-2 + 2e-3), "one flow's bytes, in two messages"
    assert found.seconds == pytest.approx(0.5 + 4.2e-2)
    assert found.bottleneck == "flow"
