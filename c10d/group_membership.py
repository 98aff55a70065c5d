"""How workers come together in a process group, and how each of them leaves it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast, final

from ..errors import GroupAbortedError
from .backends import best_engine
from .engines.base import Engine, Setup
from .stores.base import Store
from .stores.prefix import PrefixStore
from .torch_types import TorchStore

__all__ = ["FORM_TIMEOUT_S", "LEAVE_TIMEOUT_S", "GroupMembership", "GroupSpec"]

FORM_TIMEOUT_S = 10.0
"""Seconds that the members may take to come together."""

LEAVE_TIMEOUT_S = 2.0
"""How long whoever closes a group waits for its threads."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Where the members of a group find each other.

    store: of all workers; the group uses a clone of it, since stores of torch's serve one thread at a time.
    name: of the group, unique in the store.
    members: the workers' ids by rank.
    me: the id of this one.
    """

    store: TorchStore
    name: str
    members: Sequence[int]
    me: int


@final
class GroupMembership:
    """One worker's seat in a group: taken once, together with the others, and left from any thread."""

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._store: PrefixStore | None = None
        self._left: Exception | None = None

    def take(self) -> Engine:
        """Meets the others; what the group works with. Raises what keeps the group from coming together."""
        spec = self._spec
        store = PrefixStore(spec.name, cast(Any, spec.store).clone())
        try:
            store.set_timeout(timedelta(seconds=FORM_TIMEOUT_S))
            with self._lock:
                self._check()
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
                )
            )
        finally:
            _close(store)
        with self._lock:
            self._engine = engine
            self._check()
        return engine

    @property
    def left(self) -> Exception | None:
        """What this worker has left with, if it has."""
        return self._left

    def leave(self) -> None:
        """Ends the group, now, for this worker; the others notice. Does not wait, nor give anything back."""
        with self._lock:
            if self._left is None:
                self._left = GroupAbortedError(f"worker {self._spec.me} has left {self._spec.name}")
                if self._engine is not None:
                    self._engine.fail(self._left)

    def stop_forming(self) -> None:
        """Has `take` wait no more for the others."""
        if (store := self._store) is not None:
            _close(store)

    def release(self, problem: Exception | None = None) -> None:
        """Leaves, because of this problem if there is one, and gives back what the group holds.

        Nobody uses the engine any more.
        """
        with self._lock:
            engine, self._engine = self._engine, None
            self._left = self._left or problem or GroupAbortedError(f"{self._spec.name} has ended")
        if engine is not None:
            engine.fail(problem or self._left)
            engine.close()

    def _check(self) -> None:
        if self._left is not None:
            raise self._left


def _close(store: PrefixStore) -> None:
    """Closes a store and the clone under it."""
    store.close()
    if isinstance(under := store.underlying_store, Store):
        under.close()
