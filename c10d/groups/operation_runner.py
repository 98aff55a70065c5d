"""Runs the operations of a process group on its engines.

An engine that does not block gets its operations directly. Operations of a blocking engine go through serial
queues, one for each order that must be kept: that of the collectives, of the sends to one peer, and of the
receives from one peer. A synchronous call runs on the caller's thread, if nothing is queued before it.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final, final

from ...errors import GroupAbortedError, UnsupportedOperationError
from ..debug.flight_recorder import FlightRecord
from ..engines.base import Engine
from ..engines.collective_call import ANY_RANK, CollectiveCall
from ..engines.pending import CombinedOperation, CompletedOperation, OperationWithFinalStep, PendingOperation
from ..engines.serial_queue import SerialQueue

__all__ = ["REJECTIONS", "OperationRunner"]

REJECTIONS: Final = (UnsupportedOperationError, ValueError, TypeError)
"""What engines raise before they have sent anything, on all ranks alike. The group stays usable."""


@final
class OperationRunner:
    """Runs operations for one group, which closes it.

    group_name: for the names of threads.

    Args:
        rank: this process's rank in the group, for messages.
        raise_if_failed: raises the group's error if the group has failed.
        fail: makes the group fail with an error.
    """

    def __init__(
        self,
        rank: int,
        *,
        raise_if_failed: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._rank = rank
        self.group_name = ""
        self._raise_if_failed = raise_if_failed
        self._fail = fail
        self._queues: dict[tuple[str, str, int], SerialQueue] = {}
        self._lock = threading.Lock()

    def start(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation | None:
        """Starts an operation, and waits for it if the caller wants to. Returns None if it is done already."""
        if engine.blocking and not (call.name == "recv" and engine.posts_receives):
            return self._start_on_queue(call, engine, timeout_s, record)
        copy_back = call.staging.copy_back if call.staging.needs_copy_back() else None
        steps = [partial(step, engine, timeout_s) for step in call.steps]
        pending = record.pending = engine.start(steps, copy_back)
        if pending is None or not call.options.is_sync:
            return pending
        pending.wait(None)
        return None

    def close(self, error: Exception) -> None:
        """Waits until the queues have run what is on them, and ends their threads.

        Args:
            error: the error of the group, which later operations raise.
        """
        with self._lock:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()
        # These refer to the group no more, so that it is freed by reference counting.
        self._raise_if_failed = partial(_raise, error)
        self._fail = _ignore

    def _start_on_queue(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation:
        """Runs an operation on the caller's thread if it is synchronous or would not block, else on a queue."""
        queue = self._queue(call)
        is_sync = call.options.is_sync
        runs_inline = is_sync
        if call.name == "send":
            assert call.peer is not None
            runs_inline = engine.can_send(call.inputs[0], call.peer)
        if runs_inline and queue.try_acquire():
            try:
                result = self._run(call, engine, timeout_s, record)
            finally:
                queue.release()
            if result is None or isinstance(result, int):
                return CompletedOperation(result)
            if is_sync:
                result.wait(None)
            return result
        task = queue.submit(lambda: self._run(call, engine, timeout_s, record), needs_thread=not is_sync)
        record.pending = task
        if is_sync:
            task.wait(None)
        return task

    def _run(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation | int | None:
        """Runs an operation on a blocking engine.

        Returns:
            The rank that sent, if it is a receive; or what the engine has started and not yet done.
        """
        source: int | None = None
        started: list[PendingOperation] = []
        try:
            self._raise_if_failed()
            for step in call.steps:
                result = step(engine, timeout_s)
                if result is None or isinstance(result, int):
                    source = result
                else:
                    started.append(result)
            if started:
                pending = started[0] if len(started) == 1 else CombinedOperation(started)
                if call.staging.needs_copy_back():
                    pending = OperationWithFinalStep(pending, call.staging.copy_back)
                record.pending = record.pending or pending
                return pending
            call.staging.copy_back()
        except BaseException as error:
            record.end(error)
            if not isinstance(error, Exception):  # a KeyboardInterrupt leaves the ranks out of step as well
                self._fail(GroupAbortedError(f"rank {self._rank} was interrupted in {call.name}"))
            elif not isinstance(error, REJECTIONS):
                self._fail(error)
            raise
        record.end()
        return source

    def _queue(self, call: CollectiveCall) -> SerialQueue:
        """Returns the queue that keeps the order of this operation with others of its kind."""
        kind, peer = ("collectives", ANY_RANK) if call.peer is None else (call.name, call.peer)
        key = (call.device.type, kind, peer)
        queue = self._queues.get(key)
        if queue is None:
            name = f"gradwire-{self.group_name or 'group'}-{kind}"
            with self._lock:
                queue = self._queues.setdefault(key, SerialQueue(name))
        return queue


def _raise(error: Exception) -> None:
    raise error.with_traceback(None)


def _ignore(error: Exception) -> None:
    """Replaces the callback of a group that has failed already."""
