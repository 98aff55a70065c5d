"""Options of process groups."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from ...torch_internals import DebugLevel, TorchBackend, default_timeout, get_debug_level
from ..stores.base import Timeout, to_seconds

__all__ = ["GroupOptions"]


@final
@dataclass(kw_only=True, unsafe_hash=True)
class GroupOptions(TorchBackend.Options):
    """Options of a group, given as `pg_options` to init_process_group and new_group.

    They are torch's Backend.Options, so init_device_mesh accepts them as `backend_override`. They cannot be
    changed, except for `_timeout`, by which torch reads and sets the timeout.

    check_calls: before every collective, check that all ranks call the same one. None: only if
        TORCH_DISTRIBUTED_DEBUG is DETAIL. The check takes two round trips to the store.
    flight_recorder_size: number of operations that the flight recorder keeps.
    dump_folder: folder to which the flight recorder is written when the group fails; None not to write it.
    timeout: default timeout of operations, a timedelta or seconds. It applies to a group that is made with torch's
        default timeout of 30 minutes.
    enable_reconfigure: make the group without ranks; it gets them from `reconfigure`. torch 2.14's
        init_process_group has an argument of this name and meaning.
    """

    check_calls: bool | None = None
    flight_recorder_size: int = 2000
    dump_folder: Path | str | None = None
    timeout: Timeout | None = None
    enable_reconfigure: bool = False

    def __post_init__(self) -> None:
        if self.flight_recorder_size < 1:
            raise ValueError(f"flight_recorder_size is {self.flight_recorder_size}: keep at least 1 operation")
        limit = default_timeout if self.timeout is None else timedelta(seconds=to_seconds(self.timeout))
        super().__init__("gradwire", limit)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"{name} of GroupOptions cannot be changed: make new GroupOptions")
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[..., "GroupOptions"], tuple[Any, ...]]:
        return _rebuild, ({each.name: getattr(self, each.name) for each in fields(self)}, self._timeout)

    def with_reconfigure(self, *, enabled: bool) -> "GroupOptions":
        """Returns these options with this value of `enable_reconfigure`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _rebuild({**values, "enable_reconfigure": enabled}, self._timeout)

    def should_check_calls(self) -> bool:
        """Returns whether to check that all ranks call the same collectives."""
        if self.check_calls is not None:
            return self.check_calls
        return get_debug_level() == DebugLevel.DETAIL

    def effective_timeout(self, group_timeout: timedelta) -> timedelta:
        """Returns the default timeout of operations of a group that is made with `group_timeout`."""
        return self._timeout if group_timeout == default_timeout else group_timeout


def _rebuild(arguments: dict[str, Any], timeout: timedelta) -> GroupOptions:
    options = GroupOptions(**arguments)
    options._timeout = timeout
    return options
