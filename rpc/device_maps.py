"""Which devices the tensors of a call come from, and go to."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from ..errors import DeviceMapError
from ..proto.v1 import agent_pb2
from .membership import Member
from .options import Device

__all__ = [
    "NO_DEVICES",
    "DeviceMap",
    "check_device_maps",
    "device_map_of_answer",
    "device_map_to_proto",
    "device_maps_as_text",
]

DeviceMap = Mapping[Device, Device]

NO_DEVICES: DeviceMap = MappingProxyType({})


def device_maps_as_text(device_maps: Mapping[str, DeviceMap]) -> dict[str, dict[str, str]]:
    """A worker's device maps as other members see them."""
    return {
        to: {str(device): str(target) for device, target in device_map.items()}
        for to, device_map in device_maps.items()
    }


def check_device_maps(members: Sequence[Member], group: Sequence[Member], *, dynamic: bool = False) -> None:
    """Checks the device maps of members against their group; to a dynamic one, others may come later.

    The first mistake is the same on all workers that check the same members.

    Raises:
        DeviceMapError: they name a worker that is not in the group, or devices that are not there.
    """
    counts = {member.info.name: member.device_count for member in group}
    for member in members:
        for to, device_map in member.device_maps.items():
            if to not in counts and not dynamic:
                raise DeviceMapError(
                    f"Node {member.info.name} has invalid target node names in its device maps: {to!r} is not one "
                    f"of {', '.join(counts)}"
                )
            for side, worker, devices in (
                ("source", member.info.name, device_map.keys()),
                ("target", to, device_map.values()),
            ):
                for device in map(torch.device, devices):
                    if device.type == "cuda" and worker in counts and device.index >= counts[worker]:
                        raise DeviceMapError(
                            f"Node {member.info.name} has {side} devices with invalid indices in its device map "
                            f"for {to}: {worker} has no {device}, it has {counts[worker]} CUDA devices"
                        )


def device_map_to_proto(device_map: DeviceMap) -> list[agent_pb2.DeviceMapping]:
    """As messages."""
    return [agent_pb2.DeviceMapping(here=str(here), there=str(there)) for here, there in device_map.items()]


def device_map_of_answer(mappings: Iterable[agent_pb2.DeviceMapping]) -> DeviceMap:
    """The map for the answer to a request that came with these: the other way round."""
    return {torch.device(mapping.there): torch.device(mapping.here) for mapping in mappings} or NO_DEVICES
