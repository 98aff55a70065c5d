"""One worker's membership in a process group in which one worker broadcasts to the others."""

import threading
from collections.abc import Callable
from typing import final

import torch

from ...c10d.engines.base import Engine
from ...c10d.groups.membership import LEAVE_TIMEOUT_S, GroupMembership, GroupSpec

__all__ = ["BroadcastGroup"]

START_TIMEOUT_S = 10.0
"""Seconds within which all members must take part in a broadcast, besides the time that its bytes take."""

MIN_BYTES_PER_S = 64 << 20
"""Bytes per second of the slowest broadcast that does not time out."""

ROOT = 0
"""The rank of the member that broadcasts."""

_QueuedBroadcast = tuple[torch.Tensor, Callable[[], None]]
"""A broadcast that waits for its turn: the bytes to send or to receive into, and what to call at the end."""


@final
class BroadcastGroup:
    """Forms a group and takes part in its broadcasts, in the order of their numbers, on a thread of its own.

    An error ends the group.
    """

    def __init__(self, spec: GroupSpec, on_end: Callable[[bool, Exception | None], None]) -> None:
        """Does nothing before `start`.

        `on_end` is called last, on the group's thread: whether the group had formed, and the error that ended it.
        """
        self._membership = GroupMembership(spec)
        self._on_end = on_end
        self._changed = threading.Condition()
        self._queue: dict[int, _QueuedBroadcast] = {}
        """By number."""
        self._next_number = 0
        self._finishing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"gradwire-{spec.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread, which forms the group with the other members."""
        self._thread.start()

    def put(self, number: int, tensor: torch.Tensor, on_done: Callable[[], None] = lambda: None) -> None:
        """Queues a broadcast of uint8: of these bytes at the root, into this memory elsewhere.

        Does nothing if the group has ended. `on_done` is called on the group's thread when this member is done.
        """
        with self._changed:
            if not self._ended:
                self._queue[number] = tensor, on_done
                self._changed.notify()

    def finish(self) -> None:
        """Ends the group after the queued broadcasts. Does not wait."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def abort(self) -> None:
        """Ends the group at once; a broadcast in flight fails at all members. Does not wait."""
        self._membership.leave()
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Ends the group at once, and waits for its thread. Must not be called on the event loop."""
        self.abort()
        self._membership.cancel_join()
        self._thread.join(LEAVE_TIMEOUT_S)

    def _run(self) -> None:
        has_formed, problem = False, None
        try:
            engine = self._membership.join()
            has_formed = True
            while (broadcast := self._next()) is not None:
                _run_broadcast(engine, *broadcast)
                del broadcast  # an idle group keeps no payload alive
        except Exception as error:
            problem = error.with_traceback(None)
        finally:
            with self._changed:
                self._ended = True
                self._queue.clear()
            self._membership.release(problem)
            self._on_end(has_formed, problem)

    def _next(self) -> _QueuedBroadcast | None:
        """Waits for the next broadcast; returns None if the group is to end. Raises if this member has left."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._membership.error or self._next_number in self._queue or self._finishing
            )
            if self._membership.error is not None:
                raise self._membership.error
            broadcast = self._queue.pop(self._next_number, None)
            self._next_number += 1
            return broadcast


def _run_broadcast(engine: Engine, tensor: torch.Tensor, on_done: Callable[[], None]) -> None:
    pending = engine.broadcast(tensor, ROOT, START_TIMEOUT_S + tensor.nbytes / MIN_BYTES_PER_S)
    if pending is not None:
        pending.wait(None)
    on_done()
