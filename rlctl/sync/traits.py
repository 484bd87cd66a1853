"""What each checkpoint engine can be used for, as data: known before any of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rlctl.schema.layout import DeviceKind, LayoutKind

# What reaches a replica's rank: its own slices alone, where layouts are declared, or whole tensors.
Delivery = Literal["slices", "whole"]
_ANY: tuple[DeviceKind, ...] = ("cpu", "cuda", "npu")


@dataclass(frozen=True)
class BackendTraits:
    """Where a checkpoint engine works.

    Attributes:
        layouts: layouts of trainer and replicas that it serves.
        devices: kinds of device that it moves weights between.
        one_node: trainer and replicas must be on one node.
        ways: values of its option ``way`` that differ in kind, if it has such an option; the fastest first.
        keeps: how many copies of the weights it may hold on a node beside those of the members.
        folder: members meet in a folder that all of them see: option ``folder``, by default one of one node.
        delivery: what it can deliver.
        views: receivers in host memory may read the weights where they lie (``map_weights``), in the first of ``ways``.
        in_place: there are no two sides: members both train and generate, and each takes what it lacks.
    """

    layouts: tuple[LayoutKind, ...]
    devices: tuple[DeviceKind, ...]
    one_node: bool = False
    ways: tuple[str, ...] = ()
    keeps: int = 1
    folder: bool = False
    delivery: Delivery = "whole"
    views: bool = False
    in_place: bool = False


BACKEND_TRAITS: Mapping[str, BackendTraits] = MappingProxyType(
    {
        "naive": BackendTraits(("colocated",), _ANY),
        "ipc": BackendTraits(
            ("colocated", "separate"), ("cpu", "cuda"), one_node=True, ways=("mapped", "ring"), views=True
        ),
        "reshard": BackendTraits(("hybrid",), _ANY, delivery="slices", in_place=True),
        "gloo": BackendTraits(("separate",), _ANY, delivery="slices"),
        "nccl": BackendTraits(("separate",), ("cuda",), delivery="slices"),
        "hccl": BackendTraits(("separate",), ("npu",), delivery="slices"),
        "nixl": BackendTraits(("separate",), ("cpu", "cuda"), delivery="slices"),
        "mooncake": BackendTraits(("separate",), ("cpu", "cuda"), delivery="slices"),
        "kimi": BackendTraits(("separate",), _ANY, delivery="slices"),
        "file": BackendTraits(("separate",), _ANY, keeps=3, folder=True, delivery="slices"),
    }
)
