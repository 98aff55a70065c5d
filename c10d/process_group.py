"""The process group: takes each tensor to the engine of its device, and keeps order and errors.

It is a torch.distributed.ProcessGroup, so torch's functions, DDP, FSDP and the rest run on it. What is called on
it is a Call (collectives.py); an engine does it (engines/); the caller gets a GroupWork.

A group that failed stays so: after a timeout or the loss of a rank nobody can tell what the others have done, and
every later operation raises the same error. Destroy it and make another.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.profiler

from ..errors import GroupAbortedError, RankLostError, UnsupportedOperationError
from ..torch_internals import profiler_enabled
from .call import Call
from .debug.consistency import ConsistencyCheck
from .debug.flight_recorder import Entry, FlightRecorder, write
from .engines.base import Engine, Pending
from .group_options import GroupOptions
from .lane import Lane
from .liveness import Liveness
from .own_backend import OwnBackend
from .pending import Done
from .stores.prefix import PrefixStore
from .torch_types import TorchStore
from .work import GroupWork

__all__ = ["ProcessGroup"]

log = logging.getLogger(__name__)

_HARMLESS = (UnsupportedOperationError, ValueError, TypeError)
"""What engines raise before they have sent anything, on all ranks alike."""

GRACE_SECONDS = 1.0
"""What is under way when a rank leaves may need no more of it. It has so long to get done."""


@final
class ProcessGroup(OwnBackend):
    """A group of ranks.

    Made by torch.distributed's init_process_group and new_group with the backends that gradwire registers.
    """

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        size: int,
        *,
        global_ranks: Sequence[int],
        backend: str,
        timeout: timedelta,
        options: GroupOptions,
        make_engine: Callable[[str, "ProcessGroup"], Engine],
        make_part: "Callable[[Sequence[int], str, timedelta, GroupOptions], ProcessGroup]",
    ) -> None:
        super().__init__(rank, size)
        self._store = store  # C++ does not hold a store that is a Python object
        self._backend = backend
        self._timeout = timeout
        self._seconds = timeout.total_seconds()
        self._options = options
        self._recorder = FlightRecorder(options.recorded)
        self._global_ranks = tuple(global_ranks)
        self._check = (
            ConsistencyCheck(PrefixStore("check", store), rank, self._global_ranks)
            if options.checks_calls()
            else None
        )
        self._barriers = 0
        self._make_engine = make_engine
        self._make_part = make_part
        self._engines: dict[str, Engine] = {}
        self._lanes: dict[tuple[str, str, int], Lane] = {}
        self._lock = threading.Lock()
        self._making = threading.Lock()  # another one, for the group may fail while an engine is made
        self._failure: Exception | None = None
        self._liveness: Liveness | None = None
        self._ended = threading.Event()
        self._leaving: RankLostError | None = None
        self._left: dict[int, RankLostError] = {}
        self._name = ""
        self._description = "undefined"

    def engine(self, device_type: str) -> Engine:
        """That of a type of device, which is made when it is first asked for: all ranks must do so together."""
        engine = self._engines.get(device_type)
        if engine is None:
            with self._making:
                engine = self._engines.get(device_type)
                if engine is None:
                    engine = self._make_engine(device_type, self)
                    self.adopt(device_type, engine)
        return engine

    def adopt(self, device_type: str, engine: Engine) -> None:
        """Takes an engine for a type of device, which has none yet."""
        with self._lock:
            self._engines[device_type] = engine
            failure = self._failure
        if failure is not None:
            engine.fail(failure)

    def watch(self) -> None:
        """Notices from now on when another rank dies or leaves. All ranks call it together."""
        self._liveness = Liveness(
            PrefixStore("liveness", self._store),
            self.rank(),
            self.size(),
            self._seconds,
            on_lost=self._on_lost,
            on_left=self._on_left,
        )

    def start(self, call: Call) -> GroupWork | None:
        """Has the engine of the tensors' device do what was called for.

        Returns None if the caller wanted to wait at once: that has been done.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # which grows with each raise, and its frames hold tensors
        if torch.is_inference_mode_enabled():  # what engines make for a while is written to by other threads
            with torch.inference_mode(mode=False):
                return self.start(call)
        if self._left and (call.name == "send" or not self.engine(call.device.type).notices_departures):
            self._check_presence(call.peer)
        entry = self._recorder.begin(call)
        try:
            seconds = self._seconds if call.seconds is None else call.seconds
            if self._check is not None and call.peer is None:
                self._check.check(call, seconds)
            engine = self.engine(call.device.type)
            if profiler_enabled():
                with torch.profiler.record_function(f"{engine.name}:{call.name}"):  # named as torch names its own
                    pending = self._begin(call, engine, seconds, entry)
            else:
                pending = self._begin(call, engine, seconds, entry)
        except Exception as error:
            entry.end(error)
            if not isinstance(error, _HARMLESS):
                self.fail(error)
            raise
        if pending is None:
            entry.end()
        if call.now:
            return None
        return GroupWork(call.name, call.result, pending, _devices(call) if engine.on_streams else ())

    def _begin(self, call: Call, engine: Engine, seconds: float, entry: Entry) -> Pending | None:
        """Starts it, and waits for it if the caller would; None if it is over."""
        if engine.blocking and not (call.name == "recv" and engine.posts_receives):
            return self._begin_on_lane(call, engine, seconds, entry)
        finish = call.staging.finish if call.staging.needs_finish() else None
        pending = entry.pending = engine.start([partial(step, engine, seconds) for step in call.steps], finish)
        if not call.now or pending is None:
            return pending
        pending.wait(None)
        return None

    def _begin_on_lane(self, call: Call, engine: Engine, seconds: float, entry: Entry) -> Pending | None:
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

    def _run(self, call: Call, engine: Engine, seconds: float, entry: Entry) -> int | None:
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
                self.fail(GroupAbortedError(f"rank {self.rank()} was interrupted in {call.name}"))
            elif not isinstance(error, _HARMLESS):
                self.fail(error)
            raise
        entry.end()
        return source

    def _lane(self, call: Call) -> Lane:
        kind = call.name if call.peer is not None else "collectives"
        key = (call.device.type, kind, -1 if call.peer is None else call.peer)
        lane = self._lanes.get(key)
        if lane is None:
            name = f"gradwire-{self._name or 'group'}-{kind}"
            with self._lock:
                lane = self._lanes.setdefault(key, Lane(name))
        return lane

    def fail(self, error: Exception) -> None:
        """Makes all that is under way, and all that comes, raise `error`. The first error stays."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            engines = list(self._engines.values())
        for engine in engines:
            engine.fail(error)
        if self._options.dump_folder is not None and not isinstance(error, GroupAbortedError):
            try:
                write([self], Path(self._options.dump_folder))
            except OSError as problem:  # of which the user is to hear less than of the error
                log.warning("the flight recorder of group %s could not be written: %s", self._name, problem)

    def fail_for_engine(self, error: Exception) -> None:
        """As `fail`, with an error that an engine found; a rank that is about to leave explains it better."""
        self.fail(self._leaving or error)

    def _on_lost(self, rank: int, reason: str) -> None:
        self.fail(RankLostError(self._global_ranks[rank], reason))

    def _on_left(self, rank: int, reason: str) -> None:
        error = RankLostError(self._global_ranks[rank], reason)
        self._leaving = self._leaving or error
        if not self._ended.wait(GRACE_SECONDS):
            self._left[rank] = error
            if all(engine.notices_departures for engine in self._engines.values()):
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
        return peer in {None, rank} or (peer == -1 and len(self._left) == self.size() - 1)

    def abort(self) -> None:
        """Ends all that is under way with GroupAbortedError, on this rank; the others notice that it is gone."""
        self.fail(GroupAbortedError(f"rank {self.rank()} aborted the group"))
        self._close()

    def shutdown(self) -> None:
        """Gives back what the group holds. What is still under way ends with GroupAbortedError."""
        if self._failure is None:
            for engine in list(self._engines.values()):
                engine.drain()
        self.fail(GroupAbortedError(f"rank {self.rank()} shut the group down"))
        self._close()

    def _close(self) -> None:
        self._ended.set()
        with self._lock:
            liveness, self._liveness = self._liveness, None
            engines, self._engines = self._engines, {}
            lanes, self._lanes = self._lanes, {}
        if liveness is not None:
            liveness.close()
        for lane in lanes.values():
            lane.close()
        for engine in engines.values():
            engine.close()

    def record(self) -> dict[str, Any]:
        """What the flight recorder has, as JSON."""
        return {
            "name": self._name,
            "description": self._description,
            "backend": self._backend,
            "rank": self.rank(),
            "size": self.size(),
            "global_ranks": list(self._global_ranks),
            "entries": self._recorder.entries(),
        }

    def next_barrier(self) -> int:
        """The number of a monitored barrier, the same on all ranks."""
        self._barriers += 1
        return self._barriers

    # What torch asks of a group.

    @property
    def options(self) -> GroupOptions:
        """How it behaves."""
        return self._options

    def split_group(  # type: ignore[override]  # there is None where a rank is in no part
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: GroupOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "ProcessGroup | None":
        """Makes a group of some ranks, which all of them call; None on others.

        What torch.distributed.split_group calls.

        Args:
            ranks: as this group numbers them.
            timeout: of its operations; this group's if None.
            opts: this group's if None.
            group_name: not used before in this group.
            group_desc: what it is for.
            device_types: what it is for; those of this group if None. Engines are made when they are used.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"part {sorted(ranks)} of {self._name}"
        part = self._make_part(ranks, name, timeout or self._timeout, opts or self._options)
        part._set_group_name(name)
        part._set_group_desc(group_desc or "undefined")
        part.expected_devices = self._device_types if device_types is None else device_types
        return part

    @property
    def timeout(self) -> timedelta:
        """How long operations may take that do not say it themselves."""
        return self._timeout

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The number that each rank of the group has in the default group; errors name ranks so."""
        return self._global_ranks

    def getBackendName(self) -> str:  # noqa: N802
        """What it is registered as."""
        return self._backend

    def get_group_store(self) -> TorchStore:
        """The store that the ranks met through."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations may take that do not say it themselves."""
        if timeout <= timedelta(0):
            raise ValueError(f"the timeout is {timeout}: give a positive timedelta")
        self._timeout = timeout
        self._seconds = timeout.total_seconds()

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch knows it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What it is for, as its maker said."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        """As group_name; torch's C++ asks so."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As group_desc; torch's C++ asks so."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description


def _devices(call: Call) -> list[torch.device]:
    """Those with streams that its tensors are on."""
    return list({tensor.device for tensor in (*call.inputs, *call.outputs) if tensor.device.type != "cpu"})
