"""Runs what the engine is asked for: communicators, launches, the watch, and the end.

Collectives go to one communicator of all ranks, in the order of the calls, on a stream of the engine's own that
waits for the caller's. Messages go to a communicator of two ranks and a stream for each direction of each pair,
and are launched by a thread for each: so sends and receives hold up neither each other nor collectives, in any
order. One more thread watches what is under way, and ends all if something takes too long.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import final

from ....errors import UnsupportedOperationError
from ...serial_queue import SerialQueue
from ..base import Setup
from .library import Library, translated
from .local_communicators import CommunicatorSetup, LocalCommunicators
from .operation import NcclOperation
from .plans import Plan, PlanMember
from .streams import Event, Gpus
from .watchdog import Watchdog

__all__ = ["Request", "Runner"]

Finish = Callable[[], None] | None
Events = Sequence[tuple[int, Event]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an operation is.

    gpus: which of this process's take part, in the order of their ranks.
    plans: for each of them, how; called with its member.
    kept: tensors that must live until it is over.
    timeout: seconds.
    message: of a message, the ranks that send and receive.
    on_host: its `wait` waits until it is over.
    """

    name: str
    gpus: tuple[int, ...]
    plans: Sequence[Callable[[PlanMember], Plan]]
    kept: Sequence[object]
    timeout: float
    message: tuple[int, int] | None = None
    on_host: bool = False


@final
class Runner:
    """Belongs to an engine. Used from any thread.

    Args:
        setup: the engine's.
        library: NCCL.
        gpus: of this process.
        blocking_wait: every `wait` waits until the operation is over.
        interval: seconds between two looks at what is under way.
    """

    def __init__(
        self, setup: Setup, library: Library, gpus: Gpus, *, blocking_wait: bool, interval: float
    ) -> None:
        self._setup = setup
        self._library = library
        self._gpus = gpus
        self._blocking_wait = blocking_wait
        self._meeting = CommunicatorSetup(library, gpus, setup.store, self._check)
        self._watchdog = Watchdog(f"gradwire-nccl-{setup.group}", self._look, interval)
        self._of_gpus: dict[tuple[int, ...], LocalCommunicators] = {}
        self._of_pairs: dict[tuple[int, int], LocalCommunicators] = {}
        self._collectives = threading.Lock()
        """Held while collectives are launched, so that those of several threads do not get into each other."""
        self._changing = threading.Lock()
        """For the following. Nothing that might wait is called while it is held."""
        self._failure: Exception | None = None
        self._under_way: set[NcclOperation] = set()
        self._cliques: list[LocalCommunicators] = []
        self._lanes: dict[tuple[int, int], SerialQueue] = {}

    def begin(self, requests: Sequence[Request], finish: Finish) -> NcclOperation:
        """Begins operations on the same GPUs as one; `finish` is done after them, on their streams."""
        first = requests[0]
        if self._gpus.capturing():
            raise UnsupportedOperationError("nccl", f"capture {first.name} into a CUDA graph", "call it outside")
        callers = [(gpu, self._gpus.current_stream(gpu)) for gpu in first.gpus]
        operation = NcclOperation(
            first.name,
            first.timeout,
            self._gpus,
            kept=[tensor for request in requests for tensor in request.kept],
            callers=callers,
            source=None if first.message is None else first.message[0],
            on_host=first.on_host or self._blocking_wait,
        )
        with self._changing:
            self._check()
            self._under_way.add(operation)
        self._watchdog.wake()
        behind = [(gpu, stream.record_event()) for gpu, stream in callers]
        if first.message is None:
            with self._collectives, self._failing(operation):
                operation.launched(self._launch(self._of_all(first), requests, behind, finish))
        else:
            with self._changing:
                lane = self._lanes.setdefault(first.message, SerialQueue(f"gradwire-nccl-{first.name}"))
            lane.put(partial(self._launch_message, operation, first, behind, finish), now=False)
        return operation

    def fail(self, error: Exception) -> None:
        """Wakes all who wait, then has NCCL let go of the GPUs. The first error stays."""
        with self._changing:
            if self._failure is not None:
                return
            self._failure = error
            operations, self._under_way = self._under_way, set()
            cliques = list(self._cliques)
        for operation in operations:
            operation.fail(error)
        with suppress(Exception), ExitStack() as group:  # what cannot be aborted, ends with the process
            if sum(len(clique.members) for clique in cliques) > 1:
                self._library.groupStart()  # one by one, they may wait for each other
                group.callback(self._library.groupEnd)
            for clique in cliques:
                clique.abort()

    def drain(self) -> None:
        """Waits until the GPUs are done."""
        with self._changing:
            operations = list(self._under_way)
        for operation in operations:
            operation.until_over()

    def close(self) -> None:
        """Gives back threads and communicators."""
        for lane in self._lanes.values():
            lane.close()
        self._watchdog.close()
        for clique in self._cliques:
            clique.destroy()  # nothing, where it was aborted

    # Launching.

    def _of_all(self, request: Request) -> LocalCommunicators:
        """The communicator of all ranks' GPUs, with those of the request here."""
        clique = self._of_gpus.get(request.gpus)
        if clique is None:
            clique = self._join(f"collectives/{len(self._of_gpus)}", range(self._setup.size), request)
            self._of_gpus[request.gpus] = clique
        return clique

    def _of_two(self, request: Request, source: int, target: int) -> LocalCommunicators:
        """The communicator of one direction of a pair of ranks."""
        clique = self._of_pairs.get((source, target))
        if clique is None:
            clique = self._join(f"messages/{source}/{target}", (source, target), request)
            self._of_pairs[source, target] = clique
        if clique.members[0].gpu != request.gpus[0]:
            raise UnsupportedOperationError(
                "nccl",
                f"{request.name} on cuda:{request.gpus[0]}",
                f"messages from rank {source} to {target} began on cuda:{clique.members[0].gpu}; stay there",
            )
        return clique

    def _join(self, name: str, processes: Sequence[int], request: Request) -> LocalCommunicators:
        here = processes.index(self._setup.rank)
        clique = self._meeting.join(name, processes, here, request.gpus, request.timeout)
        with self._changing:
            failure = self._failure
            if failure is None:
                self._cliques.append(clique)
                return clique
        clique.abort()
        raise failure

    def _launch_message(self, operation: NcclOperation, request: Request, behind: Events, finish: Finish) -> None:
        """Runs on the lane of its direction. Errors reach those who wait for the operation, and the group."""
        assert request.message is not None
        with suppress(Exception), self._failing(operation):
            clique = self._of_two(request, *request.message)
            operation.launched(self._launch(clique, [request], behind, finish))

    def _launch(
        self, clique: LocalCommunicators, requests: Sequence[Request], behind: Events, finish: Finish
    ) -> Events:
        """Puts it all on the members' streams, behind what the callers had there; the events after it."""
        for member, (_, event) in zip(clique.members, behind, strict=True):
            member.stream.wait_event(event)
        running = [
            (member, plan(member))
            for request in requests
            for member, plan in zip(clique.members, request.plans, strict=True)
        ]
        while running:
            going_on: list[tuple[PlanMember, Plan]] = []
            calls: list[Callable[[], None]] = []
            for member, plan in running:
                with self._gpus.on(member.stream):
                    yielded = next(plan, None)
                if yielded is not None:
                    going_on.append((member, plan))
                    calls += [partial(call, member.communicator, member.stream.cuda_stream) for call in yielded]
            self._call(requests[0].name, calls)
            running = going_on
        if finish is not None:
            with ExitStack() as streams:
                for member in clique.members:
                    streams.enter_context(self._gpus.on(member.stream))
                finish()
        return [(member.gpu, member.stream.record_event()) for member in clique.members]

    def _call(self, name: str, calls: Sequence[Callable[[], None]]) -> None:
        """Calls NCCL, in a group if there is more than one call."""
        try:
            with ExitStack() as group:
                if len(calls) > 1:
                    self._library.groupStart()
                    group.callback(self._library.groupEnd)
                for call in calls:
                    call()
        except Exception as error:
            raise translated(name, error) from error

    # The watch.

    @contextmanager
    def _failing(self, operation: NcclOperation) -> Iterator[None]:
        """What goes wrong in a launch is the end of all: nobody knows what the other ranks have done."""
        try:
            yield
        except Exception as error:
            first = self._failure or error  # an abort makes launches fail
            operation.fail(first)
            self._end(first)
            if first is error:
                raise
            raise first from None

    def _look(self) -> bool:
        """What the watchdog does; is anything left under way?"""
        with self._changing:
            operations = list(self._under_way)
            cliques = list(self._cliques)
        error: Exception | None = None
        over: set[NcclOperation] = set()
        try:
            over.update(operation for operation in operations if operation.look())
            for clique in cliques:
                clique.check()
            error = next((late for operation in operations if (late := operation.overdue()) is not None), None)
        except Exception as raised:
            error = translated("what is under way", raised)
        if error is not None:
            self._end(error)
            return False
        with self._changing:
            self._under_way -= over
            return bool(self._under_way)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end(self, error: Exception) -> None:
        self.fail(error)
        self._setup.failed(error)
