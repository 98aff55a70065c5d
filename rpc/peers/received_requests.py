"""Bounds the requests of each worker that have arrived and have not begun to run.

Beyond the bound, nothing more is read from the worker until half of them have begun. That delays everything that
the worker sends, answers included, but for a finite time: the executor begins every request that is queued,
whatever the functions that run wait for. So it cannot close a circle of waits.
"""

import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from typing import final

from ..contracts.options import FlowControlOptions
from .flow_control import CALL_BYTES

__all__ = ["ReceivedQueue", "ReceivedRequests"]


@final
class ReceivedQueue:
    """The requests of one worker that have not begun to run."""

    def __init__(self) -> None:
        self.sizes: deque[int] = deque()
        """The bytes of each, in the order of arrival. They begin in nearly the same order."""
        self.limit = 0
        """The number at which reading pauses, with as many bytes as there are. Set with the first request."""
        # Guarded by the lock of ReceivedRequests.
        self.extra_bytes = 0
        """Bytes of large requests beyond CALL_BYTES of each."""
        self.pause: concurrent.futures.Future[None] | None = None
        """Done when reading may go on; None unless it pauses."""


@final
class ReceivedRequests:
    """Counts the requests that wait for a thread of one agent. Safe to use from any thread."""

    def __init__(self, options: FlowControlOptions) -> None:
        self._max_requests = options.max_received
        self._max_bytes = options.max_received_bytes
        self._lock = threading.Lock()

    def add(self, queue: ReceivedQueue, nbytes: int) -> "concurrent.futures.Future[None] | None":
        """Counts a request that has arrived and waits for a thread, with the bytes of its envelope and payloads.

        Returns a future before which nothing more should be read from the worker; None if there is no need.
        """
        if nbytes > CALL_BYTES:
            self._add_bytes(queue, nbytes - CALL_BYTES)
        queue.sizes.append(nbytes)
        return self._pause(queue) if len(queue.sizes) > queue.limit else None

    def begin(self, queue: ReceivedQueue) -> int:
        """Counts a request that begins to run, or is postponed; returns its bytes."""
        nbytes = queue.sizes.popleft()
        if nbytes > CALL_BYTES:
            self._add_bytes(queue, CALL_BYTES - nbytes)
        if queue.pause is not None:
            self._resume(queue)
        return nbytes

    def figures(self, queue: ReceivedQueue) -> Mapping[str, int]:
        """Returns the number of requests of a worker that wait for a thread, and their bytes."""
        with self._lock:
            return {
                "received_requests": len(queue.sizes),
                "received_bytes": len(queue.sizes) * CALL_BYTES + queue.extra_bytes,
                "reading_paused": int(queue.pause is not None),
            }

    def _add_bytes(self, queue: ReceivedQueue, nbytes: int) -> None:
        with self._lock:
            queue.extra_bytes += nbytes
            self._set_limit(queue)

    def _set_limit(self, queue: ReceivedQueue) -> None:
        queue.limit = min(self._max_requests, (self._max_bytes - queue.extra_bytes) // CALL_BYTES)

    def _pause(self, queue: ReceivedQueue) -> "concurrent.futures.Future[None] | None":
        """Begins a pause, unless the limit has not been set."""
        with self._lock:
            self._set_limit(queue)
            if len(queue.sizes) <= queue.limit:
                return queue.pause
            if queue.pause is None:
                queue.pause = concurrent.futures.Future()
            pause = queue.pause
        self._resume(queue)  # if requests have begun in between: `begin` may have seen no pause
        return pause

    def _resume(self, queue: ReceivedQueue) -> None:
        """Ends the pause if half of what is allowed, or less, has not begun."""
        with self._lock:
            count, pause = len(queue.sizes), queue.pause
            nbytes = count * CALL_BYTES + queue.extra_bytes
            if pause is None or (count and (2 * count > self._max_requests or 2 * nbytes > self._max_bytes)):
                return
            queue.pause = None
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled with the connection
            pause.set_result(None)
