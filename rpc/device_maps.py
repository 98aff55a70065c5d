"""Which devices the tensors of a call come from, and go to."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from ..errors import RendezvousError
from ..proto.v1 import agent_pb2
from .membership import Member
from .options import Device
from .worker import WorkerInfo

__all__ = ["NO_DEVICES", "DeviceMap", "check_device_maps", "device_map_of_answer", "device_map_to_proto"]

DeviceMap = Mapping[Device, Device]

NO_DEVICES: DeviceMap = MappingProxyType({})


def check_device_maps(
    me: WorkerInfo,
    device_maps: Mapping[str, Mapping[Device, Device]],
    members: Sequence[Member],
    *,
    dynamic: bool = False,
) -> None:
    """Checks a worker's device maps against its group; of a dynamic one, who is not there yet may come later.

    Raises:
        RendezvousError: they name a worker that is not in the group, or devices that are not there.
    """
    counts = {member.info.name: member.device_count for member in members}
    for to, device_map in device_maps.items():
        if to not in counts and not dynamic:
            raise RendezvousError(
                f"Node {me.name} has invalid target node names in its device maps: {to!r} is not one of "
                f"{', '.join(counts)}"
            )
        for device, target in device_map.items():
            named = ((me.name, "source", torch.device(device)), (to, "target", torch.device(target)))
            for worker, side, each in named:
                if each.type == "cuda" and worker in counts and each.index >= counts[worker]:
                    raise RendezvousError(
                        f"Node {me.name} has unexpected {side} devices in its device map for {to}: {worker} has "
                        f"no {each}, it has {counts[worker]} CUDA devices"
                    )


def device_map_to_proto(device_map: DeviceMap) -> list[agent_pb2.DeviceMapping]:
    """As messages."""
    return [agent_pb2.DeviceMapping(here=str(here), there=str(there)) for here, there in device_map.items()]


def device_map_of_answer(mappings: Iterable[agent_pb2.DeviceMapping]) -> DeviceMap:
    """The map for the answer to a request that came with these: the other way round."""
    return {torch.device(mapping.there): torch.device(mapping.here) for mapping in mappings} or NO_DEVICES
