"""Forming a group of workers on an engine without torch.distributed, and one worker's membership in it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

from ...errors import GroupAbortedError
from ..engines.base import Engine, Setup
from ..stores.views import PrefixStore
from ..torch_types import TorchStore
from .backends import best_engine

__all__ = ["FORM_TIMEOUT_S", "LEAVE_TIMEOUT_S", "GroupMembership", "GroupSpec"]

FORM_TIMEOUT_S = 10.0
"""Seconds within which all members must have joined."""

LEAVE_TIMEOUT_S = 2.0
"""Seconds that the owner of a group waits for the group's threads when it closes the group."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Which workers form a group, and the store through which they find each other.

    store: shared by all workers. The group uses a clone, since one store of torch's serves one thread at a time.
    name: of the group, unique in the store.
    members: the workers' ids, in the order of their ranks in the group; `me` is this worker's.
    insecure: whether this worker allows connections to other hosts without credentials.
    """

    store: TorchStore
    name: str
    members: Sequence[int]
    me: int
    insecure: bool = False


@final
class GroupMembership:
    """One worker's membership in a group: `join` once, then `leave` from any thread, then `release`."""

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._store: PrefixStore | None = None
        self.error: Exception | None = None
        """The error with which this worker has left the group; None if it has not left."""

    def join(self) -> Engine:
        """Joins the group together with the other members, and returns its engine.

        Raises the error that keeps the group from forming, or with which this worker has left meanwhile.
        """
        spec = self._spec
        with PrefixStore(spec.name, spec.store) as shared:
            store = shared.clone()
        try:
            store.set_timeout(timedelta(seconds=FORM_TIMEOUT_S))
            with self._lock:
                self._raise_if_left()
                self._store = store
            engine: Engine = best_engine(
                Setup(
                    store=store,
                    rank=spec.members.index(spec.me),
                    size=len(spec.members),
                    timeout=FORM_TIMEOUT_S,
                    device_type="cpu",
                    global_ranks=tuple(spec.members),
                    group_name=spec.name,
                    insecure=spec.insecure,
                )
            )
        finally:
            store.close()
        with self._lock:
            self._engine = engine
            self._raise_if_left()
        return engine

    def leave(self) -> None:
        """Leaves the group without waiting: operations in flight fail, and the others notice. Keeps the engine."""
        with self._lock:
            if self.error is None:
                self.error = GroupAbortedError(f"worker {self._spec.me} has left the group {self._spec.name}")
                if self._engine is not None:
                    self._engine.fail(self.error)

    def cancel_join(self) -> None:
        """Makes a `join` that waits for other members fail."""
        if (store := self._store) is not None:
            store.close()

    def release(self, error: Exception | None = None) -> None:
        """Leaves the group, with an error if there is one, and closes its engine, which no thread may be using."""
        with self._lock:
            engine, self._engine = self._engine, None
            self.error = self.error or error or GroupAbortedError(f"the group {self._spec.name} has ended")
        if engine is not None:
            engine.fail(error or self.error)
            engine.close()

    def _raise_if_left(self) -> None:
        if self.error is not None:
            raise self.error
