"""Seconds that a weight sync would take on other hardware, predicted from the transfer plan and a profile's links."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from rlctl.config import load_config
from rlctl.errors import UsageError
from rlctl.ops.sync_bench_public import PUBLIC_FIGURES, PublicFigure
from rlctl.ops.sync_bench_workload import model_spec
from rlctl.rollout.traits import delivery_to
from rlctl.schema import Config
from rlctl.sync.delivery import planned
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.links import LinkKind, LinkModel
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.traits import Delivery
from rlctl.sync.weight_classes import bytes_by_rank
from rlctl.sync.weights import model_weights


@dataclass(frozen=True)
class Predicted:
    """One way to deliver.

    Attributes:
        moved: bytes between devices.
        seconds: of the transfer alone, its links used to the full: a lower bound for any engine that delivers so.
        bottleneck: the kind of link that sets them; ``by_link``: seconds of each.
    """

    moved: int
    seconds: float
    bottleneck: str
    by_link: dict[str, float]


@dataclass(frozen=True)
class Simulation:
    """A prediction: nothing was moved.

    Attributes:
        train, rollout: the layouts, in words.
        wanted_by_rank: bytes of weights on one rollout device.
        delivery: what the profile's transport and rollout engine do; ``predicted``: of each delivery.
        one_sender_s: the same when trainer rank 0 alone sends whole weights over one card, as a broadcast does.
        device_memory: of the profile; 0 when it states none.
        public: published times of the same model, and whether their set-up has about as many devices.
    """

    profile: str
    model: str
    train: str
    rollout: str
    weights: int
    wanted_by_rank: int
    delivery: Delivery
    predicted: dict[Delivery, Predicted]
    one_sender_s: float
    device_memory: int
    public: tuple[tuple[PublicFigure, bool], ...]

    @property
    def fits(self) -> bool:
        """Whether a rollout device holds its share of the weights."""
        return not self.device_memory or self.wanted_by_rank <= self.device_memory

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        public = [{**asdict(figure), "near": near} for figure, near in self.public]
        return {"prediction": True, **asdict(self), "fits": self.fits, "public": public}


def simulate(profile: str, model: str, *, bucket: int) -> Simulation:
    """Predict a sync of ``model`` (folder or preset) in the layout of ``profile``.

    Raises:
        UsageError: the profile's trainer and rollout share devices: there the weights need no network.
    """
    config = load_config(profile, env={}).config
    placement = config.placement
    if placement.layout != "separate":
        raise UsageError(
            f"in profile {profile} trainer and rollout share devices ({placement.layout})",
            where="--profile",
            fix="take a profile whose layout is separate, such as 64xH100-separate",
        )
    spec = model_spec(model)
    weights = model_weights(spec, spec.dtype or "BF16")
    train, rollout, where = _layouts(config, spec.layers)
    links = LinkModel.of_profile(config.cluster.links)
    predicted: dict[Delivery, Predicted] = {}
    for delivery in get_args(Delivery):
        plan = planned(delivery, weights, train, rollout, where)
        found = plan.predict(links, bucket_nbytes=bucket)
        predicted[delivery] = Predicted(plan.bytes_moved, found.seconds, found.bottleneck, found.by_resource)
    nbytes = sum(w.nbytes for w in weights)
    one_link: LinkKind = "network" if config.cluster.nodes > 1 else "node"
    return Simulation(
        profile=profile,
        model=model,
        train=f"FSDP over {train.ranks} ranks" + (f", tp {train.tp}" if train.tp > 1 else ""),
        rollout=f"{rollout.replicas} replicas of tp {rollout.tp}",
        weights=nbytes,
        wanted_by_rank=int(bytes_by_rank(weights, rollout).max()),
        delivery=delivery_to(config.rollout.engine, config.sync.backend),
        predicted=predicted,
        one_sender_s=links.speed(one_link).seconds(nbytes, -(-nbytes // bucket)),
        device_memory=config.cluster.device_memory,
        public=tuple((f, f.near(train.ranks, rollout.ranks)) for f in PUBLIC_FIGURES if f.model == model.lower()),
    )


def _layouts(config: Config, layers: int) -> tuple[ParallelLayout, ParallelLayout, Placement]:
    cluster, placement = config.cluster, config.placement
    train = ParallelLayout.fsdp(placement.trainer_ranks // placement.trainer_tp, tp=placement.trainer_tp)
    rollout = ParallelLayout.vllm(tp=placement.replica_tp, replicas=placement.replicas, layers=layers)
    nodes = Cluster(cluster.devices_per_node, max(cluster.links.nics_per_node, 1))
    return train, rollout, Placement.separate(nodes, train.ranks, rollout.ranks)
