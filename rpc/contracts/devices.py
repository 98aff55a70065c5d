"""Device maps, as users give them and as messages carry them, and contracts of payloads for CUDA devices."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ...proto.v1 import agent_pb2

__all__ = [
    "NO_DEVICES",
    "Device",
    "DeviceBuffer",
    "DeviceMap",
    "DeviceReader",
    "DeviceWriter",
    "StartedCopy",
    "checked_device_map",
    "checked_device_maps",
    "checked_devices",
    "device_map_of_answer",
    "device_map_to_proto",
]

Device = int | str | torch.device
"""A device as users name it. An int is the index of a CUDA device."""

DeviceMap = Mapping[Device, Device]
"""From devices of the sender to devices of the receiver."""

NO_DEVICES: DeviceMap = MappingProxyType({})
"""The empty device map: only CPU tensors can be sent."""


def checked_device_map(device_map: Mapping[Device, Device]) -> dict[Device, Device]:
    """Returns the device map with devices in place of their names."""
    found: dict[Device, Device] = {}
    sources: dict[torch.device, torch.device] = {}
    for device, target in ((_device(d), _device(t)) for d, t in device_map.items()):
        if target in sources:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {device} and {sources[target]} to {target}"
            )
        found[device], sources[target] = target, device
    return found


def checked_device_maps(value: Any) -> dict[str, dict[Device, Device]]:
    """Returns the device maps of several workers with devices in place of their names."""
    return {to: checked_device_map(device_map) for to, device_map in (value or {}).items()}


def checked_devices(value: Any) -> list[torch.device]:
    """Returns CUDA devices in place of their names. Raises ValueError if one is another device."""
    devices = [_device(device) for device in value or ()]
    for device in devices:
        if device.type != "cuda":
            raise ValueError(
                f"`set_devices` expect a list of CUDA devices, but got device type {device.type}: CPU tensors "
                "need no setting"
            )
    return devices


def device_map_to_proto(device_map: DeviceMap) -> list[agent_pb2.DeviceMapping]:
    """Returns a device map in the form of a request's header."""
    return [agent_pb2.DeviceMapping(here=str(here), there=str(there)) for here, there in device_map.items()]


def device_map_of_answer(mappings: Iterable[agent_pb2.DeviceMapping]) -> DeviceMap:
    """Returns the device map for the answer to a request with this header: the inverse of the request's."""
    return {torch.device(mapping.there): torch.device(mapping.here) for mapping in mappings} or NO_DEVICES


def _device(name: Device) -> torch.device:
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


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
