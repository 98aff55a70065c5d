"""The parts of a process group: engines, queues of operations, failure detector and flight recorder.

Users and torch hold a ProcessGroup (process_group.py), which refers to a GroupCore; nothing here refers back. So a
ProcessGroup is freed with its last reference, and its finalizer has the core close in the background: a thread
waits for the operations in flight, tells the other ranks, and releases threads, sockets and memory.

A core that has failed stays failed: after a timeout or the loss of a rank nobody can tell how far the other ranks
have come, so every later operation raises the same error. A group that is formed anew gets another core.

An engine that does not block gets its operations directly. Operations of a blocking engine go through serial
queues, one for each order that must be kept: that of the collectives, of the sends to one peer, and of the
receives from one peer. A synchronous call runs on the caller's thread, if nothing is queued before it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch

from ...errors import (
    GroupAbortedError,
    ProcessGroupError,
    RankLostError,
    StoreError,
    UnsupportedOperationError,
)
from ...net.addresses import allows_insecure
from ...net.event_loop import acquire_event_loop
from ...torch_internals import profiler_enabled
from ..debug.flight_recorder import FlightRecord, FlightRecorder, write_flight_records
from ..debug.rank_checks import ConsistencyCheck
from ..engines.base import (
    DIED,
    CombinedOperation,
    CompletedOperation,
    Engine,
    OperationWithFinalStep,
    PendingOperation,
)
from ..engines.collective_call import ANY_RANK, CollectiveCall
from ..engines.threads import SerialQueue
from ..stores.views import PrefixStore, is_insecure_store, store_credentials, wait_for_keys
from ..torch_types import TorchStore
from .failure_detector import DROPPED, LEFT, FailureDetector
from .options import GroupOptions
from .work import OperationEvent

__all__ = ["GroupCore", "Place"]

log = logging.getLogger(__name__)

REJECTIONS: Final = (UnsupportedOperationError, ValueError, TypeError)
"""What engines raise before they have sent anything, on all ranks alike. The group stays usable."""

NO_RANKS = "the group has no ranks yet: call reconfigure on all its members"

DEPARTURE_GRACE_S = 1.0
"""Seconds that operations in flight have to complete after a rank has left; it may have done its part already."""

MAX_STORE_WAIT_S = 1.0
"""Seconds after which a wait in the store looks whether the group has failed or a rank has left. Neither of these
ends the wait itself."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Which group it is, and which rank of it this process has.

    name: under which torch registers the group.
    backend: name under which the group's backend is registered.
    rank: of this process; -1 in a group that gets its ranks from `reconfigure`.
    global_ranks: the rank in the default group of each rank of this group; none if it has no ranks yet.
    """

    name: str
    backend: str
    rank: int
    global_ranks: tuple[int, ...]


@final
class GroupCore:
    """The parts of one process group on one rank. Owned by a ProcessGroup, and closed by it or after it.

    name: under which torch registers the group.
    failure: the error with which the group has failed; None if it has not.

    Args:
        store: shared by the ranks, and used by this group alone, which closes it.
        make_engine: makes the engine for a type of device; returns the name of its backend, and the engine. Called
            only while somebody calls the group.
    """

    def __init__(
        self,
        store: PrefixStore,
        place: Place,
        timeout: timedelta,
        options: GroupOptions,
        make_engine: "Callable[[str, GroupCore], tuple[str, Engine]]",
    ) -> None:
        self.store: Final[TorchStore] = store  # C++ does not keep a store alive that is a Python object
        self.insecure: Final = allows_insecure(is_insecure_store(store))
        self.rank: Final = place.rank
        self.global_ranks: Final = place.global_ranks
        self.size: Final = len(self.global_ranks) or -1  # as torch has it for groups without ranks
        self.backend: Final = place.backend
        self.options: Final = options
        self.name = place.name
        self.description = "undefined"
        self.set_timeout(timeout)
        self._process = os.getpid()
        self._recorder = FlightRecorder(options.flight_recorder_size)
        self._consistency_check = (
            ConsistencyCheck(PrefixStore("check", store), self.rank, self.global_ranks)
            if options.should_check_calls()
            else None
        )
        self._queues: dict[tuple[str, str, int], SerialQueue] = {}
        self._make_engine = make_engine
        self._engines: dict[str, Engine] = {}
        self._backends: dict[str, str] = {}
        self._lock = threading.Lock()
        self._engine_lock = threading.Lock()  # held while an engine is made, during which the group may fail
        self.failure: Exception | None = None if self.global_ranks else ProcessGroupError(NO_RANKS)
        self._failure_detector: FailureDetector | None = None
        self._closing = threading.Event()
        self.departures: Final[dict[int, RankLostError]] = {}
        """By rank that has left, what operations raise that need it. Others can still exchange messages."""
        self._first_departure: RankLostError | None = None
        self.lost_ranks: set[int] = set()  # those whose processes have died, as far as the failure detector knows
        self._gone_ranks: set[int] = set()  # those that have left, too, by their ranks in the default group
        self._gone_changed = threading.Condition()
        self._close_callbacks: list[Callable[[], None]] = []
        self._close_store = store.close  # also closes the stores that are views of it
        self._event_loop = acquire_event_loop()  # for the finalizer, which may not start a thread itself

    # Engines.

    def engine(self, device_type: str) -> Engine:
        """Returns the engine for a type of device; see ProcessGroup.engine.

        A group that has failed makes none, but raises its error: nothing would close the engine.
        """
        engine = self._engines.get(device_type)
        if engine is None:
            with self._engine_lock:
                engine = self._engines.get(device_type)
                if engine is None:
                    self._raise_if_failed()
                    backend, engine = self._make_engine(device_type, self)
                    self.add_engine(device_type, engine, backend)
        return engine

    def add_engine(self, device_type: str, engine: Engine, backend: str) -> None:
        """Adds the engine of a backend for a type of device that has none yet."""
        with self._lock:
            self._backends[device_type] = backend
            self._engines[device_type] = engine
            failure = self.failure
        if failure is not None:
            engine.fail(failure)

    # Operations.

    def require_own_process(self) -> None:
        """Raises ProcessGroupError in a forked child, which has none of the group's threads and connections."""
        if self._is_inherited():
            raise ProcessGroupError(
                f"this group was formed in process {self._process} and is used in its fork {os.getpid()}: form a "
                "group in the processes that use it"
            )

    def _is_inherited(self) -> bool:
        return self._process != os.getpid()

    def start(self, call: CollectiveCall) -> PendingOperation | None:
        """Starts an operation on the engine of the tensors' device. If it is done, may return None."""
        self.require_own_process()
        self._raise_if_failed()
        if torch.is_inference_mode_enabled():  # engines' temporary tensors are written to by other threads
            with torch.inference_mode(mode=False):
                return self.start(call)
        if self.departures:
            self._check_departures(call)
        record = self._recorder.begin(call)
        try:
            timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
            if self._consistency_check is not None and call.peer is None:
                self._consistency_check.check(call, timeout_s, self.wait_for_all_ranks)
            engine = self.engine(call.device.type)
            if profiler_enabled():
                pending = self._start_profiled(call, engine, timeout_s, record)
            else:
                pending = self._run(call, engine, timeout_s, record)
        except Exception as error:
            record.end(error)
            if not isinstance(error, REJECTIONS):
                self.fail(error)
            raise
        if pending is None:
            record.end()
        return pending

    def _start_profiled(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation | None:
        event = OperationEvent(self._backends[call.device.type], call)
        try:
            with event.without_nested_events():
                pending = self._run(call, engine, timeout_s, record)
        except BaseException:
            event.end()
            raise
        if pending is None or call.is_sync:
            event.end()
            return pending
        return event.end_with(pending, is_point_to_point=call.peer is not None)

    def _check_departures(self, call: CollectiveCall) -> None:
        """Raises RankLostError if an operation needs a rank that has left, unless the engine itself does so."""
        if call.name == "send" or not self.engine(call.device.type).detects_departures:
            for rank, error in self.departures.copy().items():
                if self._affects(rank, call.peer):
                    raise error

    def _affects(self, rank: int, peer: int | None) -> bool:
        """Returns whether an operation needs a rank that has left.

        A collective, which has no peer, needs all ranks; a receive from ANY_RANK only the last that is left.
        """
        return peer in {None, rank} or (peer == ANY_RANK and len(self.departures) == self.size - 1)

    def _run(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation | None:
        """Starts an operation, and waits for it if the caller wants to. Returns None if it is done already."""
        if engine.blocking and not (call.name == "recv" and engine.posts_receives):
            return self._run_in_order(call, engine, timeout_s, record)
        copy_back = call.staging.copy_back if call.staging.needs_copy_back() else None
        steps = [partial(step, engine, timeout_s) for step in call.steps]
        pending = record.pending = engine.start(steps, copy_back)
        if pending is None or not call.is_sync:
            return pending
        pending.wait(None)
        return None

    def _run_in_order(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation:
        """Runs an operation on the caller's thread if it is synchronous or would not block, else on a queue."""
        queue = self._queue(call)
        is_sync = call.is_sync
        runs_inline = is_sync
        if call.name == "send":
            assert call.peer is not None
            runs_inline = engine.can_send(call.inputs[0], call.peer)
        if runs_inline and queue.try_acquire():
            try:
                result = self._run_blocking(call, engine, timeout_s, record)
            finally:
                queue.release()
            if result is None or isinstance(result, int):
                return CompletedOperation(result)
            if is_sync:
                result.wait(None)
            return result
        task = queue.submit(lambda: self._run_blocking(call, engine, timeout_s, record), needs_thread=not is_sync)
        record.pending = task
        if is_sync:
            task.wait(None)
        return task

    def _run_blocking(
        self, call: CollectiveCall, engine: Engine, timeout_s: float, record: FlightRecord
    ) -> PendingOperation | int | None:
        """Runs the steps on this thread. Returns the rank that sent, or what they have started."""
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
                self.fail(GroupAbortedError(f"rank {self.rank} was interrupted in {call.name}"))
            elif not isinstance(error, REJECTIONS):
                self.fail(error)
            raise
        record.end()
        return source

    def _queue(self, call: CollectiveCall) -> SerialQueue:
        kind, peer = ("collectives", ANY_RANK) if call.peer is None else (call.name, call.peer)
        key = (call.device.type, kind, peer)
        queue = self._queues.get(key)
        if queue is None:
            with self._lock:
                queue = self._queues.setdefault(key, SerialQueue(f"gradwire-{self.name or 'group'}-{kind}"))
        return queue

    def wait_for_operations(self) -> None:
        """Waits until the operations in flight, except receives, have finished, successfully or not."""
        if self._is_inherited():
            return
        for pending in self._recorder.in_flight():
            with suppress(Exception):  # the Works raise it to the caller
                pending.wait(None)

    def wait_for_all_ranks(self, store: TorchStore, keys: Sequence[str], timeout_s: float) -> bool:
        """Waits until each rank has set its key in a store, the group's. Returns whether all have in time.

        Raises the error with which the group has failed, and RankLostError if a rank has left without having set
        its key, or if the store has gone with it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._raise_if_failed()
            wait_s = max(deadline - time.monotonic(), 0.0)
            try:
                if wait_for_keys(store, keys, min(wait_s, MAX_STORE_WAIT_S)):
                    return True
                for rank, error in self.departures.copy().items():
                    if not store.check([keys[rank]]):
                        raise error.with_traceback(None)
            except StoreError:
                if cause := self.wait_for_cause(DEPARTURE_GRACE_S):
                    raise cause.with_traceback(None) from None
                raise
            if wait_s <= MAX_STORE_WAIT_S:
                return False

    # Failures.

    def start_failure_detector(self, timeout_s: float) -> None:
        """Starts to watch for ranks that die or leave. All ranks must call it together, within `timeout_s`."""
        credentials = store_credentials(self.store)
        self._failure_detector = FailureDetector(
            PrefixStore("failure_detector", self.store),
            self.rank,
            self.size,
            timeout_s,
            insecure=self.insecure,
            identity=credentials.identity() if credentials is not None else None,
            on_lost=self._on_lost,
            on_left=self._on_left,
        )

    def fail(self, error: Exception) -> None:
        """Makes all operations in flight, and all later ones, raise `error`. Only the first error counts.

        The other ranks are told, unless a rank has died, of which all learn at once.
        """
        detector = self._failure_detector
        if (
            self.failure is None
            and detector is not None
            and not (isinstance(error, RankLostError) and error.reason == DIED)
        ):
            detector.announce_failure(f"{LEFT}: {error}")
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            engines = list(self._engines.values())
        with self._gone_changed:
            self._gone_changed.notify_all()
        for engine in engines:
            engine.fail(error)
        if self.options.dump_folder is not None and not isinstance(error, GroupAbortedError):
            try:
                write_flight_records([self.flight_record()], Path(self.options.dump_folder))
            except OSError as problem:  # must not hide the group's error
                log.warning(
                    "the flight recorder of group %r could not be written to %s: %s",
                    self.name,
                    self.options.dump_folder,
                    problem,
                )

    def fail_from_engine(self, error: Exception) -> None:
        """Makes the group fail with an error that an engine has found, or with its cause: a rank that leaves."""
        self.fail(self._first_departure or error)

    def wait_for_cause(self, seconds: float) -> Exception | None:
        """Waits until the group has failed or a rank has left, and returns the error; None if neither happens."""
        with self._gone_changed:
            self._gone_changed.wait_for(lambda: self.failure or self._first_departure, seconds)
        return self.failure or self._first_departure

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            # Each raise adds to an error's traceback, whose frames keep tensors alive.
            raise self.failure.with_traceback(None)

    def _on_lost(self, rank: int, reason: str) -> None:
        self.lost_ranks.add(rank)
        self._note_gone(rank)
        self.fail(RankLostError(self.global_ranks[rank], reason))

    def _on_left(self, rank: int, reason: str) -> None:
        """Handles a rank that has left, or failed. Runs on a thread of the failure detector."""
        error = RankLostError(self.global_ranks[rank], reason)
        self._first_departure = self._first_departure or error
        self._note_gone(rank)
        if self._closing.wait(DEPARTURE_GRACE_S):
            return
        self.departures.setdefault(rank, error)
        if all(engine.detects_departures for engine in self._engines.values()):
            return
        if any(self._affects(rank, peer) for peer in self._recorder.peers_in_flight()):
            self.fail(error)

    def _note_gone(self, rank: int) -> None:
        with self._gone_changed:
            self._gone_ranks.add(self.global_ranks[rank])
            self._gone_changed.notify_all()

    def _wait_for_failure_detector(self) -> None:
        """Waits until the failure detector, too, knows of the lost rank with which the group has failed.

        An engine may notice a lost rank first, but not whether it died. Rank 0 must not end its failure detector
        before that has told the other ranks.
        """
        failure = self.failure
        if isinstance(failure, RankLostError) and self._failure_detector is not None:
            with self._gone_changed:
                self._gone_changed.wait_for(lambda: failure.rank in self._gone_ranks, DEPARTURE_GRACE_S)

    # Closing.

    def add_close_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the group has shut down or been dropped. Callbacks run in reverse order."""
        self._close_callbacks.append(callback)

    def abort(self) -> None:
        """Ends this rank's operations in flight with GroupAbortedError. The other ranks notice that it left."""
        if self._is_inherited():
            return
        self._end(GroupAbortedError(f"rank {self.rank} aborted the group"))

    def shutdown(self, reason: str = "") -> None:
        """Releases what the group holds. Operations that are then still in flight raise GroupAbortedError.

        The other ranks are told the reason, if there is one.
        """
        if self._is_inherited():  # the group is the parent's
            return
        self._drain_engines()
        error = GroupAbortedError(f"rank {self.rank} shut the group down")
        self._end(error, f"{LEFT}: {reason}" if reason else "")
        self._finish_close()

    def leave_to_reconfigure(self) -> None:
        """Ends the group on this rank, except for what `replace` hands over. Further calls do nothing.

        Operations that are still in flight raise GroupAbortedError. The other ranks are told that this one left.
        """
        self._drain_engines()
        self._wait_for_failure_detector()
        self._end(GroupAbortedError(f"rank {self.rank} left the group to form it anew"))

    def replace(self, old: "GroupCore") -> None:
        """Takes the place of a core that has left its group: its name, callbacks and description."""
        self.name = old.name
        self.description = old.description
        self._close_callbacks, old._close_callbacks = old._close_callbacks, []
        old._finish_close()

    def close_in_background(self) -> None:
        """Closes the group on a thread of its own, after its last reference is gone.

        This is a finalizer, which may run on any thread at any line: it takes no lock and waits for nothing.
        """
        if not self._is_inherited():
            self._event_loop.call_soon(self._start_closing_thread)

    def _start_closing_thread(self) -> None:
        threading.Thread(target=self._close_dropped, name="gradwire-group-end", daemon=True).start()

    def _close_dropped(self) -> None:
        """Closes a group that nobody refers to, after waiting for its operations except receives.

        Other ranks may wait for what this rank still has to send. Nobody waits for its receives, since a Work
        keeps its group alive.
        """
        self.wait_for_operations()
        self._drain_engines()
        self._end(GroupAbortedError(f"rank {self.rank} {DROPPED}"), DROPPED)
        self._finish_close()

    def _drain_engines(self) -> None:
        if self.failure is None:
            for engine in list(self._engines.values()):
                engine.drain()

    def _end(self, error: Exception, reason: str = "") -> None:
        """Fails the group with an error, tells the other ranks the reason, stops threads and closes engines."""
        self._fail(error)
        self._closing.set()
        with self._lock:
            detector, self._failure_detector = self._failure_detector, None
            engines, self._engines = self._engines, {}
        if detector is not None:
            detector.close(reason or f"{LEFT}: {error}")
        with self._lock:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()
        self._recorder.release_operations()
        for engine in engines.values():
            engine.close()

    def _finish_close(self) -> None:
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in reversed(callbacks):
            callback()
        self._close_store()
        self._event_loop.release()

    # Information.

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of operations."""
        self.timeout = timeout
        self._timeout_s = timeout.total_seconds()

    def collective_count(self) -> int:
        """Returns how many collectives this rank has called."""
        return self._recorder.collectives

    def flight_record(self) -> dict[str, Any]:
        """Returns the group and its last operations, as JSON values."""
        return {
            "name": self.name,
            "description": self.description,
            "backend": self.backend,
            "rank": self.rank,
            "size": self.size,
            "global_ranks": list(self.global_ranks),
            "audit": detector.audit.counts() if (detector := self._failure_detector) is not None else {},
            "operations": self._recorder.as_json(),
        }
