"""The contract of an agent, and the current agent.

Users call through the current agent: that of the process, which `init_rpc` sets, unless the calling thread belongs
to another agent, as the threads that run an agent's calls do.

In the children that a worker forks, nothing uses its agent. A child has none of the agent's threads, and must
leave its connections alone. Threads that are gone may hold its locks. So in a child each agent becomes an
`_InheritedAgent`, also for the references, streams and contexts that the program has. Its methods raise an error
that says what to do. Control messages, which finalizers and the ends of `with` blocks send, are dropped.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeVar, final

from ...errors import NotInitializedError, UnknownWorkerError
from ...proto.v1 import agent_pb2
from ..execution.futures import Future
from .messages import Incoming, MessageType, Request
from .options import RpcBackendOptions
from .worker import WorkerEnd, WorkerInfo
from .worker_events import WorkerEvents

__all__ = [
    "CANCELLED",
    "ControlHandler",
    "ControlMessages",
    "ControlValues",
    "CurrentAgent",
    "Destination",
    "OnSettled",
    "RpcAgent",
    "current_agent",
    "holder",
    "is_initialized",
    "leave_agents_to_parent",
]

E = TypeVar("E")

Destination = str | int | WorkerInfo
"""A worker as users name it: by name, id or WorkerInfo."""

CANCELLED = "call.cancelled"
"""The kind of message that cancels a request, which it names by its id, as CANCEL does, but cannot get lost."""

ControlHandler = Callable[[WorkerInfo, Any], None]
"""Processes a control message; takes the sender and the payload. Must not wait for other workers."""

OnSettled = Callable[[Exception | None], None]
"""Called when a control message is acknowledged (None), or has failed for good (the error)."""


class ControlValues(Protocol):
    """Pickles the payloads of control messages, and records those that are refused."""

    def dumps(self, value: object) -> bytes:
        """Returns a pickle of a value. Raises what pickling raises."""

    def load(self, source: WorkerInfo, data: bytes) -> Any:
        """Returns the value of a pickle from a worker. Raises PolicyError, or what unpickling raises."""

    def record_refusal(self, source: WorkerInfo, error: BaseException) -> None:
        """Records why a message of a worker is refused."""


class ControlMessages(Protocol):
    """Sends and processes the control messages of one agent: each arrives once, as long as its receiver lives.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def on(self, kind: str, handle: ControlHandler, *, is_quick: bool = False) -> None:
        """Registers what a kind of message does.

        `is_quick` says that `handle` never blocks, and runs code of gradwire only. Then it may run on the thread
        that reads the message, as soon as that has arrived.
        """

    def kinds(self) -> Collection[str]:
        """Returns the registered kinds."""

    def send(
        self,
        worker: WorkerInfo,
        kind: str,
        payload: Any,
        done: OnSettled | None = None,
        expected: tuple[type[Exception], ...] = (),
        *,
        urgent: bool = True,
    ) -> None:
        """Sends a message, again if it may be lost. Those to one worker arrive in the order of these calls.

        Args:
            worker: the receiver.
            kind: a kind that the receiver has a handler for.
            payload: a tuple of integers from 0 to 2**64 - 1, which needs no pickle, or else anything that pickles.
            done: called on the control thread with None, with what the handler raised, or with a WorkerLostError
                if the receiver is gone.
            expected: classes of errors that the handler answers with on purpose; others are logged.
            urgent: False if it may wait some milliseconds for others to travel with.
        """

    def run(self, task: Callable[[], None], *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before.

        One that is not urgent may wait some milliseconds for others, which then share one wake-up of the thread.
        """

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""


class RpcAgent(ABC):
    """Sends requests to the workers of a group and serves theirs.

    All methods may be called from any thread.
    """

    info: WorkerInfo
    """This worker."""
    options: RpcBackendOptions
    control: ControlMessages
    """Sends messages that must not get lost."""
    worker_events: WorkerEvents
    """Tells subscribers of workers that join and leave."""
    rpc_timeout: float
    """Seconds after which a request without a timeout of its own fails; 0 for never."""
    is_inherited: ClassVar[bool] = False
    """Whether this process was forked from that of the agent: see `_InheritedAgent`."""

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Makes an agent, of which a forked child is to know."""
        made = super().__new__(cls)
        _agents_here.add(made)
        return made

    # The group.

    @property
    @abstractmethod
    def dynamic(self) -> bool:
        """Whether the group is a dynamic one, whose workers join and leave at any time."""

    @abstractmethod
    def worker(self, destination: Destination) -> WorkerInfo:
        """Returns the worker with this name, id or WorkerInfo. Raises UnknownWorkerError.

        Of a worker that has been started again in a static group, that is its latest incarnation.
        """

    @abstractmethod
    def incarnation(self, wire_id: int) -> WorkerInfo:
        """Returns the worker, current or former, with this wire id. Raises UnknownWorkerError without one."""

    def is_member(self, worker: int) -> bool:
        """Returns whether a worker with this wire id is in the group, or has been."""
        try:
            self.incarnation(worker)
        except (UnknownWorkerError, ValueError):
            return False
        return True

    @abstractmethod
    def workers(self) -> Sequence[WorkerInfo]:
        """Returns all workers by id: of a static group with the lost ones, of a dynamic group without."""

    @abstractmethod
    def end_of(self, worker: int) -> WorkerEnd | None:
        """Returns how the worker with this id ended, if it is known to be lost."""

    def check_present(self, workers: Iterable[int]) -> None:
        """Checks the workers with these ids.

        Raises:
            WorkerLostError: one of them is known to be lost.
            WorkerSuspectError: one of them does not answer at present: see Liveness.
        """
        for worker in workers:
            if (end := self.end_of(worker)) is not None:
                raise end.as_error(self.incarnation(worker).name)

    @abstractmethod
    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a worker now, so that its loss is noticed."""

    # Messages.

    @abstractmethod
    def request(self, worker: WorkerInfo, request: Request) -> Future[Any]:
        """Sends a request.

        Args:
            worker: one of `workers()`.
            request: what to send.

        Returns:
            A future of the answer. It fails with what the handler raised, WorkerLostError, WorkerSuspectError,
            SendFailedError or RpcTimeoutError.

        Raises:
            SerializationError: the value does not pickle; nothing was sent.
            SendQueueFullError: too much is in flight, and the options or the calling thread do not allow to wait;
                nothing was sent.
            NotInitializedError: the agent has shut down.
        """

    async def request_async(self, worker: WorkerInfo, request: Request) -> Future[Any]:
        """Sends a request as `request` does, but does not block an event loop while too much is in flight."""
        return self.request(worker, request)

    def request_all(
        self,
        workers: Sequence[WorkerInfo],
        request: Request,
        around: Callable[[WorkerInfo], AbstractContextManager[None]] = lambda _worker: nullcontext(),
    ) -> list[Future[Any]]:
        """Sends one request to several workers, and its bytes as seldom as possible.

        Args:
            workers: of `workers()`, each once.
            request: what to send; its `keep` is ignored.
            around: makes the context in which the request to a worker is sent.

        Returns:
            A future for each worker, in their order. An error that keeps the request to one worker from being sent
            fails its future only.

        Raises:
            SerializationError: the value does not pickle; nothing was sent.
            NotInitializedError: the agent has shut down.
        """
        futures = []
        for worker in workers:
            with around(worker):
                futures.append(self.request(worker, request))
        return futures

    @abstractmethod
    def post(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        value: object,
        *,
        label: str = "the value",
        header: Callable[[agent_pb2.Envelope], None] | None = None,
        reply_to: Incoming | None = None,
    ) -> int:
        """Sends a message that gets no answer.

        Args:
            worker: one of `workers()`.
            kind: a message type that the receiver has a handler for.
            value: the body, anything that pickles.
            label: the value's name in a SerializationError.
            header: fills in headers of the envelope.
            reply_to: a request that this message belongs to, whose device map it uses.

        Returns:
            Bytes of the body and the tensors.

        Raises:
            WorkerLostError: the worker is known to be lost.
            WorkerSuspectError: it does not answer; nothing was sent.
            SerializationError: the value does not pickle; nothing was sent.
        """

    def postpone(self, worker: WorkerInfo, resume: Callable[[], None]) -> bool:  # noqa: ARG002
        """Postpones what would send a worker more, because too much is queued for it. Returns whether it has.

        If so, `resume` is called on the event loop when enough has been sent. It must not block.
        """
        return False

    @abstractmethod
    def encode_failure(self, error: BaseException) -> bytes:
        """Returns an exception as `decode_failure` of another worker takes it. Never raises."""

    @abstractmethod
    def decode_failure(self, worker: WorkerInfo, failure: bytes) -> Exception:
        """Returns the exception that a worker has put into a message, encoded by `encode_failure`.

        If it cannot be rebuilt here, or the policy for the worker does not accept it, this is a RemoteError.
        """

    @abstractmethod
    def all_gather(
        self,
        topic: str,
        value: object,
        workers: Sequence[WorkerInfo],
        timeout: float,
        operation: str = "all_gather",
    ) -> Mapping[int, Any]:
        """Collects the values of several workers, this one included, on all of them.

        Args:
            topic: separates all_gathers of different purpose; every worker calls those of one topic in the same
                order.
            value: this worker's value, anything that pickles.
            workers: the participants.
            timeout: seconds, 0 for none.
            operation: the name of the function that the user has called, for errors and log lines.

        Returns:
            The values of the participants that are not lost, by wire id: that of a participant's latest
            incarnation, if it was started again.

        Raises:
            RpcTimeoutError: a participant did not call it in time.
        """

    # Threads.

    @abstractmethod
    def serving(self, message: Incoming) -> AbstractContextManager[object]:
        """Returns the context in which a request is handled, for a handler that continues on another thread."""

    @abstractmethod
    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Runs a task on one of the threads that run incoming calls."""

    @abstractmethod
    def blocking(self) -> AbstractContextManager[None]:
        """Returns a context for blocking on other workers; another thread runs incoming calls meanwhile."""

    def until_deadline(self, seconds: float) -> float:
        """Returns for how many seconds a wait for another worker may take on this thread; 0 for any time.

        That is the timeout of the wait, or what is left to the request that the thread serves, if that is less.
        """
        return seconds

    # The rest.

    @abstractmethod
    def extension(self, kind: type[E]) -> E:
        """Returns the agent's extension of this class."""

    @abstractmethod
    def traffic(self) -> Mapping[str, int]:
        """Returns `messages_sent`, `messages_received`, `bytes_sent` and `bytes_received` so far."""

    @abstractmethod
    def debug_info(self) -> Mapping[str, Any]:
        """Returns counts of live objects and of what has been sent."""

    @abstractmethod
    def join(self, timeout: float) -> None:
        """Waits until this worker can leave without losing a call, for at most so many seconds; 0 for no limit.

        In a static group all workers have to wait for it together: it returns when no call is in flight among
        them. In a dynamic group it returns when no call is in flight on this worker.

        Raises:
            RpcTimeoutError: it took longer; the text says what it waited for.
        """

    @abstractmethod
    def shutdown(self, *, graceful: bool, timeout: float, join: Callable[[], None] | None = None) -> None:
        """Leaves the group. Does nothing when called again.

        Any thread may call this while another one waits in a graceful shutdown, which ends then, too. So may a
        handler of a signal, a remote function, a callback or a finalizer. Where waiting might last for ever, the
        call returns before the agent has ended.

        Args:
            graceful: whether to wait first until nothing is lost.
            timeout: seconds to wait, 0 for no limit. The agent leaves when they are over, too.
            join: waits, on any thread; by default `join(timeout)`.

        Raises:
            RpcTimeoutError: the wait took longer.
            Exception: what `join` has raised, if nothing has ended the wait before.
        """

    @property
    def is_ending(self) -> bool:
        """Whether the agent is about to leave its group, or has left it."""
        return False

    @property
    def has_ended(self) -> bool:
        """Whether it has left its group after `shutdown`. One that may do so later calls `holder.clear` itself."""
        return True

    def leave_at_exit(self, end: WorkerEnd) -> None:  # noqa: ARG002
        """Leaves the group at once, as the process ends without `shutdown`. The others are told of the end."""
        self.shutdown(graceful=False, timeout=0)

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, has what the program may have of the agent do nothing, or raise an error.

        No method of the agent is called after this one. It takes no lock: threads that are gone may hold it.
        `why_useless` makes the error.
        """


_agents_here: "weakref.WeakSet[RpcAgent]" = weakref.WeakSet()
"""The agents of this process."""


class _ThreadState(threading.local):
    agent: RpcAgent | None = None
    """The agent that the thread belongs to."""


@final
class CurrentAgent:
    """Holds the current agent."""

    def __init__(self) -> None:
        self._default: RpcAgent | None = None
        self._afterwards = ExitStack()
        self.has_had_one = False
        """Whether this process has been a worker that has shut down."""
        self._thread = _ThreadState()
        self.parents: RpcAgent | None = None
        """In a forked child, the agent that its parent has."""
        self.why_none: Callable[[], NotInitializedError] = _not_initialized
        """Makes the error of a call when there is no current agent."""

    def get(self) -> RpcAgent | None:
        """Returns the calling thread's agent, or else that of the process."""
        return self._thread.agent or self._default

    def set_default(self, agent: RpcAgent, afterwards: ExitStack) -> None:
        """Sets the agent of the process, and a stack that is closed when it is forgotten."""
        self._default = agent
        self._afterwards = afterwards

    def clear(self, agent: RpcAgent) -> None:
        """Removes the agent of the process, if it is this one."""
        if self._default is agent:
            self.has_had_one = True
            self._default = None
            self._afterwards.close()

    def leave_to_parent(self, agent: RpcAgent, why_none: Callable[[], NotInitializedError]) -> None:
        """In a forked child, removes all agents. The one that was current in the parent is kept, unused."""
        self.parents, self.why_none = agent, why_none
        self._default, self._thread = None, _ThreadState()
        self._kept, self._afterwards = self._afterwards, ExitStack()

    def bind_thread(self, agent: RpcAgent) -> None:
        """Makes an agent the calling thread's, for as long as the thread lives."""
        self._thread.agent = agent

    @contextmanager
    def using(self, agent: RpcAgent) -> Iterator[None]:
        """Makes an agent the calling thread's inside a `with` block."""
        before = self._thread.agent
        self._thread.agent = agent
        try:
            yield
        finally:
            self._thread.agent = before


def _not_initialized() -> NotInitializedError:
    return NotInitializedError(
        "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework "
        "by calling `init_rpc`? (After shutdown, call it again.)"
    )


holder = CurrentAgent()


def current_agent() -> RpcAgent:
    """Returns the agent that this thread's calls go through.

    Raises:
        NotInitializedError: there is no current agent, as in a child that a worker has forked.
    """
    agent = holder._thread.agent or holder._default  # as `holder.get` does
    if agent is None:
        raise holder.why_none()
    return agent


def is_initialized() -> bool:
    """Returns whether there is a current agent."""
    return holder.get() is not None


def _refuse(agent: RpcAgent, *_args: Any, **_options: Any) -> NoReturn:
    """Raises NotInitializedError: any method of an inherited agent."""
    raise _error_in_child(agent.info.name, os.getppid())


@final
class _InheritedAgent(RpcAgent):
    """What an agent is in a forked child. It has the attributes of the agent, whose object it is."""

    is_inherited = True

    dynamic = property(_refuse)
    worker = incarnation = workers = end_of = connect = _refuse
    request = request_all = post = all_gather = _refuse
    encode_failure = decode_failure = _refuse
    serving = submit = blocking = extension = _refuse
    traffic = debug_info = join = _refuse

    def shutdown(self, *, graceful: bool, timeout: float, join: Callable[[], None] | None = None) -> None:
        """Does nothing: the parent leaves the group."""


@final
class _NoControlMessages:
    """Drops control messages, and the tasks of the control thread."""

    def _drop(self, *_args: Any, **_options: Any) -> None:
        pass

    on = send = run = _drop

    def kinds(self) -> Collection[str]:
        return ()

    def pending(self) -> int:
        return 0


def _error_in_child(name: str, parent: int) -> NotInitializedError:
    return NotInitializedError(
        f"process {os.getpid()} is a fork of worker {name!r} (process {parent}) and no worker: it has none of the "
        "threads and connections that this needs. Have the worker make the calls, and pass their results on; or "
        "start processes that make calls by 'spawn' or 'forkserver', and call init_rpc in them "
        "(docs/child_processes.md)"
    )


def leave_agents_to_parent() -> None:
    """Makes the agents of this process, a child, unusable."""
    parent, current = os.getppid(), holder.get()
    for agent in list(_agents_here):
        if not agent.is_inherited:
            agent.leave_to_parent(partial(_error_in_child, agent.info.name, parent))
            agent.control = _NoControlMessages()
            agent.__class__ = _InheritedAgent  # the object stays, to which references and others refer
    if current is not None:
        holder.leave_to_parent(current, partial(_error_in_child, current.info.name, parent))
