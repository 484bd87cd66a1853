"""Keys of the hardware: what a cluster has, and which rank runs where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.schema.keys import key, section

DeviceKind = Literal["cpu", "cuda", "npu"]
LayoutKind = Literal["colocated", "separate", "hybrid"]
LauncherKind = Literal["processes", "ray"]


@dataclass
class LinkConfig:
    """Speeds of the links, in decimal gigabytes a second and one direction."""

    intra_node_gbps: float = key(10.0, "GB/s between two devices of one node (NVLink, HCCS or shared memory).", low=0)
    inter_node_gbps: float = key(10.0, "GB/s of one network card between nodes.", low=0)
    host_device_gbps: float = key(10.0, "GB/s between host memory and one device.", low=0)
    nics_per_node: int = key(1, "Network cards of a node that carry weights.", low=0)
    interface: str | None = key(None, "Network interface that sockets bind to; loopback when not set.")


@dataclass
class ClusterConfig:
    """The machines."""

    nodes: int = key(1, "Number of nodes.", low=1)
    devices_per_node: int = key(1, "Devices of one node.", low=1)
    device: DeviceKind = key("cpu", "Kind of device.")
    device_name: str = key("", "Model of the device, as the driver names it; empty for any.")
    device_memory: int = key(0, "Memory of one device; 0 means not stated.", unit="bytes", low=0)
    host_memory: int = key(0, "Memory of one node; 0 means not stated.", unit="bytes", low=0)
    launcher: LauncherKind = key(
        "processes",
        "What starts the processes of trainer ranks and replicas: processes: this one, on one machine; "
        "ray: a Ray cluster, on as many as it has.",
    )
    ray_address: str | None = key(
        None,
        "HOST:PORT of a running Ray cluster; when not set RAY_ADDRESS, and without that a cluster of the run's own.",
    )
    links: LinkConfig = section(LinkConfig, "Speeds of the links.")


@dataclass
class PlacementConfig:
    """Which rank runs where."""

    layout: LayoutKind = key(
        "colocated",
        "colocated: trainer ranks and rollout replicas share devices; separate: each has its own; "
        "hybrid: one set of devices switches between two layouts in place.",
    )
    trainer_ranks: int = key(1, "Ranks of the trainer (FSDP x TP).", low=1)
    trainer_tp: int = key(1, "Tensor-parallel size inside the trainer.", low=1)
    replicas: int = key(1, "Rollout replicas with devices of their own, or shared ones when colocated.", low=0)
    replica_tp: int = key(1, "Tensor-parallel size of one replica.", low=1)
    pad: bool = key(
        False,
        "Pad heads and feed-forward with zeros where replica_tp does not divide them (hybrid layout).",
    )
    hybrid_replicas: int = key(0, "Replicas on the trainer's devices that join and leave (separate_async).", low=0)
    reward_devices: int = key(0, "Devices of the reward model's own pool; 0 shares the trainer's.", low=0)
