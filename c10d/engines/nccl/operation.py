"""Operations of NCCL in flight on GPUs."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

from ....errors import CollectiveTimeoutError
from .streams import Event, Gpus, Stream

__all__ = ["NcclOperation"]

LAUNCH_GRACE_S: Final = 5.0
"""Seconds beyond its timeout that an operation may take to be launched.

What delays a launch, such as creating a communicator, has a timeout of its own, whose error names the missing
ranks.
"""


@final
class NcclOperation:
    """An operation in flight, a PendingOperation (c10d/engines/pending.py), polled by the engine's watchdog.

    An operation is launched when all its work is on the engine's streams, and done when the streams have passed
    its events, or when it has failed. It keeps its tensors alive until it is done, or until the streams that it
    was called on wait for it: otherwise torch's caching allocator would hand out their memory while NCCL uses it.

    Args:
        name, timeout: of the operation, whose tensors are `tensors`.
        gpus: of this process.
        caller_streams: each GPU and its current stream when the operation was called.
        source: the rank that sends, for receives.
        blocks_host: whether `wait` blocks until the operation is done, rather than making streams wait.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        gpus: Gpus,
        *,
        tensors: Sequence[object],
        caller_streams: Sequence[tuple[int, Stream]],
        source: int | None,
        blocks_host: bool,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._gpus = gpus
        self._tensors: Sequence[object] = tensors
        self._caller_streams = {gpu: stream.cuda_stream for gpu, stream in caller_streams}
        self._source = source
        self._blocks_host = blocks_host
        self._lock = threading.Lock()
        self._launched = threading.Event()
        self._done = threading.Event()
        self._events: Sequence[tuple[int, Event]] = ()
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    # The interface of PendingOperation

    def wait(self, timeout: float | None) -> None:
        """Makes the current streams wait for the operation; with a timeout, or if it blocks the host, blocks."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._launched.wait(timeout):
            raise TimeoutError
        if timeout is not None or self._blocks_host:
            self._block_until_done(deadline)
        if self._error is not None:
            raise self._error
        events = self._events
        callers_wait = bool(events)
        for gpu, event in events:
            stream = self._gpus.current_stream(gpu)
            stream.wait_event(event)
            callers_wait = callers_wait and stream.cuda_stream == self._caller_streams[gpu]
        if callers_wait:
            self._tensors = ()

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not."""
        if not self._done.is_set() and self._launched.is_set():
            self.poll()
        return self._done.is_set()

    def peek(self) -> bool:
        """Returns whether the operation is known to have finished; see `pending.peek`."""
        return self._done.is_set()  # which the watchdog sets, soon after it has

    def source(self) -> int:
        """Returns the rank that sent the message."""
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when `wait` does not block any more, or immediately if it does not block now."""
        with self._lock:
            if not (self._done if self._blocks_host else self._launched).is_set():
                self._callbacks.append(callback)
                return
        callback()

    # For the engine

    def wait_until_done(self) -> None:
        """Blocks until the operation has finished, successfully or not."""
        self._launched.wait()
        self._block_until_done(None)

    def set_launched(self, events: Sequence[tuple[int, Event]]) -> None:
        """Marks the operation as launched. It is done when each GPU has passed its event."""
        with self._lock:
            if self._error is not None:
                return
            self._events = events
            self._launched.set()
            callbacks = [] if self._blocks_host else self._take_callbacks()
        _run(callbacks)

    def fail(self, error: Exception) -> None:
        """Finishes the operation with an error, unless it has finished already."""
        if self._launched.is_set():
            with suppress(Exception):  # queries raise after a CUDA error
                self.poll()
        self._finish(error)

    def poll(self) -> bool:
        """Queries the events, and returns whether the operation has finished."""
        if not self._done.is_set() and self._launched.is_set() and all(e.query() for _, e in self._events):
            self._finish(None)
        return self._done.is_set()

    def timeout_error(self) -> CollectiveTimeoutError | None:
        """Returns an error if the operation has taken longer than its timeout; else None."""
        deadline = self._deadline + (0.0 if self._launched.is_set() else LAUNCH_GRACE_S)
        if self._done.is_set() or time.monotonic() < deadline:
            return None
        return CollectiveTimeoutError(self.name, self.timeout)

    def _finish(self, error: Exception | None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._tensors = self._events = ()
            self._launched.set()
            self._done.set()
            callbacks = self._take_callbacks()
        _run(callbacks)

    def _take_callbacks(self) -> list[Callable[[], None]]:
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def _block_until_done(self, deadline: float | None) -> None:
        """Polls with growing pauses; CUDA could wait for an event, but not also for a failure of the group."""
        pause = 0.00002
        while not self.done():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self._done.wait(pause if remaining is None else min(pause, remaining))
            pause = min(1.5 * pause, 0.001)


def _run(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
