"""One process as a member of a group whose ranks change: leaves its ranks, agrees on others, and forms the group.

A group keeps its ProcessGroup object, so that torch, DDP and others find the new ranks in it; each set of ranks
has a GroupCore of its own. The steps, which all members of the new group take together:

1. The old core ends: what is still in flight raises an error, and threads, sockets and memory are released.
2. The members agree on who is in the new group (c10d/reconfigure/round.py), unless the caller says who is.
3. They wait for each other at a StartBarrier: all raise the same error if one does not come.
4. The new core connects, with a failure detector and engines of its own.

After an error in 2, 3 or 4 the group has no ranks until a later attempt succeeds.
"""

import hashlib
import threading
import time
import uuid as uuids
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Final, final

import torch.distributed as dist

from ...errors import GradwireError, ProcessGroupError, UnsupportedOperationError
from ..reconfigure.handles import GroupHandle, parse_handles
from ..reconfigure.round import Arrival, ReconfigureRound
from ..rendezvous.start_barrier import Registration, StartBarrier
from ..stores.views import PrefixStore
from ..torch_types import TorchStore
from .core import GroupCore

__all__ = ["FormCore", "GroupMember"]

FormCore = Callable[[PrefixStore, int, tuple[int, ...], timedelta, float], GroupCore]
"""Makes a core and connects it, as all ranks do together. Takes the core's store, this process's rank, the global
ranks, the default timeout of operations, and the seconds that are left to connect."""


@final
class GroupMember:
    """One process's membership in one group. Owned by a ProcessGroup.

    store: of the group, whatever its ranks.
    core: that of the present ranks.
    generation: what the present ranks are called in the store; empty if there are none yet.
    cannot_reconfigure: why the group cannot be formed anew; empty if it can.
    """

    def __init__(
        self,
        store: TorchStore,
        core: GroupCore,
        form: FormCore,
        *,
        generation: str,
        cannot_reconfigure: str,
    ) -> None:
        self.store: Final = store
        self.core = core
        self.generation = generation
        self.cannot_reconfigure: Final = cannot_reconfigure
        self._form = form
        self._id = uuids.uuid4().hex
        self._used_uuids: set[int] = set()
        self._lock = threading.Lock()  # held while the group is formed anew

    def handle(self, *, is_default_group: bool) -> GroupHandle:
        """Returns the handle by which other members name this one."""
        in_default_group = not is_default_group and dist.is_initialized()
        return GroupHandle(
            member=self._id,
            rank=self.core.rank,
            global_rank=dist.get_rank() if in_default_group else -1,
        )

    def agree(
        self, handle: GroupHandle, *, min_size: int, max_size: int | None, window_s: float, timeout_s: float
    ) -> tuple[int, list[str]]:
        """Leaves the old ranks, and agrees on the new ones; see gradwire.c10d.rendezvous_reconfigure."""
        self._require_support()
        with self._lock:
            core = self.core
            core.leave_to_reconfigure()
            arrival = Arrival(
                handle=handle,
                generation=self.generation,
                size=max(core.size, 0),
                gone=tuple(core.lost_ranks),
            )
            rounds = ReconfigureRound(
                PrefixStore("reconfigure", self.store),
                arrival,
                min_size=min_size,
                max_size=max_size,
                window_s=window_s,
            )
            try:
                return rounds.run(timeout_s)
            except ProcessGroupError:
                raise
            except (GradwireError, RuntimeError) as error:
                raise _not_formed(core.rank, error) from error

    def reconfigure(self, key: str, texts: Collection[str], timeout_s: float) -> GroupCore:
        """Leaves the old ranks, and forms the group with these members; see gradwire.c10d.reconfigure.

        Args:
            key: what all members call this attempt.
            texts: the handles of the members; see `parse_handles` for their ranks.
            timeout_s: seconds that all of it may take.
        """
        self._require_support()
        handles = parse_handles(texts)
        rank = next((rank for rank, each in enumerate(handles) if each.member == self._id), None)
        if rank is None:
            raise ValueError("the handles lack that of this process: only the members of a group form it")
        deadline = time.monotonic() + timeout_s
        with self._lock:
            old = self.core
            old.leave_to_reconfigure()
            digest = hashlib.sha256(" ".join(each.member for each in handles).encode()).hexdigest()[:16]
            generation = f"{key}/{digest}"
            try:
                self._wait_for_all(generation, rank, len(handles), timeout_s)
                store = PrefixStore(f"ranks/{generation}", self.store)
                left_s = max(deadline - time.monotonic(), 0.001)
                core = self._form(store, rank, _global_ranks(handles), old.timeout, left_s)
            except UnsupportedOperationError:
                raise
            except (GradwireError, RuntimeError, OSError) as error:
                raise _not_formed(old.rank, error) from error
            core.replace(old)
            self.core = core
            self.generation = generation
            return core

    def use_uuid(self, uuid: int) -> None:
        """Marks a uuid as used. Raises ProcessGroupError if it has been used before."""
        if uuid in self._used_uuids:
            raise ProcessGroupError(f"uuid {uuid} was already used for this group: give another for each attempt")
        self._used_uuids.add(uuid)

    def _require_support(self) -> None:
        self.core.require_own_process()
        if self.cannot_reconfigure:
            raise UnsupportedOperationError(self.core.backend, "form groups anew", self.cannot_reconfigure)

    def _wait_for_all(self, generation: str, rank: int, size: int, timeout_s: float) -> None:
        store = PrefixStore(f"members/{generation}", self.store)
        try:
            barrier = StartBarrier(store, Registration(rank=rank, world_size=size))
            barrier.register()
            barrier.wait("", timeout_s)
        finally:
            with suppress(RuntimeError):
                store.close()


def _global_ranks(handles: Collection[GroupHandle]) -> tuple[int, ...]:
    """Returns the members' ranks in the default group, if they are in one, else in the new group."""
    ranks = tuple(each.global_rank for each in handles)
    return ranks if min(ranks) >= 0 and len(set(ranks)) == len(ranks) else tuple(range(len(ranks)))


def _not_formed(rank: int, error: Exception) -> ProcessGroupError:
    who = f"rank {rank} of the last group" if rank >= 0 else "this process"
    return ProcessGroupError(
        f"{who} could not form the group anew: {error}. Call reconfigure again on all members"
    )
