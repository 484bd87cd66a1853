"""The memory of a ring's slots, and how it comes to another process: a file of shared memory, or a CUDA handle."""

from __future__ import annotations

import mmap
from typing import Protocol

import msgspec
import torch

from rlctl.errors import UnavailableError
from rlctl.sync.buckets import allocate
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.device_handle import DeviceHandle, contiguous_blocks, open_handle
from rlctl.sync.shared_memory import Segment
from rlctl.sync.tensor_meta import Size


class RingMemory(Protocol):
    """Equal slots that several processes see."""

    slots: list[torch.Tensor]

    def hand_over(self, channel: Channel, deadline: Deadline) -> None:
        """Let the process at the other end of a unix socket see them: it calls ``receive_slots``."""

    def settle(self) -> None:
        """Return when what this process has begun to do with a slot is done, so that another may touch it."""

    def close(self) -> None:
        """Give them up."""


class _Geometry(msgspec.Struct, frozen=True, array_like=True):
    slots: Size
    slot_nbytes: Size
    stride: Size
    device: DeviceHandle | None = None

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [memory[i * self.stride : i * self.stride + self.slot_nbytes] for i in range(self.slots)]


class HostSlots:
    """Slots in a nameless segment."""

    def __init__(self, segment: Segment, geometry: _Geometry) -> None:
        self.segment = segment
        self._geometry = geometry
        self.slots = geometry.cut(segment.memory)

    def hand_over(self, channel: Channel, deadline: Deadline) -> None:
        """See RingMemory."""
        channel.send(msgspec.msgpack.encode(self._geometry), deadline)
        channel.send_fd(self.segment.fd, deadline)

    def settle(self) -> None:
        """See RingMemory. A processor's stores are done when they return."""

    def close(self) -> None:
        """See RingMemory."""
        self.slots = []
        self.segment.close()


class DeviceSlots:
    """Slots in a CUDA device's memory. Both sides wait for their stream before a slot changes hands: a message must
    not overtake the kernels that it speaks of."""

    def __init__(self, memory: torch.Tensor, geometry: _Geometry) -> None:
        self._memory = memory
        self._geometry = geometry
        self.slots = geometry.cut(memory)

    def hand_over(self, channel: Channel, deadline: Deadline) -> None:
        """See RingMemory. A handle for each receiver, since each counts its references."""
        geometry = msgspec.structs.replace(self._geometry, device=DeviceHandle.of(self._memory))
        channel.send(msgspec.msgpack.encode(geometry), deadline)

    def settle(self) -> None:
        """See RingMemory."""
        torch.cuda.current_stream(self._memory.device).synchronize()

    def close(self) -> None:
        """See RingMemory. CUDA keeps the memory until the other side has let it go, too."""
        self.slots = []
        del self._memory


def host_slots(slots: int, slot_nbytes: int) -> HostSlots:
    """Return fresh slots in shared memory, each page of its own."""
    stride = -(-slot_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return HostSlots(Segment.create(stride * slots, label="ring"), _Geometry(slots, slot_nbytes, stride))


def device_slots(slots: int, slot_nbytes: int, device: str | torch.device) -> DeviceSlots:
    """Return fresh slots on a CUDA device, one allocation and so one handle for all."""
    if torch.device(device).type != "cuda":
        raise UnavailableError(
            f"memory of device {device} cannot be handed to another process", fix="device cpu or cuda"
        )
    torch.cuda.ipc_collect()  # what earlier slots' receivers have let go meanwhile
    with contiguous_blocks():
        memory = allocate(slot_nbytes * slots, device)
    return DeviceSlots(memory, _Geometry(slots, slot_nbytes, slot_nbytes))


def slots_on(device: str, slots: int, slot_nbytes: int) -> RingMemory:
    """Return fresh slots where an engine's buckets are: on its ``device``, or in memory of this node."""
    return host_slots(slots, slot_nbytes) if device == "cpu" else device_slots(slots, slot_nbytes, device)


def receive_slots(channel: Channel, deadline: Deadline) -> HostSlots | DeviceSlots:
    """Return the slots that the other side hands over."""
    geometry = msgspec.msgpack.decode(channel.receive(deadline, limit=4096), type=_Geometry)
    if geometry.device is not None:
        return DeviceSlots(open_handle(geometry.device, geometry.slots * geometry.stride), geometry)
    nbytes = geometry.slots * geometry.stride
    return HostSlots(Segment.attach(channel.receive_fd(deadline), nbytes), geometry)
