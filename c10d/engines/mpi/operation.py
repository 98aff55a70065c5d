"""Operations of MPI in flight, and the state that the operations of one group share.

An operation is started without waiting and tested until it is done, so that it can time out and be failed. MPI
cannot cancel it then: the process keeps the memory of its tensors until it ends, as MPI may still write to it.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

from ....errors import CollectiveTimeoutError, ProcessGroupError, RankLostError
from ...failure.messages import DIED
from .progress import PollingPause
from .world import MpiWorld

__all__ = ["MpiGroupState", "MpiOperation"]


@final
class MpiGroupState:
    """State shared by the operations of one group: the MPI world, and the error that the group has failed with.

    Args:
        world: that the group is a part of.
        on_failure: tells the process group of an error after which it cannot continue.
    """

    def __init__(self, world: MpiWorld, on_failure: Callable[[Exception], None]) -> None:
        self.world: Final = world
        self.failure: Exception | None = None
        """The first error of the group."""
        self._on_failure = on_failure

    def check(self) -> None:
        """Raises the error that the group has failed with, if it has failed."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: Exception) -> None:
        """Makes operations in flight, when they are tested next, and all later ones raise `error`."""
        if self.failure is None:
            self.failure = error
            if isinstance(error, RankLostError) and error.reason == DIED:
                self.world.failure = error

    def fail_group(self, error: Exception) -> None:
        """Reports `error` to the process group and fails."""
        self._on_failure(error)
        self.fail(error)  # has no effect if the group has called `fail`, possibly with another error

    def translate_error(self, operation: str, error: Exception) -> Exception:
        """Fails the group for an error of an operation, and returns the error to raise."""
        if isinstance(error, self.world.mpi.Exception):
            error = ProcessGroupError(f"{operation} failed in MPI: {error}")
        self.fail_group(error)
        return self.failure or error


@final
class MpiOperation:
    """An MPI request in flight, a PendingOperation (c10d/engines/pending.py).

    Args:
        group: that it belongs to.
        request: the mpi4py Request.
        name: of the operation, for error messages.
        timeout: seconds that it may take.
        buffers: kept alive as long as MPI may access them.
        finish: runs when the request has succeeded, before the operation is done.
        expected_bytes: size of the message, for receives only.
    """

    def __init__(
        self,
        group: MpiGroupState,
        request: Any,
        *,
        name: str,
        timeout: float,
        buffers: Any,
        finish: Callable[[], None] | None,
        expected_bytes: int | None,
    ) -> None:
        self._group = group
        self._request = request
        self._name = name
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._buffers = buffers
        self._finish = finish
        self._expected_bytes = expected_bytes
        self._status = None if expected_bytes is None else group.world.mpi.Status()
        self._testing = threading.Lock()
        self._is_done = False
        self._source = -1
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.waiters = 0
        """Threads that wait for the operation, and test it meanwhile."""
        group.world.progress.add(self)

    def wait(self, timeout: float | None) -> None:
        """Tests the operation until it is done, see PendingOperation.wait."""
        deadline = None if timeout is None else time.perf_counter() + timeout
        pause = None
        self.waiters += 1
        try:
            while True:
                test_start = time.perf_counter()
                if self.test():
                    break
                if deadline is not None and test_start > deadline:
                    raise TimeoutError
                pause = pause or PollingPause()
                pause.pause(test_start)
        finally:
            self.waiters -= 1
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not."""
        return self.test()

    def source(self) -> int:
        """Returns the rank that sent the message."""
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already."""
        with self._testing:
            if not self._is_done:
                self._callbacks.append(callback)
                self._group.world.progress.wake()
                return
        callback()

    def test(self) -> bool:
        """Tests the operation, unless another thread does so at the moment, and returns whether it is done."""
        if self._is_done or not self._testing.acquire(blocking=False):
            return self._is_done
        try:
            if self._is_done:
                return True
            self._advance()
            if not self._is_done:
                return False
            self._finish = self._buffers = self._request = self._status = None
            callbacks, self._callbacks = self._callbacks, []
        finally:
            self._testing.release()
        self._group.world.progress.remove(self)
        for callback in callbacks:
            callback()
        return True

    def _advance(self) -> None:
        """Calls MPI_Test, and finishes the operation if the request is complete, has failed or has timed out."""
        try:
            if self._request.Test(self._status):
                self._complete()
                self._is_done = True
                return
            if self._group.failure is None and time.monotonic() > self._deadline:
                self._group.fail_group(CollectiveTimeoutError(self._name, self._timeout))
            self._error = self._group.failure
        except Exception as error:
            self._error = self._group.translate_error(self._name, error).with_traceback(None)
        if self._error is not None:
            self._is_done = True
            self._group.world.progress.abandoned.append((self._request, self._buffers))

    def _complete(self) -> None:
        """Runs `finish`; checks the size of a received message, and notes its source."""
        if self._finish is not None:
            self._finish()
        if self._status is None:
            return
        source = int(self._status.Get_source())
        received = self._status.Get_count(self._group.world.mpi.BYTE)
        if received != self._expected_bytes:
            raise ProcessGroupError(
                f"recv expects {self._expected_bytes} bytes, but rank {source} sent {received}: send and "
                "receive tensors of one size and dtype"
            )
        self._source = source
