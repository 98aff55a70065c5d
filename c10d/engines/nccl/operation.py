"""An operation under way on GPUs."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

from ....errors import CollectiveTimeoutError
from .streams import Event, Gpus, Stream

__all__ = ["NcclOperation"]

GRACE: Final = 5.0
"""Seconds beyond its timeout that an operation may take to be launched: what holds it up has a timeout of its own,
and knows better who is missing."""


@final
class NcclOperation:
    """It is a Pending (see engines.base), watched by the engine's watchdog.

    It begins when it is asked for, is launched when all its work is on the engine's streams, and is over when the
    streams have passed its events, or when it failed. It keeps its tensors until then, or until the streams that
    it was asked for on wait for it: the allocator would otherwise give their memory to others, while NCCL uses it.

    Args:
        name: as users know it.
        timeout: seconds that it may take.
        gpus: those of this process.
        kept: tensors that it uses.
        callers: the current stream of each GPU when it was asked for.
        source: of a receive: the rank that sends.
        on_host: `wait` waits until it is over, rather than making streams wait.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        gpus: Gpus,
        *,
        kept: Sequence[object],
        callers: Sequence[tuple[int, Stream]],
        source: int | None,
        on_host: bool,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._gpus = gpus
        self._kept: Sequence[object] = kept
        self._callers = {gpu: stream.cuda_stream for gpu, stream in callers}
        self._source = source
        self._on_host = on_host
        self._changing = threading.Lock()
        self._launched = threading.Event()
        self._over = threading.Event()
        self._events: Sequence[tuple[int, Event]] = ()
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    # For those who wait.

    def wait(self, timeout: float | None) -> None:
        """Makes the current streams wait for it. With a timeout, or if it is `on_host`, waits itself.

        Raises what it failed with, or TimeoutError if it is still under way.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        if not self._launched.wait(timeout):
            raise TimeoutError
        if timeout is not None or self._on_host:
            self._until_over(limit)
        if self._error is not None:
            raise self._error
        events = self._events
        ordered = bool(events)
        for gpu, event in events:
            stream = self._gpus.current_stream(gpu)
            stream.wait_event(event)
            ordered = ordered and stream.cuda_stream == self._callers[gpu]
        if ordered:
            self._kept = ()

    def done(self) -> bool:
        """Is it over, well or badly?"""
        if not self._over.is_set() and self._launched.is_set():
            self.look()
        return self._over.is_set()

    def source(self) -> int:
        """Of a receive: the rank that sent."""
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when `wait` would not wait, at once if it would not now."""
        with self._changing:
            if not (self._over if self._on_host else self._launched).is_set():
                self._callbacks.append(callback)
                return
        callback()

    def until_over(self) -> None:
        """Waits itself, however it ends."""
        self._launched.wait()
        self._until_over(None)

    # For the engine.

    def launched(self, events: Sequence[tuple[int, Event]]) -> None:
        """All is on the streams; with each GPU the event after which it is done there."""
        with self._changing:
            if self._error is not None:
                return
            self._events = events
            self._launched.set()
            callbacks = [] if self._on_host else self._taken_callbacks()
        _call(callbacks)

    def fail(self, error: Exception) -> None:
        """It is over, badly, unless it is over already."""
        if self._launched.is_set():
            with suppress(Exception):  # where the GPU is in disorder, queries raise
                self.look()
        self._end(error)

    def look(self) -> bool:
        """Is it over now?"""
        if not self._over.is_set() and self._launched.is_set() and all(e.query() for _, e in self._events):
            self._end(None)
        return self._over.is_set()

    def overdue(self) -> CollectiveTimeoutError | None:
        """The error, if it has taken too long."""
        deadline = self._deadline + (0.0 if self._launched.is_set() else GRACE)
        if self._over.is_set() or time.monotonic() < deadline:
            return None
        return CollectiveTimeoutError(self.name, self.timeout)

    def _end(self, error: Exception | None) -> None:
        with self._changing:
            if self._over.is_set():
                return
            self._error = error
            self._kept = self._events = ()
            self._launched.set()
            self._over.set()
            callbacks = self._taken_callbacks()
        _call(callbacks)

    def _taken_callbacks(self) -> list[Callable[[], None]]:
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def _until_over(self, limit: float | None) -> None:
        """CUDA can wait for events, but not for events or a failure; so it is asked, ever less often."""
        pause = 0.00002
        while not self.done():
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._over.wait(pause if left is None else min(pause, left))
            pause = min(1.5 * pause, 0.001)


def _call(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
