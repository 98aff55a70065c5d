"""The agent on gRPC, put together from its parts.

A request's way: `requests` packs the value and keeps the future; `messaging` lets the extensions add their
headers, puts tensor bytes into channels and the envelope into the peer's transport. At the peer, `network`
collects the payloads on the event loop, and on a thread of the executor `service` unpacks, runs the handler and
sends the answer the same way back.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, final

import torch

from ...c10d.torch_types import TorchStore
from ...errors import NotInitializedError
from ...proto.v1 import agent_pb2
from ..channels.broadcast.channel import BroadcastDependencies
from ..channels.router import PayloadReader
from ..collectives.all_gather import AllGatherService
from ..contracts.agent import Destination, RpcAgent, holder
from ..contracts.messages import Extension, Handler, Incoming, MessageType, extension_factories
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import SHUT_DOWN, EndKind, WorkerEnd
from ..execution.futures import Future
from ..membership.addresses import ListenAddress
from ..membership.members import Member
from ..membership.roster import RosterLog
from ..membership.worker_events import WorkerEvents
from .client import Client
from .codec import Codec
from .control import RetryingControlMessages
from .factories import AgentFactories
from .quiescence import Quiescence
from .server import Server
from .stats import CallCounter

__all__ = ["GrpcAgent"]

CLOSE_SECONDS = 5.0
"""How long a closing agent waits for threads that still run users' functions."""

FAILED_CLOSE_SECONDS = 0.5
"""The same if an error, or Ctrl-C, ends the program."""

MAX_NAMED = 8
"""How many missing workers a line names."""

E = TypeVar("E", bound=Extension)

log = logging.getLogger(__name__)


@final
class GrpcAgent(RpcAgent):
    """Made in three steps: the constructor, `listen`, and `open` once all members are known."""

    def __init__(
        self,
        info: WorkerInfo,
        options: RpcBackendOptions,
        group: str,
        roster: RosterLog | None = None,
        factories: AgentFactories = AgentFactories(),  # noqa: B008 - a frozen value
    ) -> None:
        """Args: who this is; how to behave; which group it joins, and the roster if it is dynamic; its parts."""
        self._process = os.getpid()
        self.info = info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self._dynamic = roster is not None
        self._closed = False
        self._failed: dict[int, str] = {}
        """The ids of workers that were lost other than by leaving, and why they are."""
        self._told: set[int] = set()
        """Of which of them `join` has said so."""
        self._shutdown = threading.Lock()
        self._control = RetryingControlMessages(self, factories.scheduler)
        self.control = self._control
        self._handlers: dict[MessageType.ValueType, Handler] = {
            MessageType.CONTROL: self._control.handler(),
            MessageType.GREETING: Handler(lambda _message: None),
        }
        self._activity = CallCounter()
        self._executor = factories.executor(
            options.num_worker_threads, f"gradwire-{info.name}", self._prepare_thread
        )
        self._worker_events = WorkerEvents(self._executor.submit, self.connect)
        self.worker_events = self._worker_events
        self._codec = Codec(info, options, self._handlers)
        self._all_gather_service = AllGatherService(self, self._codec)
        self._handlers.update(self._all_gather_service.handlers())
        self._client = Client(self._codec, self._handlers, self._executor, self._activity)
        self._server = Server(info, self._codec, self._handlers, self._executor, self._activity)
        pending = self._client.pending
        self._deadlines = self._client.deadlines = factories.deadlines(
            self._expire, pending.__contains__, pending.__len__, f"gradwire-deadlines-{info.name}"
        )
        self._network = self._codec.network = factories.network(info, options, group, self, roster)

    def listen(self, where: ListenAddress = ListenAddress()) -> str:  # noqa: B008 - a frozen value
        """Starts serving on an ephemeral port; returns the address at which others dial, host:port."""
        return self._network.listen(where)

    def open(self, members: Sequence[Member], store: TorchStore | None = None) -> None:
        """Makes the extensions, and lets the members of the group in.

        With a store, which all members have, large payloads for several of them are broadcast, and those that
        gather often do so through process groups.
        """
        self._network.open(members)
        self._worker_events.open([member.info for member in members])
        if store is not None:
            self._network.broadcasts.open(
                BroadcastDependencies(
                    store=store,
                    control=self.control,
                    worker=self.worker,
                    sent_again=self._codec.traffic.sent_again,
                )
            )
            self._all_gather_service.paths.open(store)
        for factory in extension_factories():
            extension = factory(self)
            self._handlers.update(extension.handlers())
            self._codec.add(extension)
        self._network.admit()

    def _prepare_thread(self) -> None:
        holder.bind_thread(self)
        # Reading torch's number of threads makes it hold on this thread. Its first matrix product would use all
        # cores otherwise, whatever set_num_threads has said, and be rounded differently from those that follow.
        torch.get_num_threads()

    # The group.

    def worker(self, destination: Destination) -> WorkerInfo:
        """The worker meant."""
        return self._network.worker(destination)

    def workers(self) -> Sequence[WorkerInfo]:
        """All workers of the group, by id."""
        return self._network.workers()

    def why_lost(self, worker: int) -> str | None:
        """Why a worker is lost, if it is."""
        return self._network.lost.get(worker)

    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a worker now."""
        self._network.connect(worker)

    @property
    def dynamic(self) -> bool:
        """Do workers join and leave at any time?"""
        return self._dynamic

    # Messages.

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
        """Sends a request; a future of its answer."""
        self._check_open()
        seconds = self.rpc_timeout if timeout is None else timeout
        return self._client.send(worker, kind, value, seconds, what=what, header=header, keep=keep)

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
        """Sends a request to several workers; futures of their answers."""
        self._check_open()
        seconds = self.rpc_timeout if timeout is None else timeout
        return self._client.send_to_all(workers, kind, value, seconds, what=what, around=around)

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
        """Sends a message that gets no answer; bytes of its body and tensors."""
        packed = self._codec.pack(value, what, worker, reply_to)
        envelope = agent_pb2.Envelope(type=kind)
        if header is not None:
            header(envelope)
        return self._codec.send(worker, kind, envelope, packed, reply_to).nbytes

    def serving(self, message: Incoming) -> AbstractContextManager[None]:
        """The scopes in which a request is handled."""
        return self._codec.scopes(message)

    def blocking(self) -> AbstractContextManager[None]:
        """Around a wait for other workers."""
        return self._executor.blocking()

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Runs a task on a thread of the executor."""
        self._executor.submit(task, *args)

    def extension(self, kind: type[E]) -> E:
        """The agent's extension of this class."""
        return next(extension for extension in self._codec.extensions if isinstance(extension, kind))

    def all_gather(
        self,
        topic: str,
        value: object,
        workers: Sequence[WorkerInfo],
        timeout: float,
        operation: str = "all_gather",
    ) -> dict[int, Any]:
        """See `Gatherings.all_gather`."""
        return self._all_gather_service.all_gather(topic, value, workers, timeout, operation)

    def _check_open(self) -> None:
        if self._closed:
            raise NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent")

    # What the network tells, on the event loop, and the deadlines, on their thread: nothing here may block.

    def on_announced(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """A message is here, but for its payloads."""
        self._server.on_announced(source, envelope)

    def on_dropped(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """The payloads of a message will not come."""
        self._server.arrivals.forget(source, envelope)

    def on_message(self, source: WorkerInfo, envelope: agent_pb2.Envelope, payloads: PayloadReader) -> None:
        """A message is here."""
        if envelope.type == MessageType.CANCEL:
            # Now: on a thread it would come after the calls that wait for one.
            self._server.arrivals.cancel(source, envelope)
            return
        run = self._client.complete if _is_answer(envelope) else self._server.serve
        self._executor.submit(run, source, envelope, payloads)

    def on_rejected(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """A message cannot be read."""
        self._executor.submit(self._refuse, source, envelope, error)

    def on_peer_joined(self, worker: WorkerInfo) -> None:
        """A worker has joined the dynamic group."""
        self._worker_events.joined(worker)

    def on_peer_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """A worker is gone for good."""
        self._worker_events.left(worker, end.reason)
        # Who leaves a dynamic group need not tell a worker that it has never talked to.
        if not end.orderly and not (self._dynamic and end.kind is EndKind.UNREACHABLE):
            self._failed[worker.id] = end.reason
        self._executor.submit(self._worker_lost, worker, end.reason)

    def _expire(self, identifier: int) -> None:
        # Not taken here: what is still pending when the executor closes is failed then.
        self._executor.submit(self._client.time_out, identifier)

    # On the executor's threads.

    def _refuse(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        self._codec.tell_unreadable(source, envelope, error)
        if _is_answer(envelope):
            self._client.refuse(source, envelope, error)
        else:
            self._server.refuse(source, envelope, error)

    def _worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        level = logging.WARNING if worker.id in self._failed else logging.INFO
        log.log(level, "worker %s is lost: %s", worker.name, reason)
        self._client.on_worker_lost(worker, reason)
        self._all_gather_service.on_worker_lost(worker)
        for extension in self._codec.extensions:
            extension.on_worker_lost(worker)

    # The rest.

    def debug_info(self) -> Mapping[str, Any]:
        """Counts of what is alive and of what has been sent (bytes of bodies and tensors)."""
        info: dict[str, Any] = {
            "name": self.info.name,
            "agent.thread_pool_size": self.options.num_worker_threads,
            "agent.num_idle_threads": self._executor.idle,
            "agent.num_pending_requests": self._executor.queued,
            "agent.client_active_calls": len(self._client.pending),
            "unanswered_calls": dict(self._client.unanswered()),
            "agent.server_active_calls": self._server.running.running,
            "agent.server_active_async_calls": self._server.deferred.running,
            "executor_threads": self._executor.threads,
            "lost_workers": {self.worker(lost).name: why for lost, why in self._network.lost.items()},
            **self._codec.traffic.counts(),
            "transports": self._network.transport_names(),
            "broadcast_groups": self._network.broadcasts.groups,
            "all_gather_groups": self._all_gather_service.paths.formed,
        }
        for extension in self._codec.extensions:
            info.update(extension.live_objects())
        return info

    def join(self, timeout: float) -> None:
        """Returns when nothing would be lost by leaving."""
        quiescence = Quiescence(self, self._activity, self._all_gather_service, self._client.unanswered)
        if self._dynamic:
            quiescence.wait_here(timeout)
        else:
            self._tell_missing(quiescence.wait_everywhere(timeout, self._failed))

    def _tell_missing(self, failed: Mapping[int, str]) -> None:
        """Says once for each worker that has failed that it is not there to shut down."""
        new = [worker for worker in self.workers() if worker.id in failed.keys() - self._told]
        missing = [f"{worker.name} ({failed[worker.id]})" for worker in new]
        self._told.update(failed)
        if missing:
            more = f", and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
            names = ", ".join(missing[:MAX_NAMED])
            log.warning("worker %s shuts down without %s%s", self.info.name, names, more)

    def shutdown(self, *, graceful: bool, timeout: float) -> None:
        """Leaves the group, when everybody does if `graceful`."""
        if os.getpid() != self._process:
            return  # in a forked child, which has none of the threads
        with self._shutdown:
            if self._closed:
                return
            end = SHUT_DOWN
            try:
                if graceful:
                    self.join(timeout)
            except Exception:
                raise
            except BaseException as error:  # such as Ctrl-C, which ends the program
                end = WorkerEnd.by_error(error)
                raise
            finally:
                self._close(end)

    def leave_at_exit(self, end: WorkerEnd) -> None:
        """Leaves the group at once."""
        if os.getpid() != self._process:
            return
        with self._shutdown:
            if not self._closed:
                self._close(end)

    def _close(self, end: WorkerEnd) -> None:
        self._closed = True
        self._worker_events.close()
        self._network.leave()
        for extension in self._codec.extensions:
            extension.close()
        self._all_gather_service.paths.close()
        self._network.disconnect(end)
        self._control.close()
        self._deadlines.close()
        self._client.close(NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent"))
        self._executor.close(CLOSE_SECONDS if end.orderly else FAILED_CLOSE_SECONDS)
        self._network.release()


def _is_answer(envelope: agent_pb2.Envelope) -> bool:
    return envelope.type in (MessageType.RESULT, MessageType.ERROR)
