"""The NCCL engine: creates communicators, launches operations, watches them, and ends them.

Collectives use one communicator of all ranks, in the order of the calls, on a stream of the engine that waits for
the caller's stream. Messages use a communicator of two ranks, a stream and a launching thread for each direction
of each pair of ranks, so that sends and receives delay neither each other nor collectives, whatever their order. A
watchdog thread polls operations in flight, and fails the group if one takes too long.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Concatenate, Final, ParamSpec, cast, final

from torch import Tensor

from ....errors import CollectiveTimeoutError, UnsupportedOperationError
from ..base import Engine, PendingOperation, Setup
from ..reductions import Reduction
from ..threads import PollingThread, SerialQueue
from . import plans
from .communicators import CommunicatorFactory, LocalCommunicators
from .library import CudaGpus, Event, Gpus, Library, Stream, load, translate_error
from .plans import GpuRank, Plan

__all__ = ["NcclEngine"]

LAUNCH_GRACE_S: Final = 5.0
"""Seconds beyond its timeout that an operation may take to be launched.

What delays a launch, such as creating a communicator, has a timeout of its own, whose error names the missing
ranks.
"""


P = ParamSpec("P")


Finish = Callable[[], None] | None


Events = Sequence[tuple[int, Event]]
"""GPUs, each with an event."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """An operation as it is to be launched.

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
class _NcclOperation:
    """An operation in flight, a PendingOperation, polled by the engine's watchdog.

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
        """Returns whether the operation is known to have finished; see `peek`."""
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


@final
class NcclEngine(Engine):
    """Connects GPUs by NCCL, through cupy. Plans (plans.py) say which calls of NCCL an operation consists of.

    Args:
        setup: see engines/base.py.
        library, gpus: replacements for tests.
        blocking_wait: whether `wait` blocks until the operation is done, as with torch's TORCH_NCCL_BLOCKING_WAIT.
        interval: seconds between polls of the watchdog.

    Raises:
        UnsupportedOperationError: torch finds no GPU, or cupy is missing.
    """

    name: ClassVar[str] = "nccl"
    blocking: ClassVar[bool] = False
    uses_streams: ClassVar[bool] = True

    def __init__(
        self,
        setup: Setup,
        *,
        library: Library | None = None,
        gpus: Gpus | None = None,
        blocking_wait: bool = False,
        interval: float = 0.1,
    ) -> None:
        super().__init__(setup)
        self._gpus: Final = CudaGpus() if gpus is None else gpus
        self._library: Final = load() if library is None else library
        self._blocking_wait = blocking_wait
        self._interval = interval
        self._factory = CommunicatorFactory(self._library, self._gpus, setup, self.raise_if_failed)
        self._watchdog = PollingThread(f"gradwire-nccl-{setup.group_name}", self._poll, interval)
        self._last_gpus: tuple[int, ...] | None = None
        self._collected = threading.local()  # requests of the `start` that runs on a thread
        self._by_gpus: dict[tuple[int, ...], LocalCommunicators] = {}
        """Communicators of collectives, by the GPUs of this process."""
        self._by_route: dict[tuple[int, int], LocalCommunicators] = {}
        """Communicators of messages, by the ranks that send and receive."""
        self._launching = threading.Lock()
        """Held while a collective is launched, so that those of several threads are launched one after another."""
        self._lock = threading.Lock()
        """Guards the following. Nothing that may block is called while it is held."""
        self._in_flight: set[_NcclOperation] = set()
        self._communicators: list[LocalCommunicators] = []
        self._queues: dict[tuple[int, int], SerialQueue] = {}

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> PendingOperation | None:
        """Broadcasts by NCCL."""
        return self._collective("broadcast", [tensor], timeout, plans.broadcast, tensor, root)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Reduces by NCCL, or else gathers by NCCL and combines by torch on every rank."""
        return self._collective("all_reduce", [tensor], timeout, plans.all_reduce, tensor, reduction)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Reduces by NCCL, or else gathers by NCCL and combines by torch on the root."""
        return self._collective("reduce", [tensor], timeout, plans.reduce, tensor, root, reduction)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> PendingOperation | None:
        """Gathers by one call if the sizes are equal, or else by broadcasts in one group."""
        return self._collective("all_gather", [tensor, *outputs], timeout, plans.all_gather, outputs, tensor)

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> PendingOperation | None:
        """Gathers by NCCL."""
        return self._collective("all_gather", [tensor, output], timeout, plans.all_gather_single, output, tensor)

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float
    ) -> PendingOperation | None:
        """Gathers by sends and receives in one group."""
        return self._collective("gather", [tensor, *outputs], timeout, plans.gather, outputs, tensor, root)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float
    ) -> PendingOperation | None:
        """Scatters by sends and receives in one group."""
        return self._collective("scatter", [tensor, *inputs], timeout, plans.scatter, tensor, inputs, root)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Reduces by one call if the sizes are equal, or else by reductions in one group."""
        kept, plan = [tensor, *inputs], plans.reduce_scatter
        return self._collective("reduce_scatter", kept, timeout, plan, tensor, inputs, reduction)

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Reduces by NCCL, or else exchanges the chunks by NCCL and combines them by torch."""
        kept, plan = [tensor, whole], plans.reduce_scatter_single
        return self._collective("reduce_scatter", kept, timeout, plan, tensor, whole, reduction)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
    ) -> PendingOperation | None:
        """Exchanges the tensors by sends and receives in one group."""
        return self._collective("all_to_all", [*inputs, *outputs], timeout, plans.all_to_all, outputs, inputs)

    def barrier(self, timeout: float) -> PendingOperation | None:
        """Reduces a number on the GPUs that were used last, or else the current one; `wait` blocks the caller."""
        gpus = self._last_gpus or (self._gpus.current(),)
        request = _Request(
            name="barrier",
            gpus=gpus,
            plans=[plans.barrier] * len(gpus),
            tensors=(),
            timeout=timeout,
            blocks_host=True,
        )
        return self._submit(request)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> PendingOperation | None:  # noqa: ARG002
        """Sends by NCCL, which has no tags: messages are received in the order in which they were sent."""
        plan = partial(plans.send, tensor=tensor)
        return self._start_message("send", tensor, (self.rank, peer), timeout, plan)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingOperation:  # noqa: ARG002
        """Receives by NCCL, which cannot receive from any rank."""
        if peer is None:
            raise UnsupportedOperationError(self.name, "recv from any rank", "name the rank that sends")
        plan = partial(plans.recv, tensor=tensor)
        return self._start_message("recv", tensor, (peer, self.rank), timeout, plan)  # type: ignore[return-value]

    def multigpu(
        self,
        name: str,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        steps: Sequence[Callable[[GpuRank], Plan]],
        timeout: float,
    ) -> PendingOperation | None:
        """Starts a collective in which every process takes part with several GPUs.

        Args:
            name: of the operation.
            tensors: one on each GPU that takes part; else ValueError is raised.
            kept: all tensors that the operation uses.
            steps: the plan for each GPU.
            timeout: seconds that the operation may take.
        """
        gpus = tuple(self._gpus.index_of(tensor) for tensor in tensors)
        if len(set(gpus)) != len(gpus):
            raise ValueError(f"{name} takes one tensor on each GPU, but they are on the GPUs {gpus}")
        self._last_gpus = gpus
        return self._submit(_Request(name=name, gpus=gpus, plans=steps, tensors=kept, timeout=timeout))

    def start(
        self, steps: Sequence[Callable[[], PendingOperation | int | None]], finish: Callable[[], None] | None
    ) -> PendingOperation | None:
        """Starts the operations in one group of NCCL; `finish` runs on the engine's stream after them."""
        if len(steps) == 1 and finish is None:
            return cast("PendingOperation | None", steps[0]())
        requests: list[_Request] = []
        self._collected.requests = requests
        try:
            for step in steps:
                step()
        finally:
            self._collected.requests = None
        return self._launch_together(requests, finish) if requests else None

    def drain(self) -> None:
        """Blocks until the GPUs have done all operations in flight."""
        with self._lock:
            operations = list(self._in_flight)
        for operation in operations:
            operation.wait_until_done()

    def fail(self, error: Exception) -> None:
        """Fails all operations in flight, then aborts the communicators. Only the first error counts."""
        with self._lock:
            if self.failure is not None:
                return
            super().fail(error)
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

    def close(self) -> None:
        """Ends the threads and releases the communicators."""
        for queue in self._queues.values():
            queue.close()
        self._watchdog.close()
        for each in self._communicators:
            each.destroy()  # has no effect on those that were aborted

    # Launching

    def _collective(
        self,
        name: str,
        tensors: Sequence[Tensor],
        timeout: float,
        plan: Callable[Concatenate[GpuRank, P], Plan],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> PendingOperation | None:
        """Launches the plan with these arguments on the GPU of the first of all its tensors."""
        gpus = self._last_gpus = (self._gpus.index_of(tensors[0]),)
        steps = [lambda me: plan(me, *arguments, **options)]
        return self._submit(_Request(name=name, gpus=gpus, plans=steps, tensors=tensors, timeout=timeout))

    def _start_message(
        self, name: str, tensor: Tensor, route: tuple[int, int], timeout: float, plan: Callable[[GpuRank], Plan]
    ) -> PendingOperation | None:
        if route[0] == route[1]:
            raise UnsupportedOperationError(self.name, f"{name} to the rank itself", "copy the tensor")
        gpus = (self._gpus.index_of(tensor),)
        request = _Request(name=name, gpus=gpus, plans=[plan], tensors=[tensor], timeout=timeout, route=route)
        return self._submit(request)

    def _submit(self, request: _Request) -> PendingOperation | None:
        """Launches a request, or leaves it to the `start` that runs on this thread."""
        requests: list[_Request] | None = getattr(self._collected, "requests", None)
        if requests is None:
            return self._launch_together([request], None)
        requests.append(request)
        return None

    def _launch_together(self, requests: Sequence[_Request], finish: Finish) -> _NcclOperation:
        """Starts requests for the same GPUs as one operation.

        Args:
            requests: at least one; a message is the only one.
            finish: runs after the requests, with the engine's streams as the current ones.
        """
        first = requests[0]
        if self._gpus.is_capturing():
            raise UnsupportedOperationError("nccl", f"capture {first.name} into a CUDA graph", "call it outside")
        caller_streams = [(gpu, self._gpus.current_stream(gpu)) for gpu in first.gpus]
        operation = _NcclOperation(
            first.name,
            first.timeout,
            self._gpus,
            tensors=[tensor for request in requests for tensor in request.tensors],
            caller_streams=caller_streams,
            source=None if first.route is None else first.route[0],
            blocks_host=first.blocks_host or self._blocking_wait,
        )
        with self._lock:
            self.raise_if_failed()
            self._in_flight.add(operation)
        self._watchdog.start()
        caller_events = [(gpu, stream.record_event()) for gpu, stream in caller_streams]

        def launch() -> None:
            try:
                communicators = self._communicators_for(first)
                operation.set_launched(self._launch(communicators, requests, caller_events, finish))
            except Exception as error:  # other ranks may have succeeded, so the group fails
                cause = self.failure or error  # an abort makes launches fail
                operation.fail(cause)
                self.fail_group(cause)
                if cause is error:
                    raise
                raise cause from None

        if first.route is None:
            with self._launching:
                launch()
        else:
            with self._lock:
                queue = self._queues.setdefault(first.route, SerialQueue(f"gradwire-nccl-{first.name}"))
            queue.submit(launch, needs_thread=True)
        return operation

    def _communicators_for(self, request: _Request) -> LocalCommunicators:
        """Returns those of all ranks that have the request's GPUs here, or of the two ranks of a message."""
        if request.route is None:
            if request.gpus not in self._by_gpus:
                name = f"collectives/{len(self._by_gpus)}"
                self._by_gpus[request.gpus] = self._create_communicators(name, range(self.size), request)
            return self._by_gpus[request.gpus]
        source, target = request.route
        if request.route not in self._by_route:
            name = f"messages/{source}/{target}"
            self._by_route[request.route] = self._create_communicators(name, request.route, request)
        communicators = self._by_route[request.route]
        first_gpu = communicators.ranks[0].gpu
        if first_gpu != request.gpus[0]:
            raise UnsupportedOperationError(
                "nccl",
                f"{request.name} on cuda:{request.gpus[0]}",
                f"messages from rank {source} to {target} must stay on cuda:{first_gpu}, which the first one used",
            )
        return communicators

    def _create_communicators(self, name: str, processes: Sequence[int], request: _Request) -> LocalCommunicators:
        index = processes.index(self.rank)
        communicators = self._factory.create(name, processes, index, request.gpus, request.timeout)
        with self._lock:
            failure = self.failure
            if failure is None:
                self._communicators.append(communicators)
                return communicators
        communicators.abort()
        raise failure

    def _launch(
        self,
        communicators: LocalCommunicators,
        requests: Sequence[_Request],
        caller_events: Events,
        finish: Finish,
    ) -> Events:
        """Enqueues requests on the engine's streams, which first wait for the callers' events.

        Returns for each GPU the event after which the requests are done.
        """
        for rank, (_, event) in zip(communicators.ranks, caller_events, strict=True):
            rank.stream.wait_event(event)
        running = [
            (rank, plan(rank))
            for request in requests
            for rank, plan in zip(communicators.ranks, request.plans, strict=True)
        ]
        while running:
            running = self._advance(running, requests[0].name)
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
        try:
            with ExitStack() as group:
                if len(calls) > 1:
                    self._library.groupStart()
                    group.callback(self._library.groupEnd)
                for call in calls:
                    call()
        except Exception as error:
            raise translate_error(name, error) from error
        return running

    def _poll(self) -> float | None:
        """Polls for finished operations, errors and timeouts, on the watchdog's thread."""
        with self._lock:
            operations = list(self._in_flight)
            communicators = list(self._communicators)
        error: Exception | None = None
        finished: set[_NcclOperation] = set()
        try:
            finished.update(operation for operation in operations if operation.poll())
            for each in communicators:
                each.check()
            timeouts = (operation.timeout_error() for operation in operations)
            error = next((timeout for timeout in timeouts if timeout is not None), None)
        except Exception as raised:
            error = translate_error("an operation in flight", raised)
        if error is not None:
            self.fail_group(error)
            return None
        with self._lock:
            self._in_flight -= finished
            return self._interval if self._in_flight else None
