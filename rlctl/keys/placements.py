"""Which region of a whole tensor one rank's DTensor shard is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from rlctl.errors import RlctlError
from rlctl.keys.boxes import Box, Shape, Span
from rlctl.keys.pickled import Global, Record, attributes
from rlctl.keys.stored_tensor import StoredTensor

# Where DTensor, its placements, its specification and device meshes have lived in torch since 2.2.
DTENSOR_MODULES = (
    "torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.device_mesh.",
    "torch.distributed._device_mesh.", "torch.distributed._mesh_layout.",
)  # fmt: skip
MAX_MESH_DIMS = 16
MAX_MESH_SIZE = 1 << 24


class PlacementError(RlctlError):
    """A shard whose place in the whole tensor cannot be told."""


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on one dimension of a device mesh.

    ``split`` is set for torch's ``_StridedShard``: dimension ``dim`` was first cut into ``split`` parts by mesh
    dimensions further right (tensor parallelism before FSDP2), and each part is cut by this one.
    """

    kind: Literal["shard", "replicate", "partial"]
    dim: int = 0
    split: int | None = None


@dataclass(frozen=True)
class DTensorShard:
    """What one rank holds of a DTensor.

    Attributes:
        local: the rank's part.
        shape: of the whole tensor.
        placements: one for each dimension of the mesh.
        mesh: sizes of the mesh's dimensions, ``mesh_names`` their names where given.
        coordinate: the rank's place in the mesh.
    """

    local: StoredTensor
    shape: Shape
    placements: tuple[Placement, ...]
    mesh: Shape
    mesh_names: tuple[str, ...]
    coordinate: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The region of the whole tensor that ``local`` is. Raises PlacementError."""
        return local_box(self.shape, self.placements, self.mesh, self.coordinate)


def local_box(shape: Shape, placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]) -> Box:
    """Return the region that the rank at ``coordinate`` of a mesh of sizes ``mesh`` holds of a tensor of ``shape``.

    A split follows torch.chunk: pieces of ceil(n / k), the last ones shorter or empty. Raises PlacementError for
    values pending a sum (Partial) and for a strided split that no mesh dimension further right explains.
    """
    starts, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        for axis in _order(placements, mesh, dim):
            step = -(-sizes[dim] // mesh[axis])
            begin = min(coordinate[axis] * step, sizes[dim])
            starts[dim] += begin
            sizes[dim] = min(step, sizes[dim] - begin)
    for placement in placements:
        if placement.kind == "partial":
            raise PlacementError("the shard holds partial sums, not values", fix="save it after a full reduction")
        if placement.kind == "shard" and not 0 <= placement.dim < len(shape):
            raise PlacementError(f"sharded on dimension {placement.dim} of a tensor of {len(shape)} dimensions")
    return tuple(Span(start, size) for start, size in zip(starts, sizes, strict=True))


def _order(placements: Sequence[Placement], mesh: Sequence[int], dim: int) -> list[int]:
    """Return the mesh dimensions that cut tensor dimension ``dim``, in the order in which they cut it."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.kind != "shard" or placement.dim != dim:
            continue
        if placement.split is None:
            order.insert(0, axis)
            continue
        after = [i for i in range(len(order) + 1) if prod(mesh[a] for a in order[:i]) == placement.split]
        if not after:
            raise PlacementError(
                f"a strided split by {placement.split} that the mesh {list(mesh)} does not explain",
                fix="save a full state dict, or a torch.distributed.checkpoint folder",
            )
        order.insert(after[-1], axis)
    return order


def dtensor_shard(arguments: tuple[Any, ...], state: Any) -> DTensorShard:
    """Return the shard that a pickled DTensor describes. Raises ValueError for what is not one."""
    found = attributes(state)
    local, spec = found.get("_local_tensor"), found.get("_spec")
    if not isinstance(local, StoredTensor) or not isinstance(spec, Record) or len(arguments) < 3:
        raise ValueError("no local tensor")
    mesh = spec.get("mesh")
    if not isinstance(mesh, Record):
        raise ValueError("no device mesh")
    sizes, coordinate = _mesh_sizes(mesh), _integers(mesh.get("_coordinate_on_dim"))
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list) or not len(placements) == len(sizes) == len(coordinate):
        raise ValueError("placements, mesh and coordinate do not go together")
    if any(not 0 <= at < size for at, size in zip(coordinate, sizes, strict=True)):
        raise ValueError("a coordinate outside the mesh")
    names = mesh.get("_mesh_dim_names") or mesh.get("mesh_dim_names") or ()
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError("mesh names")
    placed = tuple(_placement(p) for p in placements)
    _check_order(spec.get("shard_order"), placed)
    return DTensorShard(local, _integers(arguments[2]), placed, sizes, tuple(names), coordinate)


def _check_order(order: Any, placements: Sequence[Placement]) -> None:
    """Raise ValueError for an explicit order of cuts (torch 2.10 on) other than the placements' own, left to right."""
    for entry in order or ():
        dim, axes = entry.args if isinstance(entry, Record) and len(entry.args) == 2 else (None, None)
        if axes != tuple(i for i, p in enumerate(placements) if p.kind == "shard" and p.dim == dim):
            raise ValueError("an order of cuts that the placements do not tell")


def _mesh_sizes(mesh: Record) -> Shape:
    layout = mesh.get("_layout")
    if isinstance(layout, Record):
        axes = layout.get("axes")
        if isinstance(axes, tuple | list):
            sizes = tuple(_extent(axis.get("shape")) for axis in axes if isinstance(axis, Record))
        else:
            sizes = tuple(_extent(size) for size in layout.get("shape") or ())
    else:
        stored = mesh.get("mesh", mesh.get("_mesh"))
        if not isinstance(stored, StoredTensor):
            raise ValueError("no mesh sizes")
        sizes = stored.shape
    if not 0 < len(sizes) <= MAX_MESH_DIMS or not 0 < prod(sizes) <= MAX_MESH_SIZE:
        raise ValueError("an absurd mesh")
    return sizes


def _extent(size: Any) -> int:
    return prod(_integers(size)) if isinstance(size, tuple | list) else _integers((size,))[0]


def _placement(value: Any) -> Placement:
    name = (value.name if isinstance(value, Record | Global) else "").rpartition(".")[2]
    if name == "Replicate":
        return Placement("replicate")
    if name in ("Partial", "_Partial"):
        return Placement("partial")
    if name not in ("Shard", "_StridedShard") or not isinstance(value, Record):
        raise ValueError("an unknown placement")
    dim = _integers((value.get("dim", value.args[0] if value.args else None),))[0]
    split = _integers((value.get("split_factor"),))[0] if name == "_StridedShard" else None
    return Placement("shard", dim, split)


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > 64:
        raise ValueError("no list of whole numbers")
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError("no whole numbers")
    return tuple(values)
