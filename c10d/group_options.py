"""Options of process groups."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from ..torch_internals import DebugLevel, TorchBackend, default_timeout, get_debug_level
from .stores.base import Timeout, to_seconds

__all__ = ["GroupOptions"]


@final
@dataclass(kw_only=True, unsafe_hash=True)
class GroupOptions(TorchBackend.Options):
    """How a group behaves; given as `pg_options` to init_process_group and new_group.

    They are torch's options of a backend, so init_device_mesh takes them as `backend_override`. Once made, only
    `_timeout` can be changed, by which torch reads and sets the timeout.

    check_calls: check before every collective that all ranks call the same; None to do so if
        TORCH_DISTRIBUTED_DEBUG is DETAIL. It costs two round trips to the store each time.
    recorded: how many operations the flight recorder keeps.
    dump_folder: where the flight recorder is written when the group fails; None for nowhere.
    timeout: of operations, a timedelta or seconds, if the group is made with torch's default of 30 minutes.
    """

    check_calls: bool | None = None
    recorded: int = 2000
    dump_folder: Path | str | None = None
    timeout: Timeout | None = None

    def __post_init__(self) -> None:
        if self.recorded < 1:
            raise ValueError(f"recorded is {self.recorded}: the flight recorder keeps at least 1 operation")
        limit = default_timeout if self.timeout is None else timedelta(seconds=to_seconds(self.timeout))
        super().__init__("gradwire", limit)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"{name} of GroupOptions cannot be changed: make others")
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[..., "GroupOptions"], tuple[Any, ...]]:
        return _remake, ({each.name: getattr(self, each.name) for each in fields(self)}, self._timeout)

    def checks_calls(self) -> bool:
        """Are calls checked?"""
        if self.check_calls is not None:
            return self.check_calls
        return get_debug_level() == DebugLevel.DETAIL

    def timeout_instead_of(self, given: timedelta) -> timedelta:
        """How long operations of a group may take that is made with this timeout."""
        return self._timeout if given == default_timeout else given


def _remake(arguments: dict[str, Any], timeout: timedelta) -> GroupOptions:
    """A copy."""
    options = GroupOptions(**arguments)
    options._timeout = timeout
    return options
