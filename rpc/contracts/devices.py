"""Devices and device maps: their types, checks of what users give, and the headers of messages."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ...proto.v1 import agent_pb2

__all__ = [
    "NO_DEVICES",
    "Device",
    "DeviceMap",
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
