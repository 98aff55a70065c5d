"""Publishes the device maps of a worker to its group, and checks those of all members."""

from collections.abc import Mapping, Sequence

import torch

from ...errors import DeviceMapError
from ..contracts.devices import DeviceMap
from ..contracts.member import Member

__all__ = ["check_device_maps", "device_maps_as_text"]


def device_maps_as_text(device_maps: Mapping[str, DeviceMap]) -> dict[str, dict[str, str]]:
    """Returns a worker's device maps with the names of devices, as members exchange them."""
    return {
        to: {str(device): str(target) for device, target in device_map.items()}
        for to, device_map in device_maps.items()
    }


def check_device_maps(members: Sequence[Member], group: Sequence[Member], *, dynamic: bool = False) -> None:
    """Checks that device maps name workers and CUDA devices that exist.

    All workers that check the same members raise the same error.

    Args:
        members: those whose device maps are checked.
        group: all members.
        dynamic: whether the group is dynamic. Then a device map may name a worker that has not joined yet.

    Raises:
        DeviceMapError: a device map names a worker that is not in the group, or a device that a worker lacks.
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
