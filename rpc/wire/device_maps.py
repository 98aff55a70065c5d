"""Device maps in the headers of messages."""

from collections.abc import Iterable

import torch

from ...proto.v1 import agent_pb2
from ..contracts.devices import NO_DEVICES, DeviceMap

__all__ = ["device_map_of_answer", "device_map_to_proto"]


def device_map_to_proto(device_map: DeviceMap) -> list[agent_pb2.DeviceMapping]:
    """Returns a device map in the form of a request's header."""
    return [agent_pb2.DeviceMapping(here=str(here), there=str(there)) for here, there in device_map.items()]


def device_map_of_answer(mappings: Iterable[agent_pb2.DeviceMapping]) -> DeviceMap:
    """Returns the device map for the answer to a request with this header: the inverse of the request's."""
    return {torch.device(mapping.there): torch.device(mapping.here) for mapping in mappings} or NO_DEVICES
