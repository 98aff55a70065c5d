"""The contract of what moves the bytes of tensors on CUDA devices.

The channel needs little of CUDA, and this is all of it. So the channel is tested without a GPU, on a runtime that
has its devices in host memory, and shares that between processes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ...contracts.devices import StartedCopy

__all__ = ["DeviceError", "DeviceRuntime", "ExportedMemory", "MappedMemory"]


class DeviceError(RuntimeError):
    """A device cannot do what is asked of it. The bytes have to go by way of host memory."""


class ExportedMemory(Protocol):
    """Memory of a device that this process has allocated for others to map. Used by one thread at a time."""

    handle: bytes
    """With which another process maps it."""

    def fill(self, elements: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Has the device copy elements into the memory, as they are at this point of the current stream.

        Returns at once. They may be changed by what is queued on the current stream from now on. The process that
        has mapped the memory reads it after these copies.

        Args:
            elements: tensors of uint8 with one dimension, and where each begins, in bytes.

        Raises:
            RuntimeError: the device has failed.
        """

    def free(self) -> None:
        """Frees the memory, when the last copy into it is complete. Waits for that."""


class MappedMemory(Protocol):
    """Memory of a device that another process has allocated. Used by one thread at a time."""

    def copy_to(self, target: torch.Tensor, offset: int) -> StartedCopy:
        """Has the device copy a part of the memory to a tensor, as the owner has filled it last.

        Args:
            target: a tensor of uint8 with one dimension on a CUDA device.
            offset: where the part begins, in bytes. It ends within the memory.
        """

    def close(self) -> None:
        """Unmaps the memory. Called when no copy from it is in flight."""


class DeviceRuntime(Protocol):
    """The CUDA devices of this process. Safe to use from any thread."""

    def uuid(self, device: torch.device) -> str:
        """Returns what identifies a device in all processes, whatever its index is there. Raises DeviceError."""

    def find(self, uuid: str) -> torch.device | None:
        """Returns the device with this UUID, if this process can see it."""

    def is_idle(self, device: torch.device) -> bool:
        """Returns whether the current stream of a device has done all that it is to do. Raises RuntimeError."""

    def export(self, device: torch.device, nbytes: int) -> ExportedMemory:
        """Allocates memory that other processes can map.

        Raises:
            DeviceError: there is no memory, or the device cannot share it.
        """

    def open(self, device: torch.device, handle: bytes, nbytes: int) -> MappedMemory:
        """Maps memory of another process.

        Args:
            device: a device of this process that shall read the memory: the one that it belongs to, if this
                process can see that, else a peer of it.
            handle: what the other process has exported. It is not trusted.
            nbytes: of the memory.

        Raises:
            DeviceError: the device cannot map it, or it is smaller.
        """

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Returns a tensor of uint8 with one dimension in ordinary memory of a device. Raises RuntimeError."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Returns one in page-locked memory of the host, which devices copy from and to by themselves."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> StartedCopy:
        """Has a device copy a tensor of uint8 from the host or to it, after what its current stream has queued.

        The tensors must be kept until the copy is complete.
        """
