"""What torch asks of the backend of a group. A gradwire group answers as its own backend, for all devices.

torch's own groups have one backend for each device, and torch.distributed looks for it when it splits groups,
connects devices early, or chooses the device for objects and barriers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend

from ...torch_internals import HAS_PYTHON_BACKENDS, BackendConfig
from .collectives import Collectives
from .torch_backend import GroupBackend

__all__ = ["BackendInterface"]


class BackendInterface(Collectives):
    """A group that is its own backend."""

    supports_splitting = True
    supports_coalescing = False  # by torch's calls around several operations; a list in one call is one operation
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False  # torch's name for it from 2.15 on

    expected_devices: Sequence[torch.device] = ()
    """The value of `_device_types` until torch has registered the group. torch reads it during a split."""

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices for which the group's configuration names engines."""
        try:
            configuration = dist.get_backend_config(self)
        except (TypeError, ValueError):
            return list(self.expected_devices)
        return [torch.device(name) for name in BackendConfig(Backend(configuration)).get_device_backend_map()]

    @cached_property
    def as_backend(self) -> GroupBackend:
        """The group as a torch Backend, which exists from torch 2.14 on."""
        return GroupBackend(self)

    def _get_backend(self, device: torch.device | str) -> Any:
        """Returns the backend of a device: this group; or from torch 2.14 on, which passes it to C++, its Backend.

        Raises:
            RuntimeError: the group's configuration names no engine for the device.
        """
        types = [each.type for each in self._device_types]
        if types and torch.device(device).type not in types:
            raise RuntimeError(f"the group has no backend for {device}, only for {', '.join(types)}")
        return self.as_backend if HAS_PYTHON_BACKENDS else self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Stores the device of this rank. Engines connect with the first operation."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: torch calls it on ranks outside a split, which gradwire does not need."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the flight recorder counts collectives."""

    def _has_hooks(self) -> bool:
        """Returns False: hooks on completed Works exist in torch for NCCL only."""
        return False

    @property  # type: ignore[misc]  # torch's can be set
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        """Whether symmetric memory exchanges its handles by collectives: False, it uses the store."""
        return False
