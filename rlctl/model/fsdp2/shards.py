"""Parameters cut over ranks: this rank's part of each, and whole tensors put together and taken apart one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

DATA, TENSOR = "fsdp", "tp"


class Shards:
    """The parameters of a sharded model.

    FSDP2 cuts dimension 0 of what tensor parallelism left of a parameter, as ``torch.chunk`` would.

    Args:
        parameters: by transformers name, all sharded.
        mesh: dimensions ``fsdp`` and ``tp``.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh) -> None:
        self.parameters = dict(parameters)
        self.mesh = mesh
        self.rank, self.size = mesh.get_local_rank(DATA), mesh.size(0)
        self.tp_rank, self.tp_size = mesh.get_local_rank(TENSOR), mesh.size(1)

    def names(self) -> list[str]:
        """Return the parameters' names, in the model's order."""
        return list(self.parameters)

    def shape(self, name: str) -> torch.Size:
        """Return the whole parameter's shape."""
        return self.parameters[name].shape

    def local(self, name: str) -> torch.Tensor:
        """Return this rank's part of a parameter, sharing memory with it."""
        return local_of(self.parameters[name])

    def locals(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of every parameter."""
        for name in self.parameters:
            yield self.local(name)

    def trained(self) -> list[str]:
        """Return the names of the parameters that are trained, in the model's order."""
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    def counts_here(self, name: str) -> bool:
        """Whether this rank's part is counted in a sum over all ranks: of equal copies one is."""
        return self._tensor_dim(name) is not None or self.tp_rank == 0

    def gather(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of which each rank gives its ``part``, cut as parameter ``name`` is.

        All ranks call it, in one order. Bytes travel, so values of any dtype arrive as they are.
        """
        rows = self._rows(name)
        most = -(-rows // self.size)
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: part.shape[0]] = part
        whole = _all_gather(padded, self.mesh.get_group(DATA), self.size).flatten(0, 1)[:rows]
        dim = self._tensor_dim(name)
        if dim is None:
            return whole
        return torch.cat(list(_all_gather(whole, self.mesh.get_group(TENSOR), self.tp_size)), dim)

    def scatter(self, name: str, whole: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of a tensor that rank 0 has whole (``whole`` is not looked at on the others)."""
        parameter = self.parameters[name]
        device = self.local(name).device
        if dist.get_rank() == 0:
            assert whole is not None and whole.shape == parameter.shape, (name, parameter.shape)
            full = whole.detach().to(device, parameter.dtype).contiguous()
        else:
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        dist.broadcast(full, 0)
        dim = self._tensor_dim(name)
        if dim is not None:
            full = full.chunk(self.tp_size, dim)[self.tp_rank]
        parts = full.chunk(self.size)
        return parts[self.rank] if self.rank < len(parts) else full[:0]

    def _tensor_dim(self, name: str) -> int | None:
        """Return the dimension along which tensor parallelism cuts a parameter; None when it does not."""
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh.ndim == 1:
            return None
        placement = parameter.placements[1]
        return placement.dim if isinstance(placement, Shard) else None

    def _rows(self, name: str) -> int:
        rows = self.shape(name)[0]
        return rows // self.tp_size if self._tensor_dim(name) == 0 else rows


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, sharing memory with it."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def _all_gather(part: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
    """Return the parts of all ranks of ``group``, stacked: (size, *part.shape)."""
    part = part.contiguous()
    if size == 1:
        return part[None]
    found = part.new_empty((size, *part.shape))
    if part.numel():
        places = [place.reshape(-1).view(torch.uint8) for place in found]
        dist.all_gather(places, part.reshape(-1).view(torch.uint8), group=group)
    return found
