"""Groups that shrink and grow: processes form a group anew without restarting, after a death or to let more in.

The names and their meaning are those of torch 2.14's `torch.distributed._reconfigure` and related functions. These
work on every torch that gradwire supports; from 2.14 on torch's own functions work, too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from ..stores.base import Timeout, to_seconds
from ..torch_types import TorchProcessGroup, TorchWork
from .process_group import ProcessGroup, require_no_hints

__all__ = [
    "ReconfigureOptions",
    "get_reconfigure_handle",
    "reconfigure",
    "rendezvous_reconfigure",
    "supports_reconfigure",
]

DEFAULT_WINDOW_S = 10.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigureOptions:
    """Options of `ProcessGroup.reconfigure`, under torch 2.14's names. torch's own are accepted in the same place.

    uuid: a number that all members give, and that no earlier attempt of theirs had.
    handles: the handles of all members. A list assigns ranks by position. In a set, members keep the order of
        their last ranks, and newcomers come after them.
    timeout: of the attempt; the group's timeout if None.
    hints: must be empty: gradwire's engines have none.
    """

    uuid: int
    handles: Collection[str]
    timeout: timedelta | None = None
    hints: Mapping[str, str] = field(default_factory=dict)


def supports_reconfigure(group: TorchProcessGroup | None = None) -> bool:
    """Returns whether `reconfigure` can form a group anew: on gradwire's engines, except for MPI.

    Args:
        group: the default group if None.
    """
    return bool(getattr(_group(group), "supports_reconfigure", False))


def get_reconfigure_handle(group: TorchProcessGroup | None = None) -> str:
    """Returns the text by which the other members name this process in `reconfigure`.

    It has this process's last rank in the group, so get it again after a group was formed.

    Args:
        group: the default group if None.
    """
    return str(_require(group).get_reconfigure_handle())


def rendezvous_reconfigure(
    group: TorchProcessGroup | None = None,
    timeout: Timeout | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    window: Timeout = DEFAULT_WINDOW_S,
) -> tuple[int, list[str]]:
    """Leaves the group's ranks, and agrees through the group's store with all who call this on the new ones.

    The members are settled as soon as there are `min_size`, and all ranks of the last group have called it whose
    processes are not known to have died; or nobody else has called it for `window`. Then who comes later waits for
    the next agreement.

    Args:
        group: the default group if None.
        timeout: a timedelta or seconds; the group's timeout if None.
        min_size: members that the group needs. By default 1; 2 for a process that had no rank in the last group.
        max_size: members that are enough, whoever is missing. No limit by default.
        window: a timedelta or seconds.

    Returns:
        The number and the handles to give to `reconfigure`. Members of the last group keep the order of their
        ranks; newcomers come after them, in the order in which they have called.

    Raises:
        ProcessGroupError: not enough members came in time, or the store failed. It may be called again.
        UnsupportedOperationError: the engine cannot form a group anew.
        ValueError: `min_size` or `max_size` is less than 1, or `max_size` less than `min_size`.
    """
    return _require(group).rendezvous_reconfigure(
        timeout=timeout, min_size=min_size, max_size=max_size, window=window
    )


def reconfigure(
    uuid: int | None = None,
    handles: Collection[str] | None = None,
    group: TorchProcessGroup | None = None,
    timeout: Timeout | None = None,
    hints: Mapping[str, str] | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    window: Timeout = DEFAULT_WINDOW_S,
) -> TorchWork:
    """Forms a group anew in the processes that call this together: after a rank died, or to let newcomers in.

    The group object stays the same, with new ranks. Operations of the old ranks that are in flight end first: with
    RankLostError after a death, else with GroupAbortedError here and RankLostError on ranks that still wait for
    this one. Newcomers are processes whose group was made with `enable_reconfigure`.

    With `uuid` and `handles` it means what torch 2.14's function does. Without them the members agree by
    `rendezvous_reconfigure`.

    Args:
        uuid: a number that all members give, and that no earlier attempt of theirs had.
        handles: the handles of all members. A list assigns ranks by position. In a set, members keep the order of
            their last ranks, and newcomers come after them.
        group: the default group if None.
        timeout: a timedelta or seconds for each of the two steps; the group's timeout if None.
        hints: must be empty.
        min_size: see rendezvous_reconfigure.
        max_size: see rendezvous_reconfigure.
        window: see rendezvous_reconfigure.

    Returns:
        A Work that is completed: errors are raised here.

    Raises:
        ProcessGroupError: the group did not form in time, or `uuid` was already used. It may be called again, on
            all members.
        UnsupportedOperationError: the engine cannot form a group anew.
        ValueError: only one of `uuid` and `handles` is given, or an argument is not valid.
    """
    found = _require(group)
    if (uuid is None) != (handles is None):
        raise ValueError("only one of uuid and handles is given: give both, or neither to agree through the store")
    if uuid is None or handles is None:
        require_no_hints(hints or {})
        number, agreed = found.rendezvous_reconfigure(
            timeout=timeout, min_size=min_size, max_size=max_size, window=window
        )
        return found.form_anew(f"round/{number}", agreed, timeout)
    seconds = None if timeout is None else timedelta(seconds=to_seconds(timeout))
    return found.reconfigure(ReconfigureOptions(uuid=uuid, handles=handles, timeout=seconds, hints=hints or {}))


def _group(group: TorchProcessGroup | None) -> Any:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no default group: call init_process_group first")
    return found


def _require(group: TorchProcessGroup | None) -> ProcessGroup:
    found = _group(group)
    if not isinstance(found, ProcessGroup):
        raise ValueError(f"{found!r} is not a gradwire group: only those can be formed anew here")
    return found
