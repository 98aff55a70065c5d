"""Types for devices and device maps."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

__all__ = ["NO_DEVICES", "Device", "DeviceMap"]

Device = int | str | torch.device
"""A device as users name it. An int is the index of a CUDA device."""

DeviceMap = Mapping[Device, Device]
"""From devices of the sender to devices of the receiver."""

NO_DEVICES: DeviceMap = MappingProxyType({})
"""The empty device map: only CPU tensors can be sent."""
