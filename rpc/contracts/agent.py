"""What an agent is, and which one is current.

Users call through the current agent. There is one holder of it: the process's default, which `init_rpc`
sets, unless the thread belongs to another agent, as the threads that run an agent's calls do.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, final

from ...errors import NotInitializedError
from ...proto.v1 import agent_pb2
from ..execution.futures import Future
from .control import ControlMessages
from .messages import Extension, Incoming, MessageType
from .options import RpcBackendOptions
from .worker import WorkerInfo
from .worker_end import WorkerEnd
from .worker_events import WorkerEventSource

__all__ = ["CurrentAgent", "Destination", "RpcAgent", "current_agent", "holder", "is_initialized"]

E = TypeVar("E", bound=Extension)

Destination = str | int | WorkerInfo
"""How users name a worker: by name, id or WorkerInfo."""


class RpcAgent(ABC):
    """Sends requests to the workers of a group and serves theirs."""

    info: WorkerInfo
    options: RpcBackendOptions
    control: ControlMessages
    worker_events: WorkerEventSource
    """What is told of workers that join and leave."""
    rpc_timeout: float
    """Seconds that a call without a timeout of its own may take, 0 for any."""

    @abstractmethod
    def worker(self, destination: Destination) -> WorkerInfo:
        """The worker meant. Raises UnknownWorkerError."""

    @abstractmethod
    def workers(self) -> Sequence[WorkerInfo]:
        """All workers of the group by id: in a static group with the lost ones, in a dynamic one without."""

    @abstractmethod
    def why_lost(self, worker: int) -> str | None:
        """Why a worker is lost; None while it is not known to be."""

    @abstractmethod
    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a worker now, so that its loss is noticed."""

    @abstractmethod
    def request(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        value: object,
        *,
        timeout: float | None = None,
        what: str | Sequence[str] = "the value",
        header: Callable[[agent_pb2.Envelope], None] | None = None,
        keep: object = None,
    ) -> Future[Any]:
        """Sends a request.

        Args:
            worker: one of `workers()`.
            kind: a message type that the other side has a handler for.
            value: the body, anything that pickles.
            timeout: seconds, 0 for none, None for `rpc_timeout`.
            what: what to call the value, or each of a tuple's items, in a SerializationError.
            header: fills in headers of the envelope.
            keep: is kept until the request is over: until it is answered, even if that is after its timeout,
                or never can be.

        Returns:
            A future of the answer. It fails with what the handler raised, WorkerLostError, SendFailedError or
            RpcTimeoutError.

        Raises:
            SerializationError: the value does not pickle; nothing was sent.
            NotInitializedError: the agent has shut down.
        """

    def request_all(
        self,
        workers: Sequence[WorkerInfo],
        kind: MessageType.ValueType,
        value: object,
        *,
        timeout: float | None = None,
        what: str | Sequence[str] = "the value",
        around: Callable[[WorkerInfo], AbstractContextManager[None]] = lambda _worker: nullcontext(),
    ) -> list[Future[Any]]:
        """Sends one request to several workers, as `request` does to each, and its bytes as seldom as possible.

        Args:
            workers: of `workers()`, each once.
            kind: see `request`.
            value: see `request`.
            timeout: see `request`.
            what: see `request`.
            around: makes the context in which the request to a worker is sent.

        Returns:
            A future for each worker, in their order. What keeps a request to one worker from being sent fails its
            future only.

        Raises:
            SerializationError: the value does not pickle; nothing was sent.
            NotInitializedError: the agent has shut down.
        """
        futures = []
        for worker in workers:
            with around(worker):
                futures.append(self.request(worker, kind, value, timeout=timeout, what=what))
        return futures

    @abstractmethod
    def post(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        value: object,
        *,
        what: str = "the value",
        header: Callable[[agent_pb2.Envelope], None] | None = None,
        reply_to: Incoming | None = None,
    ) -> int:
        """Sends a message that gets no answer.

        Args:
            worker: one of `workers()`.
            kind: a message type that the other side has a handler for.
            value: the body, anything that pickles.
            what: what to call the value in a SerializationError.
            header: fills in headers of the envelope.
            reply_to: a request that this message belongs to, so that it travels in that one's context.

        Returns:
            Bytes of the body and the tensors.

        Raises:
            WorkerLostError: the worker is known to be lost.
            SerializationError: the value does not pickle; nothing was sent.
        """

    @abstractmethod
    def serving(self, message: Incoming) -> AbstractContextManager[None]:
        """The scopes in which a request is handled, for a handler that goes on with it later."""

    @abstractmethod
    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Runs a task on one of the threads that run incoming calls."""

    @abstractmethod
    def blocking(self) -> AbstractContextManager[None]:
        """Around a wait for other workers inside a remote function, so that another thread takes its place."""

    @abstractmethod
    def extension(self, kind: type[E]) -> E:
        """The agent's extension of this class."""

    @abstractmethod
    def all_gather(
        self,
        topic: str,
        value: object,
        workers: Sequence[WorkerInfo],
        timeout: float,
        operation: str = "all_gather",
    ) -> Mapping[int, Any]:
        """Brings the values of several workers, this one among them, together on all of them.

        Args:
            topic: separates gatherings of different purpose; every worker goes through those of one topic in
                the same order.
            value: this worker's, anything that pickles.
            workers: who takes part.
            timeout: seconds, 0 for none.
            operation: what errors and the log call it: the function that the user has called.

        Returns:
            The values of those that live, by worker id.

        Raises:
            RpcTimeoutError: not everybody came in time.
        """

    @abstractmethod
    def debug_info(self) -> Mapping[str, Any]:
        """Counts of what is alive and of what has been sent."""

    @property
    @abstractmethod
    def dynamic(self) -> bool:
        """Is the group a dynamic one, whose workers join and leave at any time?"""

    @abstractmethod
    def join(self, timeout: float) -> None:
        """Returns when nothing would be lost by leaving.

        That is when no call is under way in the group, and all its workers must wait for it together; or, in
        a dynamic group, when none is on this worker.

        Args:
            timeout: seconds, 0 for none.

        Raises:
            RpcTimeoutError: it took longer; it says what for.
        """

    @abstractmethod
    def shutdown(self, *, graceful: bool, timeout: float) -> None:
        """Leaves the group, if `graceful` after `join(timeout)`. Doing it again does nothing."""

    def leave_at_exit(self, end: WorkerEnd) -> None:  # noqa: ARG002
        """Leaves the group at once, because the process ends without `shutdown`.

        Args:
            end: how it ends, which the other workers are to be told.
        """
        self.shutdown(graceful=False, timeout=0)


@final
class CurrentAgent:
    """The holder of the current agent."""

    def __init__(self) -> None:
        self._default: RpcAgent | None = None
        self._afterwards = ExitStack()
        self._of_thread = threading.local()

    def get(self) -> RpcAgent | None:
        """This thread's agent, else the process's."""
        return getattr(self._of_thread, "agent", None) or self._default

    def set_default(self, agent: RpcAgent, afterwards: ExitStack) -> None:
        """Sets the process's agent, and what is closed when it is forgotten."""
        self._default = agent
        self._afterwards = afterwards

    def forget(self, agent: RpcAgent) -> None:
        """Has the process no longer an agent, if it is this one."""
        if self._default is agent:
            self._default = None
            self._afterwards.close()

    def bind_thread(self, agent: RpcAgent) -> None:
        """Makes an agent that of the calling thread, for as long as the thread lives."""
        self._of_thread.agent = agent

    @contextmanager
    def using(self, agent: RpcAgent) -> Iterator[None]:
        """Makes an agent the calling thread's for a while."""
        before = getattr(self._of_thread, "agent", None)
        self._of_thread.agent = agent
        try:
            yield
        finally:
            self._of_thread.agent = before


holder = CurrentAgent()


def current_agent() -> RpcAgent:
    """The agent that this thread's calls go through.

    Raises:
        NotInitializedError: there is none.
    """
    agent = holder.get()
    if agent is None:
        raise NotInitializedError(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework "
            "by calling `init_rpc`? (After shutdown, call it again.)"
        )
    return agent


def is_initialized() -> bool:
    """Is there a current agent?"""
    return holder.get() is not None
