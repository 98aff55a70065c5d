"""One worker's part in a process group in which one worker broadcasts to the others."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast, final

import torch

from ...c10d.backends import best_engine
from ...c10d.engines.base import Engine, Setup
from ...c10d.stores.base import Store
from ...c10d.stores.prefix import PrefixStore
from ...c10d.torch_types import TorchStore
from ...errors import GroupAbortedError

__all__ = ["BroadcastGroup", "Meeting"]

PATIENCE = 10.0
"""Seconds that the members may take to come together, and to begin a broadcast."""

SLOWEST = 64 << 20
"""Bytes that move in a second at least; with less, a broadcast is given up."""

LEAVE_SECONDS = 2.0
"""How long whoever closes a group waits for its thread."""

ROOT = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of a group find each other.

    store: of all workers; the group uses a clone of it, since stores of torch's serve one thread at a time.
    name: of the group, unique in the store.
    members: the workers' ids by rank; the first one broadcasts.
    me: the id of this one.
    """

    store: TorchStore
    name: str
    members: Sequence[int]
    me: int


@final
class BroadcastGroup:
    """A thread that meets the others and then takes part in the broadcasts, in the order of their numbers.

    An error ends it.
    """

    def __init__(self, meeting: Meeting, over: Callable[[bool, Exception | None], None]) -> None:
        """`over(formed, error)` is called last, on the thread: had the group come together, and what ended it."""
        self._meeting = meeting
        self._over = over
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._next = 0
        self._finishing = False
        self._ended = False
        self._stopped: Exception | None = None
        self._engine: Engine | None = None
        self._store: Store | None = None
        self._thread = threading.Thread(target=self._run, name=f"gradwire-{meeting.name}", daemon=True)

    def start(self) -> None:
        """Begins to meet the others."""
        self._thread.start()

    def put(self, number: int, tensor: torch.Tensor, done: Callable[[], None]) -> None:
        """Broadcasts these bytes, or receives them into the tensor, and then calls `done` on the thread."""
        with self._changed:
            if not self._ended:
                self._waiting[number] = (tensor, done)
                self._changed.notify()

    def finish(self) -> None:
        """Ends the group when it has done what was asked for."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def stop(self) -> None:
        """Ends the group now; the other members notice. Called from any thread, and does not wait."""
        with self._changed:
            if self._stopped is not None:
                return
            self._stopped = GroupAbortedError(f"worker {self._meeting.me} has left {self._meeting.name}")
            self._changed.notify()
            if self._engine is not None:
                self._engine.fail(self._stopped)

    def close(self) -> None:
        """Ends the group now, and waits for its thread. Not called on the event loop."""
        self.stop()
        if (store := self._store) is not None:
            store.close()  # whoever waits in it for the others waits no more
        self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        formed, problem = False, None
        try:
            engine = self._form()
            formed = True
            while (job := self._next_job()) is not None:
                tensor, done = job
                pending = engine.broadcast(tensor, ROOT, PATIENCE + tensor.nbytes / SLOWEST)
                if pending is not None:
                    pending.wait(None)
                done()
                del job, tensor, done, pending  # a group that waits keeps nothing of its last broadcast alive
        except Exception as error:
            problem = error.with_traceback(None)
        finally:
            with self._changed:
                self._ended = True
                self._waiting.clear()
                ended, self._engine = self._engine, None
            if ended is not None:
                ended.fail(problem or GroupAbortedError(f"{self._meeting.name} has ended"))
                ended.close()
            self._over(formed, problem)

    def _form(self) -> Engine:
        meeting = self._meeting
        store = PrefixStore(meeting.name, cast(Any, meeting.store).clone())
        try:
            store.set_timeout(timedelta(seconds=PATIENCE))
            with self._changed:
                self._check()
                self._store = store
            engine: Engine = best_engine(
                Setup(
                    store=store,
                    rank=meeting.members.index(meeting.me),
                    size=len(meeting.members),
                    timeout=PATIENCE,
                    device="cpu",
                    global_ranks=tuple(meeting.members),
                    group=meeting.name,
                )
            )
        finally:
            store.close()
            if isinstance(under := store.underlying_store, Store):
                under.close()
        with self._changed:
            self._engine = engine
            self._check()
        return engine

    def _next_job(self) -> tuple[torch.Tensor, Callable[[], None]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next in self._waiting or self._finishing)
            self._check()
            job = self._waiting.pop(self._next, None)
            self._next += 1
            return job

    def _check(self) -> None:
        if self._stopped is not None:
            raise self._stopped
