"""What encoding needs of the channels in order to send and receive tensors on CUDA devices."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ...proto.v1 import agent_pb2

__all__ = ["DeviceBuffer", "DeviceReader", "DeviceWriter", "StartedCopy"]


class DeviceBuffer(Protocol):
    """A payload that has arrived in memory which a device of this worker can read."""

    def __len__(self) -> int:
        """Returns its bytes."""

    def copy_to(self, target: torch.Tensor) -> "StartedCopy":
        """Starts to copy it into a tensor of as many bytes on a CUDA device."""


class StartedCopy(Protocol):
    """A copy that a device makes."""

    def is_complete(self) -> bool:
        """Returns whether the copy is complete. Raises RuntimeError if the device has failed."""

    def wait(self) -> None:
        """Waits until the copy is complete. Raises RuntimeError if the device has failed."""


class DeviceWriter(Protocol):
    """Sends the elements of the CUDA tensors of one message. They are tensors of uint8 with one dimension."""

    def put_on_device(
        self, elements: Sequence[torch.Tensor], target: torch.device
    ) -> Sequence[agent_pb2.Payload] | None:
        """Sends elements by way of device memory, as they are at this point of the current stream.

        They are those of all tensors of the message that go from one device to the same device of the receiver.
        Returns the descriptions of the payloads; None if they have to be sent by way of the host.
        """

    def to_host(self, elements: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies in the memory of the host, as they are at this point of the current streams. Waits."""


class DeviceReader(Protocol):
    """Brings the elements of received tensors to CUDA devices."""

    def to_device(
        self, source: torch.Tensor | DeviceBuffer, device: torch.device
    ) -> tuple[torch.Tensor, StartedCopy]:
        """Starts to copy elements in the memory of the host or of a device to a CUDA device of this worker.

        Returns a tensor of uint8 and one dimension, as the source is, and the copy, after which it has the
        elements.
        """

    def wait(self, copies: Sequence[StartedCopy]) -> None:
        """Waits until copies are complete; the elements can then be used on any stream. Raises RuntimeError."""
