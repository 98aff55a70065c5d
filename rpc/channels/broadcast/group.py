"""One worker's part in a process group in which one worker broadcasts to the others."""

import threading
from collections.abc import Callable
from typing import final

import torch

from ....c10d.group_membership import LEAVE_TIMEOUT_S, GroupMembership, GroupSpec

__all__ = ["BroadcastGroup"]

START_TIMEOUT_S = 10.0
"""Seconds that the members may take to begin a broadcast."""

MIN_BYTES_PER_S = 64 << 20
"""Bytes that move in a second at least; with less, a broadcast is given up."""

ROOT = 0
"""The first member broadcasts."""


@final
class BroadcastGroup:
    """A thread that meets the others and then takes part in the broadcasts, in the order of their numbers.

    An error ends it.
    """

    def __init__(self, spec: GroupSpec, over: Callable[[bool, Exception | None], None]) -> None:
        """`over(formed, error)` is called last, on the thread: had the group come together, and what ended it."""
        self._membership = GroupMembership(spec)
        self._over = over
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._next = 0
        self._finishing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"gradwire-{spec.name}", daemon=True)

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
        self._membership.leave()
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Ends the group now, and waits for its thread. Not called on the event loop."""
        self.stop()
        self._membership.stop_forming()
        self._thread.join(LEAVE_TIMEOUT_S)

    def _run(self) -> None:
        formed, problem = False, None
        try:
            engine = self._membership.take()
            formed = True
            while (job := self._next_job()) is not None:
                tensor, done = job
                pending = engine.broadcast(tensor, ROOT, START_TIMEOUT_S + tensor.nbytes / MIN_BYTES_PER_S)
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
            self._membership.release(problem)
            self._over(formed, problem)

    def _next_job(self) -> tuple[torch.Tensor, Callable[[], None]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._membership.left or self._next in self._waiting or self._finishing)
            if self._membership.left is not None:
                raise self._membership.left
            job = self._waiting.pop(self._next, None)
            self._next += 1
            return job
