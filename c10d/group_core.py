"""What a process group consists of behind its face: engines, serial queues, the failure detector, the recorder.

The face is a ProcessGroup (process_group.py), which users and torch hold. Nothing here refers to it, so it goes
with their last reference; then `hand_over` has all of this end on a thread, which waits for what is in flight,
tells the other ranks, and releases threads, sockets and memory.

A group that failed stays so: after a timeout or the loss of a rank nobody can tell what the others have done, and
every later operation raises the same error.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, final

import torch

from ..errors import GroupAbortedError, RankLostError, UnsupportedOperationError
from ..torch_internals import profiler_enabled
from .call import CollectiveCall
from .debug.consistency import ConsistencyCheck
from .debug.flight_recorder import FlightRecord, FlightRecorder, write
from .engines.base import Engine, PendingOperation
from .event_loop import acquire_event_loop
from .failure_detector import DROPPED, LEFT, FailureDetector
from .group_options import GroupOptions
from .pending import Done
from .profile_events import OperationEvent
from .serial_queue import SerialQueue
from .stores.prefix import PrefixStore
from .torch_types import TorchStore

__all__ = ["GroupCore"]

log = logging.getLogger(__name__)

_HARMLESS = (UnsupportedOperationError, ValueError, TypeError)
"""What engines raise before they have sent anything, on all ranks alike."""

GRACE_SECONDS = 1.0
"""What is in flight when a rank leaves may need no more of it. It has so long to get done."""


@final
class GroupCore:
    """The parts of one process group on one rank. Owned by a ProcessGroup, and ended by it or after it.

    Args:
        store: shared by the ranks, and used by this group alone.
        rank: this process's number in the group.
        global_ranks: the number that each rank of the group has in the default group.
        backend: what the group is registered as.
        timeout: how long operations may take that do not say it themselves.
        options: how the group behaves.
        make_engine: makes the engine for a type of device, and names its backend; called only while somebody calls
            the group.
    """

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        *,
        global_ranks: Sequence[int],
        backend: str,
        timeout: timedelta,
        options: GroupOptions,
        make_engine: "Callable[[str, GroupCore], tuple[str, Engine]]",
    ) -> None:
        self.store: Final = store  # C++ does not hold a store that is a Python object
        self.rank: Final = rank
        self.size: Final = len(global_ranks)
        self.global_ranks: Final = tuple(global_ranks)
        self.backend: Final = backend
        self.options: Final = options
        self.name = ""
        self.description = "undefined"
        self.set_timeout(timeout)
        self._process = os.getpid()
        self._recorder = FlightRecorder(options.recorded)
        self._check = (
            ConsistencyCheck(PrefixStore("check", store), rank, self.global_ranks)
            if options.checks_calls()
            else None
        )
        self._make_engine = make_engine
        self._engines: dict[str, Engine] = {}
        self._backends: dict[str, str] = {}
        self._lanes: dict[tuple[str, str, int], SerialQueue] = {}
        self._lock = threading.Lock()
        self._making = threading.Lock()  # another one, for the group may fail while an engine is made
        self._failure: Exception | None = None
        self._liveness: FailureDetector | None = None
        self._ended = threading.Event()
        self._leaving: RankLostError | None = None
        self._left: dict[int, RankLostError] = {}
        self._finally: list[Callable[[], None]] = []
        self._loop = acquire_event_loop()  # which a finalizer hands the end over to

    def engine(self, device_type: str) -> Engine:
        """That of a type of device, which is made when it is first asked for: all ranks must do so together."""
        engine = self._engines.get(device_type)
        if engine is None:
            with self._making:
                engine = self._engines.get(device_type)
                if engine is None:
                    backend, engine = self._make_engine(device_type, self)
                    self.adopt(device_type, engine, backend)
        return engine

    def adopt(self, device_type: str, engine: Engine, backend: str) -> None:
        """Takes the engine of a backend for a type of device, which has none yet."""
        with self._lock:
            self._backends[device_type] = backend
            self._engines[device_type] = engine
            failure = self._failure
        if failure is not None:
            engine.fail(failure)

    def watch(self) -> None:
        """Notices from now on when another rank dies or leaves. All ranks call it together."""
        self._liveness = FailureDetector(
            PrefixStore("liveness", self.store),
            self.rank,
            self.size,
            self._seconds,
            on_lost=self._on_lost,
            on_left=self._on_left,
        )

    def start(self, call: CollectiveCall) -> PendingOperation | None:
        """Has the engine of the tensors' device do what was called for.

        Returns None if it is over already. If the caller wanted to wait at once, it has been waited for.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # which grows with each raise, and its frames hold tensors
        if torch.is_inference_mode_enabled():  # what engines make for a while is written to by other threads
            with torch.inference_mode(mode=False):
                return self.start(call)
        if self._left and (call.name == "send" or not self.engine(call.device.type).detects_departures):
            self._check_presence(call.peer)
        entry = self._recorder.begin(call)
        try:
            seconds = self._seconds if call.seconds is None else call.seconds
            if self._check is not None and call.peer is None:
                self._check.check(call, seconds)
            engine = self.engine(call.device.type)
            if profiler_enabled():
                pending = self._begin_recorded(call, engine, seconds, entry)
            else:
                pending = self._begin(call, engine, seconds, entry)
        except Exception as error:
            entry.end(error)
            if not isinstance(error, _HARMLESS):
                self.fail(error)
            raise
        if pending is None:
            entry.end()
        return pending

    def _begin_recorded(
        self, call: CollectiveCall, engine: Engine, seconds: float, entry: FlightRecord
    ) -> PendingOperation | None:
        """As `_begin`, with an event for profilers."""
        event = OperationEvent(self._backends[call.device.type], call)
        try:
            with event.alone():
                pending = self._begin(call, engine, seconds, entry)
        except BaseException:
            event.end()
            raise
        if pending is None or call.now:
            event.end()
            return pending
        return event.follow(pending, message=call.peer is not None)

    def _begin(
        self, call: CollectiveCall, engine: Engine, seconds: float, entry: FlightRecord
    ) -> PendingOperation | None:
        """Starts it, and waits for it if the caller would; None if it is over."""
        if engine.blocking and not (call.name == "recv" and engine.posts_receives):
            return self._begin_on_lane(call, engine, seconds, entry)
        finish = call.staging.finish if call.staging.needs_finish() else None
        pending = entry.pending = engine.start([partial(step, engine, seconds) for step in call.steps], finish)
        if not call.now or pending is None:
            return pending
        pending.wait(None)
        return None

    def _begin_on_lane(
        self, call: CollectiveCall, engine: Engine, seconds: float, entry: FlightRecord
    ) -> PendingOperation | None:
        lane = self._lane(call)
        at_once = call.now
        if call.name == "send":
            assert call.peer is not None
            at_once = engine.can_send(call.inputs[0], call.peer)
        if at_once and lane.enter():
            try:
                return Done(self._run(call, engine, seconds, entry))
            finally:
                lane.leave()
        job = entry.pending = lane.put(lambda: self._run(call, engine, seconds, entry), now=call.now)
        if call.now:
            job.wait(None)
        return job

    def _run(self, call: CollectiveCall, engine: Engine, seconds: float, entry: FlightRecord) -> int | None:
        """Does it on a blocking engine."""
        source: int | None = None
        try:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            for step in call.steps:
                source = cast("int | None", step(engine, seconds))
            call.staging.finish()
        except BaseException as error:
            entry.end(error)
            if not isinstance(error, Exception):  # a KeyboardInterrupt leaves the ranks out of step as well
                self.fail(GroupAbortedError(f"rank {self.rank} was interrupted in {call.name}"))
            elif not isinstance(error, _HARMLESS):
                self.fail(error)
            raise
        entry.end()
        return source

    def _lane(self, call: CollectiveCall) -> SerialQueue:
        kind = call.name if call.peer is not None else "collectives"
        key = (call.device.type, kind, -1 if call.peer is None else call.peer)
        lane = self._lanes.get(key)
        if lane is None:
            name = f"gradwire-{self.name or 'group'}-{kind}"
            with self._lock:
                lane = self._lanes.setdefault(key, SerialQueue(name))
        return lane

    def fail(self, error: Exception) -> None:
        """Makes all that is in flight, and all that comes, raise `error`. The first error stays."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            engines = list(self._engines.values())
        for engine in engines:
            engine.fail(error)
        if self.options.dump_folder is not None and not isinstance(error, GroupAbortedError):
            try:
                write([self], Path(self.options.dump_folder))
            except OSError as problem:  # of which the user is to hear less than of the error
                log.warning("the flight recorder of group %s could not be written: %s", self.name, problem)

    def fail_for_engine(self, error: Exception) -> None:
        """As `fail`, with an error that an engine found; a rank that is about to leave explains it better."""
        self.fail(self._leaving or error)

    def _on_lost(self, rank: int, reason: str) -> None:
        self.fail(RankLostError(self.global_ranks[rank], reason))

    def _on_left(self, rank: int, reason: str) -> None:
        error = RankLostError(self.global_ranks[rank], reason)
        self._leaving = self._leaving or error
        if not self._ended.wait(GRACE_SECONDS):
            self._left[rank] = error
            if all(engine.detects_departures for engine in self._engines.values()):
                return
            if any(self._needs(rank, peer) for peer in self._recorder.peers_under_way()):
                self.fail(error)

    def _check_presence(self, peer: int | None) -> None:
        """Raises if an operation with this peer, or with all ranks, needs one that has left."""
        for rank, error in list(self._left.items()):
            if self._needs(rank, peer):
                raise error

    def _needs(self, rank: int, peer: int | None) -> bool:
        """Does it, with a rank that has left? A receive from anyone (-1) does not while there are others."""
        return peer in {None, rank} or (peer == -1 and len(self._left) == self.size - 1)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long operations may take that do not say it themselves."""
        self.timeout = timeout
        self._seconds = timeout.total_seconds()

    def at_end(self, function: Callable[[], None]) -> None:
        """Has `function` called when the group has shut down or been dropped. The last one given comes first."""
        self._finally.append(function)

    def collectives(self) -> int:
        """How many have been called."""
        return self._recorder.collectives

    def wait_for_all(self) -> None:
        """Waits for what is in flight, but for receives, however it ends."""
        for pending in self._recorder.in_flight():
            with suppress(Exception):  # which works raise
                pending.wait(None)

    def abort(self) -> None:
        """Ends all that is in flight with GroupAbortedError, on this rank; the others notice that it is gone."""
        self.fail(GroupAbortedError(f"rank {self.rank} aborted the group"))
        self._close(LEFT)

    def shutdown(self) -> None:
        """Gives back what the group holds. What is still in flight ends with GroupAbortedError."""
        self._drain()
        self.fail(GroupAbortedError(f"rank {self.rank} shut the group down"))
        self._close(LEFT)
        self._end()

    def hand_over(self) -> None:
        """Has the group end on a thread, now that nobody can use it.

        A finalizer, which any line of any thread may run: it takes no lock and waits for nothing.
        """
        if self._process == os.getpid():  # not in a process that was forked: it has none of this
            self._loop.call_soon(self._begin_end)

    def _begin_end(self) -> None:
        threading.Thread(target=self._end_dropped, name="gradwire-group-end", daemon=True).start()

    def _end_dropped(self) -> None:
        """Ends a group to which nobody refers: what is in flight is waited for, but for receives.

        Somebody may wait for what this rank has still to send. Nobody asks for what it was to receive, because
        works keep their group.
        """
        self.wait_for_all()
        self._drain()
        self.fail(GroupAbortedError(f"rank {self.rank} {DROPPED}"))
        self._close(DROPPED)
        self._end()

    def _drain(self) -> None:
        if self._failure is None:
            for engine in list(self._engines.values()):
                engine.drain()

    def _close(self, why: str) -> None:
        self._ended.set()
        with self._lock:
            liveness, self._liveness = self._liveness, None
            engines, self._engines = self._engines, {}
            lanes, self._lanes = self._lanes, {}
        if liveness is not None:
            liveness.close(why)
        for lane in lanes.values():
            lane.close()
        self._recorder.settle()
        for engine in engines.values():
            engine.close()

    def _end(self) -> None:
        functions, self._finally = self._finally, []
        for function in reversed(functions):
            function()
        self._loop.release()

    def record(self) -> dict[str, Any]:
        """What the flight recorder has, as JSON."""
        return {
            "name": self.name,
            "description": self.description,
            "backend": self.backend,
            "rank": self.rank,
            "size": self.size,
            "global_ranks": list(self.global_ranks),
            "entries": self._recorder.entries(),
        }
