"""Runs the requests of an engine: creates communicators, launches operations, watches them, and ends them.

Collectives use one communicator of all ranks, in the order of the calls, on a stream of the engine that waits for
the caller's stream. Messages use a communicator of two ranks, a stream and a launching thread for each direction
of each pair of ranks, so that sends and receives delay neither each other nor collectives, whatever their order. A
watchdog thread polls operations in flight, and fails the group if one takes too long.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import final

from ....errors import UnsupportedOperationError
from ..base import Setup
from ..serial_queue import SerialQueue
from .communicators import CommunicatorFactory, LocalCommunicators
from .library import Library, translate_error
from .operation import NcclOperation
from .plans import GpuRank, Plan
from .streams import Event, Gpus
from .watchdog import Watchdog

__all__ = ["NcclRequest", "Runner"]

Finish = Callable[[], None] | None
Events = Sequence[tuple[int, Event]]
"""GPUs, each with an event."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRequest:
    """An operation that an engine asks its runner for.

    name: of the operation, for error messages.
    gpus: of this process that take part, in the order of their ranks.
    plans: for each GPU a function that returns its plan.
    tensors: that must live until the operation is done.
    timeout: seconds that it may take.
    route: of a message, the ranks that send and receive; None for collectives.
    blocks_host: whether `wait` blocks until the operation is done, rather than making streams wait.
    """

    name: str
    gpus: tuple[int, ...]
    plans: Sequence[Callable[[GpuRank], Plan]]
    tensors: Sequence[object]
    timeout: float
    route: tuple[int, int] | None = None
    blocks_host: bool = False


@final
class Runner:
    """Runs the requests of one engine, which owns it. Used from any thread.

    Args:
        setup: of the engine.
        library: NCCL.
        gpus: of this process.
        blocking_wait: whether every `wait` blocks until the operation is done.
        interval: seconds between polls of the watchdog.
    """

    def __init__(
        self, setup: Setup, library: Library, gpus: Gpus, *, blocking_wait: bool, interval: float
    ) -> None:
        self._setup = setup
        self._library = library
        self._gpus = gpus
        self._blocking_wait = blocking_wait
        self._factory = CommunicatorFactory(library, gpus, setup.store, self._check, insecure=setup.insecure)
        self._watchdog = Watchdog(f"gradwire-nccl-{setup.group_name}", self._poll, interval)
        self._by_gpus: dict[tuple[int, ...], LocalCommunicators] = {}
        """Communicators of collectives, by the GPUs of this process."""
        self._by_route: dict[tuple[int, int], LocalCommunicators] = {}
        """Communicators of messages, by the ranks that send and receive."""
        self._launching = threading.Lock()
        """Held while a collective is launched, so that those of several threads are launched one after another."""
        self._lock = threading.Lock()
        """Guards the following. Nothing that may block is called while it is held."""
        self._failure: Exception | None = None
        self._in_flight: set[NcclOperation] = set()
        self._communicators: list[LocalCommunicators] = []
        self._queues: dict[tuple[int, int], SerialQueue] = {}

    def submit(self, requests: Sequence[NcclRequest], finish: Finish) -> NcclOperation:
        """Starts requests for the same GPUs as one operation.

        Args:
            requests: at least one; a message is the only one.
            finish: runs after the requests, with the engine's streams as the current ones.
        """
        first = requests[0]
        if self._gpus.is_capturing():
            raise UnsupportedOperationError("nccl", f"capture {first.name} into a CUDA graph", "call it outside")
        caller_streams = [(gpu, self._gpus.current_stream(gpu)) for gpu in first.gpus]
        operation = NcclOperation(
            first.name,
            first.timeout,
            self._gpus,
            tensors=[tensor for request in requests for tensor in request.tensors],
            caller_streams=caller_streams,
            source=None if first.route is None else first.route[0],
            blocks_host=first.blocks_host or self._blocking_wait,
        )
        with self._lock:
            self._check()
            self._in_flight.add(operation)
        self._watchdog.wake()
        caller_events = [(gpu, stream.record_event()) for gpu, stream in caller_streams]
        if first.route is None:
            with self._launching, self._failing(operation):
                communicators = self._communicators_of_all(first)
                operation.set_launched(self._launch(communicators, requests, caller_events, finish))
        else:
            with self._lock:
                queue = self._queues.setdefault(first.route, SerialQueue(f"gradwire-nccl-{first.name}"))
            queue.submit(partial(self._launch_message, operation, first, caller_events, finish), needs_thread=True)
        return operation

    def fail(self, error: Exception) -> None:
        """Fails all operations in flight, then aborts the communicators. Only the first error counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            operations, self._in_flight = self._in_flight, set()
            communicators = list(self._communicators)
        for operation in operations:
            operation.fail(error)
        with suppress(Exception), ExitStack() as group:  # what cannot be aborted ends with the process
            if sum(len(each.ranks) for each in communicators) > 1:
                self._library.groupStart()  # aborted one by one, they may wait for each other
                group.callback(self._library.groupEnd)
            for each in communicators:
                each.abort()

    def drain(self) -> None:
        """Blocks until all operations in flight have finished."""
        with self._lock:
            operations = list(self._in_flight)
        for operation in operations:
            operation.wait_until_done()

    def close(self) -> None:
        """Ends the threads and releases the communicators."""
        for queue in self._queues.values():
            queue.close()
        self._watchdog.close()
        for each in self._communicators:
            each.destroy()  # has no effect on those that were aborted

    # Launching

    def _communicators_of_all(self, request: NcclRequest) -> LocalCommunicators:
        """Returns the communicator of all ranks that has the request's GPUs in this process."""
        communicators = self._by_gpus.get(request.gpus)
        if communicators is None:
            name = f"collectives/{len(self._by_gpus)}"
            communicators = self._create_communicators(name, range(self._setup.size), request)
            self._by_gpus[request.gpus] = communicators
        return communicators

    def _communicators_of_pair(self, request: NcclRequest, source: int, target: int) -> LocalCommunicators:
        """Returns the communicator for messages from one rank to another."""
        communicators = self._by_route.get((source, target))
        if communicators is None:
            communicators = self._create_communicators(f"messages/{source}/{target}", (source, target), request)
            self._by_route[source, target] = communicators
        first_gpu = communicators.ranks[0].gpu
        if first_gpu != request.gpus[0]:
            raise UnsupportedOperationError(
                "nccl",
                f"{request.name} on cuda:{request.gpus[0]}",
                f"messages from rank {source} to {target} must stay on cuda:{first_gpu}, which the first one used",
            )
        return communicators

    def _create_communicators(
        self, name: str, processes: Sequence[int], request: NcclRequest
    ) -> LocalCommunicators:
        index = processes.index(self._setup.rank)
        communicators = self._factory.create(name, processes, index, request.gpus, request.timeout)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._communicators.append(communicators)
                return communicators
        communicators.abort()
        raise failure

    def _launch_message(
        self, operation: NcclOperation, request: NcclRequest, caller_events: Events, finish: Finish
    ) -> None:
        """Launches a message, on the queue of its route. Errors fail the operation and the group."""
        assert request.route is not None
        with suppress(Exception), self._failing(operation):
            communicators = self._communicators_of_pair(request, *request.route)
            operation.set_launched(self._launch(communicators, [request], caller_events, finish))

    def _launch(
        self,
        communicators: LocalCommunicators,
        requests: Sequence[NcclRequest],
        caller_events: Events,
        finish: Finish,
    ) -> Events:
        """Enqueues requests on the engine's streams, which first wait for the callers' events.

        Returns:
            For each GPU the event after which the requests are done.
        """
        for rank, (_, event) in zip(communicators.ranks, caller_events, strict=True):
            rank.stream.wait_event(event)
        plans = [
            (rank, plan(rank))
            for request in requests
            for rank, plan in zip(communicators.ranks, request.plans, strict=True)
        ]
        while plans:
            plans = self._advance(plans, requests[0].name)
        if finish is not None:
            with ExitStack() as streams:
                for rank in communicators.ranks:
                    streams.enter_context(self._gpus.use(rank.stream))
                finish()
        return [(rank.gpu, rank.stream.record_event()) for rank in communicators.ranks]

    def _advance(self, plans: Sequence[tuple[GpuRank, Plan]], name: str) -> list[tuple[GpuRank, Plan]]:
        """Runs each plan to its next calls of NCCL, makes these calls, and returns the unfinished plans."""
        running: list[tuple[GpuRank, Plan]] = []
        calls: list[Callable[[], None]] = []
        for rank, plan in plans:
            with self._gpus.use(rank.stream):
                yielded = next(plan, None)
            if yielded is not None:
                running.append((rank, plan))
                calls += [partial(call, rank.communicator, rank.stream.cuda_stream) for call in yielded]
        self._make_calls(name, calls)
        return running

    def _make_calls(self, name: str, calls: Sequence[Callable[[], None]]) -> None:
        """Calls NCCL, in a group if there is more than one call."""
        try:
            with ExitStack() as group:
                if len(calls) > 1:
                    self._library.groupStart()
                    group.callback(self._library.groupEnd)
                for call in calls:
                    call()
        except Exception as error:
            raise translate_error(name, error) from error

    # Failures

    @contextmanager
    def _failing(self, operation: NcclOperation) -> Iterator[None]:
        """Fails the group for an error in a `with` block that launches, as other ranks may have succeeded."""
        try:
            yield
        except Exception as error:
            first = self._failure or error  # an abort makes launches fail
            operation.fail(first)
            self._fail_group(first)
            if first is error:
                raise
            raise first from None

    def _poll(self) -> bool:
        """Polls for finished operations, errors and timeouts; returns whether operations are in flight.

        Runs on the watchdog's thread.
        """
        with self._lock:
            operations = list(self._in_flight)
            communicators = list(self._communicators)
        error: Exception | None = None
        finished: set[NcclOperation] = set()
        try:
            finished.update(operation for operation in operations if operation.poll())
            for each in communicators:
                each.check()
            timeouts = (operation.timeout_error() for operation in operations)
            error = next((timeout for timeout in timeouts if timeout is not None), None)
        except Exception as raised:
            error = translate_error("an operation in flight", raised)
        if error is not None:
            self._fail_group(error)
            return False
        with self._lock:
            self._in_flight -= finished
            return bool(self._in_flight)

    def _check(self) -> None:
        """Raises the error that the engine has failed with, if it has failed."""
        if self._failure is not None:
            raise self._failure

    def _fail_group(self, error: Exception) -> None:
        self.fail(error)
        self._setup.on_failure(error)
