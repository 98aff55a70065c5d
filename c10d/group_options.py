"""Options of process groups."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from ..torch_internals import DebugLevel, get_debug_level

__all__ = ["GroupOptions"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How a group behaves; given as `pg_options` to init_process_group and new_group.

    check_calls: check before every collective that all ranks call the same; None to do so if
        TORCH_DISTRIBUTED_DEBUG is DETAIL. It costs two round trips to the store each time.
    recorded: how many operations the flight recorder keeps.
    dump_folder: where the flight recorder is written when the group fails; None for nowhere.
    """

    check_calls: bool | None = None
    recorded: int = 2000
    dump_folder: Path | str | None = None

    def __post_init__(self) -> None:
        if self.recorded < 1:
            raise ValueError(f"recorded is {self.recorded}: the flight recorder keeps at least 1 operation")

    def checks_calls(self) -> bool:
        """Are calls checked?"""
        if self.check_calls is not None:
            return self.check_calls
        return get_debug_level() == DebugLevel.DETAIL
