"""Giving the device memory of tensors back for a while: their values wait in host memory, pinned beside a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Parking:
    """Tensors that come and go. A tensor, and whatever shares its memory, stays the same object throughout."""

    def __init__(self) -> None:
        # By the identity of the memory, which several storage objects may stand for.
        self._parked: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the values to host memory and free the tensors' own; what is parked stays so."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.copy_(_bytes(storage, tensor.device))
            self._parked[_identity(storage)] = (storage, host)
            storage.resize_(0)

    def restore(self) -> None:
        """Bring every parked tensor's values back to where they were."""
        for storage, host in self._parked.values():
            storage.resize_(host.numel())
            _bytes(storage, storage.device).copy_(host)
        self._parked = {}

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or while it is parked its values in host memory."""
        found = self._parked.get(_identity(tensor.untyped_storage()))
        if found is None:
            return tensor
        return found[1].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _identity(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
