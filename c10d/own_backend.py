"""What torch asks of the backend of a group. A gradwire group is its own, for all devices.

torch's groups consist of one backend for each device, and torch.distributed looks for those where it splits
groups, connects devices early, or picks the device for objects and barriers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend

from ..torch_internals import HAS_PYTHON_BACKENDS, BackendConfig
from .collectives import Collectives
from .group_backend import GroupBackend

__all__ = ["OwnBackend"]


class OwnBackend(Collectives):
    """A group that answers as its backend."""

    supports_splitting = True
    supports_coalescing = False  # by torch's calls around others; what is given as a list goes as one anyway
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False  # as torch calls it from 2.15 on

    expected_devices: Sequence[torch.device] = ()
    """What `_device_types` are as long as torch does not know the group. torch asks for those of a part."""

    @property
    def _device_types(self) -> list[torch.device]:
        """Those that the group's configuration has engines for."""
        try:
            configuration = dist.get_backend_config(self)
        except (TypeError, ValueError):
            return list(self.expected_devices)
        return [torch.device(name) for name in BackendConfig(Backend(configuration)).get_device_backend_map()]

    @cached_property
    def as_backend(self) -> GroupBackend:
        """Itself as a Backend, from torch 2.14 on."""
        return GroupBackend(self)

    def _get_backend(self, device: torch.device | str) -> Any:
        """The backend of a device: itself, from torch 2.14 on as a Backend, which torch hands to its C++."""
        types = [each.type for each in self._device_types]
        if types and torch.device(device).type not in types:
            raise RuntimeError(f"the group has no backend for {device}, only for {', '.join(types)}")
        return self.as_backend if HAS_PYTHON_BACKENDS else self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Remembers the device of this rank. Engines connect with the first operation."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """On ranks that are in no part of a split: nothing, as parts are made by their own ranks."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: gradwire counts for itself."""

    def _has_hooks(self) -> bool:
        """Has anybody registered what is to be called when works are over? That is NCCL's alone in torch."""
        return False

    @property  # type: ignore[misc]  # torch's can be set
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        """Does symmetric memory meet through this group? Through its store, as with most of torch's own."""
        return False
