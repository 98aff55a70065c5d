"""The agent on gRPC, put together from its parts.

A request goes straight down: `caller` has its value pickled and registers it, `codec` encodes it (the extensions
add their headers) and puts tensor bytes into channels, and the receiver's `Peer` has its transport send the
envelope. A message goes straight up: the sender's `Peer` collects its payloads, the dispatcher hands it to a
thread of the executor, and there `server` decodes it, runs its handler and sends the answer, or `caller` completes
the call that it answers. A thread that waits for an answer may read it itself.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import torch

from ...c10d.stores.views import PrefixStore
from ...errors import AnswerFailedError, NotInitializedError, UnknownWorkerError
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..channels.broadcast import BroadcastDependencies
from ..channels.payloads import PayloadReader
from ..collectives.all_gather import AllGatherService
from ..contracts.agent import CANCELLED, ControlValues, Destination, RpcAgent, holder
from ..contracts.extension import ExtensionFactory
from ..contracts.messages import CANCEL, CONTROL, ERROR, RESULT, Incoming, MessageType, Outgoing, Request
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import SHUT_DOWN, Member, WorkerEnd, WorkerInfo, WorkerWatcher
from ..contracts.worker_events import WorkerEvents
from ..execution.executor import Executor
from ..execution.futures import Future
from ..execution.timers import Deadlines, DeadlinesFactory, Scheduler, SerialThread, Task
from ..membership.addresses import ListenAddress, connectable
from ..membership.roster import RosterLog
from ..peers.control import ControlStreams
from ..peers.flow_control import MIN_ANSWER_BYTES, Backlogs, FlowControl
from ..peers.link import FailureLog
from ..peers.peer import Pause, Peer
from ..requests.call import CallCounter, CallParts
from ..requests.caller import Caller
from ..requests.codec import Codec, Extensions, Values
from ..requests.multi_sender import MultiSender
from ..requests.server import CONFIRMED, MIN_WAIT_S, Server
from ..wire.pickling import Packer
from .network import Network
from .shutdown import Quiescence, Shutdown

__all__ = ["AgentFactories", "GrpcAgent"]

CLOSE_TIMEOUT_S = 5.0
"""Seconds that a closing agent waits for threads that still run users' functions."""

HASTY_CLOSE_TIMEOUT_S = 0.5
"""The same if it has not waited for its calls to end."""

_ANSWERS = frozenset({RESULT, ERROR})

E = TypeVar("E")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFactories:
    """Makes the parts of one GrpcAgent that can be exchanged.

    Fault injection wraps the network. Tests of the protocols simulate network, threads and time, so that every
    schedule can be tried and repeated.

    network: carries envelopes; takes the worker, its options, the group's name, the log of its members, and
        the executor.
    executor: runs incoming calls; see Executor.
    deadlines: keeps timeouts; see Deadlines.
    scheduler: runs tasks on the control thread, given its name and a task to run first; see Scheduler.
    control: sends control messages; see ControlStreams.
    """

    network: Callable[[WorkerInfo, RpcBackendOptions, str, RosterLog, Executor], Network] = Network
    executor: Callable[[int, str, Task, float], Executor] = Executor
    deadlines: DeadlinesFactory = Deadlines
    scheduler: Callable[[str, Task], Scheduler] = SerialThread
    control: Callable[[Mapping[int, Peer], ControlValues, Scheduler], ControlStreams] = ControlStreams


@final
class GrpcAgent(RpcAgent):
    """Made in three steps: the constructor, `listen`, and `open` once all members are known."""

    control: ControlStreams
    worker_events: WorkerEvents

    def __init__(
        self,
        info: WorkerInfo,
        options: RpcBackendOptions,
        group: str,
        roster: RosterLog,
        *,
        extensions: Sequence[ExtensionFactory] = (),
        factories: AgentFactories = AgentFactories(),
    ) -> None:
        """Makes an agent that does not listen yet, in a group whose name is unique among all groups.

        Its extensions are made in this order, when the members are known.
        """
        self.info = info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self._dynamic = roster.dynamic
        self._extension_factories = extensions
        self._closed = False
        self._group_store: PrefixStore | None = None
        self._failures = FailureLog(dynamic=self._dynamic)
        self._executor = factories.executor(
            options.num_worker_threads, f"gradwire-{info.name}", self._prepare_thread, options.busy_poll
        )
        self.worker_events = WorkerEvents(self._executor.submit, self.connect)
        self._network = factories.network(info, options, group, roster, self._executor)
        peers = self.peers = self._network.peers
        packer = Packer(options.pickler)
        values = self._values = Values(info, options, packer, self._network.audit)
        scheduler = factories.scheduler(f"gradwire-control-{info.name}", lambda: holder.bind_thread(self))
        self.control = factories.control(peers.by_id, values, scheduler)
        self._extensions = Extensions(packer)
        self._codec = Codec(
            options, values, self._extensions, self.control, self._network.channels.devices.staging
        )
        self._calls, self._flow_control = CallCounter(), FlowControl(options.flow_control)
        self._nesting = self._flow_control.nesting
        parts = CallParts(
            peers, self._extensions, self._executor, self._network.call_soon, self._calls, self._flow_control
        )
        self._caller = Caller(parts, self._codec, factories.deadlines)
        self._multi_sender = MultiSender(parts, self._caller, self._codec, self._network.channels.broadcasts)
        backlogs = Backlogs(options.flow_control, self._network.call_soon)
        self._server = Server(parts, self._codec, backlogs, options.flow_control, factories.deadlines)
        self._all_gather_service = AllGatherService(self)
        self._extensions.add_handlers(self._all_gather_service.handlers())
        self.control.on(CONFIRMED, self._caller.on_confirmed, is_quick=True)
        self.control.on(CANCELLED, self._server.on_cancelled, is_quick=True)
        self._dispatcher = _Dispatcher(self._caller, self._server, self.control, self._extensions, self._executor)
        self._watchers: list[WorkerWatcher] = [
            self._server,  # first: nothing of a lost worker begins after the program has been told
            self.worker_events,
            self._failures,
            self._caller,
            self.control,
            self._all_gather_service,
        ]
        """Are told what becomes of other workers, in this order; extensions follow."""
        self._quiescence = Quiescence(
            self, self._calls, self._server, self._all_gather_service, self._caller.count_unanswered
        )
        self._shutdown = Shutdown(
            info.name,
            self._close,
            self._quiescence.describe,
            self._caller.finalizer_calls.is_collecting_here,
            self._network,
            self._executor,
        )

    def listen(self, where: ListenAddress) -> str:
        """Starts serving; returns the address at which others dial."""
        return self._network.listen(where, self._dispatcher, self._watchers)

    def open(self, members: Sequence[Member], store: PrefixStore | None = None) -> None:
        """Makes the extensions, and lets all members of the group in.

        The store is a part of one that all members have, for process groups that carry large payloads and frequent
        values. The agent closes it.
        """
        self._group_store = store
        self._network.open(members, self.control)
        self.worker_events.open([member.info for member in members])
        if store is not None:
            first = [member for member in members if member.info.wire_id == member.info.id]
            self._network.channels.broadcasts.open(
                BroadcastDependencies(
                    store=store,
                    control=self.control,
                    peer=lambda worker: self.peers.of(worker).channels,
                    on_resend=self.peers.of(self.info).traffic.sent_again,
                    may_form=connectable(first, insecure=self.options.insecure),
                    insecure=self.options.insecure,
                )
            )
        for factory in self._extension_factories:
            self._extensions.add(extension := factory(self))
            self._watchers.append(extension)
        self._network.admit()

    def _prepare_thread(self) -> None:
        holder.bind_thread(self)
        # Reading torch's number of threads makes it hold on this thread, from its first matrix product on.
        torch.get_num_threads()

    @property
    def dynamic(self) -> bool:
        """Whether workers join and leave at any time."""
        return self._dynamic

    def worker(self, destination: Destination) -> WorkerInfo:
        """Returns the worker with this name, id or WorkerInfo."""
        peer = self.peers.by_name.get(destination) if type(destination) is str else None
        return (peer or self.peers.find(destination)).info

    def incarnation(self, wire_id: int) -> WorkerInfo:
        """Returns the worker, current or former, with this wire id."""
        peer = self.peers.by_id.get(wire_id)
        if peer is None:
            raise UnknownWorkerError(wire_id, [each.name for each in self.workers()])
        return peer.info

    def is_member(self, worker: int) -> bool:
        """Returns whether a worker with this wire id is in the group, or has been."""
        return worker in self.peers.by_id

    def workers(self) -> Sequence[WorkerInfo]:
        """Returns all workers of the group, by id."""
        return [peer.info for peer in self.peers.current()]

    def end_of(self, worker: int) -> WorkerEnd | None:
        """Returns how a worker ended, if it is lost."""
        peer = self.peers.by_id.get(worker)
        return peer.end if peer is not None else None

    def check_present(self, workers: Iterable[int]) -> None:
        """Raises WorkerLostError or WorkerSuspectError if one of these workers is lost, or suspect."""
        for worker in workers:
            peer = self.peers.by_id.get(worker)
            if peer is not None and (absence := peer.absence) is not None:
                raise absence.cause(peer.info.name)

    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a worker now."""
        self.peers.of(worker).transport.connect()

    def request(self, worker: WorkerInfo, request: Request) -> Future[Any]:
        """Sends a request and returns a future of its answer."""
        if self._closed:
            raise self._closed_error()
        return self._caller.send(worker, request, self.rpc_timeout if request.timeout is None else request.timeout)

    async def request_async(self, worker: WorkerInfo, request: Request) -> Future[Any]:
        """Sends a request, when there is capacity for it, and returns a future of its answer."""
        return await self._caller.send_async(worker, request, self._timeout_of(request))

    def request_all(
        self,
        workers: Sequence[WorkerInfo],
        request: Request,
        around: Callable[[WorkerInfo], AbstractContextManager[None]] = lambda _worker: nullcontext(),
    ) -> list[Future[Any]]:
        """Sends a request to several workers and returns futures of their answers."""
        return self._multi_sender.send_all(workers, request, self._timeout_of(request), around)

    def _timeout_of(self, request: Request) -> float:
        if self._closed:
            raise self._closed_error()
        return self.rpc_timeout if request.timeout is None else request.timeout

    def _closed_error(self) -> NotInitializedError:
        return NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent")

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
        """Sends a message that gets no answer; returns the bytes of its body and tensors."""
        device_map = self._codec.device_map(worker, reply_to)
        packed = self._values.pack(value, label, worker, device_map, is_answer=reply_to is not None)
        envelope = agent_pb2.Envelope(type=kind)
        if header is not None:
            header(envelope)
        has_users = self._extensions.handlers[kind].user_values
        message = Outgoing(worker, envelope, *packed, reply_to, has_users, device_map)
        peer = self.peers.by_id[worker.wire_id]
        self._codec.send(peer, message)
        if reply_to is not None:  # an item of a stream, of which there may be any number
            self._server.backlogs.on_answer(peer.backlog, max(message.nbytes, MIN_ANSWER_BYTES))
        return message.nbytes

    def postpone(self, worker: WorkerInfo, resume: Callable[[], None]) -> bool:
        """Postpones what would send a worker more, if too much is queued for it."""
        return self._server.backlogs.add(self.peers.of(worker).backlog, resume, is_call=False)

    def encode_failure(self, error: BaseException) -> bytes:
        """Returns an exception as other workers decode it."""
        return self._values.encode_failure(error)

    def decode_failure(self, worker: WorkerInfo, failure: bytes) -> Exception:
        """Returns the exception that a worker has put into a message, or its text."""
        return self._values.decode_failure(worker, failure)

    def all_gather(
        self,
        topic: str,
        value: object,
        workers: Sequence[WorkerInfo],
        timeout: float,
        operation: str = "all_gather",
    ) -> dict[int, Any]:
        """Collects the values of several workers on all of them: see `AllGatherService.all_gather`."""
        return self._all_gather_service.all_gather(topic, value, workers, timeout, operation)

    # Threads.

    @contextmanager
    def serving(self, message: Incoming) -> Iterator[None]:
        """Context manager in which a request is handled."""
        scope = self._extensions.scope(message) or nullcontext()
        with self._nesting.at(message.envelope.depth + 1), scope:
            yield

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Runs a task on a thread of the executor."""
        self._executor.submit(task, *args)

    def blocking(self) -> AbstractContextManager[None]:
        """Returns a context for blocking on other workers."""
        return self._executor.blocking()

    def until_deadline(self, seconds: float) -> float:
        """Returns a timeout, or what is left to the request that the calling thread serves, if that is less."""
        deadline = self._nesting.deadline
        if not deadline:
            return seconds
        left = max(MIN_WAIT_S, deadline - time.monotonic())
        return min(seconds, left) if seconds else left

    def extension(self, kind: type[E]) -> E:
        """Returns the agent's extension of this class."""
        found: E = self._extensions.by_class[kind]
        return found

    def traffic(self) -> Mapping[str, int]:
        """Returns the messages and bytes that this worker has sent and received."""
        return self.peers.traffic()

    def debug_info(self) -> Mapping[str, Any]:
        """Returns counts of live objects and of what has been sent (bytes of bodies and tensors)."""
        peers = self.peers.all()
        return {
            "name": self.info.name,
            "agent.thread_pool_size": self.options.num_worker_threads,
            "agent.num_idle_threads": self._executor.idle,
            "agent.num_pending_requests": self._executor.queued,
            "agent.client_active_calls": len(self._caller.in_flight),
            "unanswered_calls": dict(self._caller.count_unanswered()),
            "agent.server_active_calls": len(self._calls.running),
            "agent.server_active_async_calls": len(self._server.deferred),
            "executor_threads": self._executor.threads,
            "links": self.peers.describe(),
            "lost_workers": {each.info.name: each.end.reason for each in peers if each.end is not None},
            **self.traffic(),
            "traffic": {
                each.info.name: each.traffic.as_json() for each in peers if each.is_used and each.traffic.is_used
            },
            "refused_messages": dict(self._values.refused),
            "audit": self._network.audit.counts(),
            "transports": {each.info.name: each.transport.name for each in self.peers.current()},
            "channels": {each.info.name: each.large_channel for each in self.peers.current()},
            "cuda": self._network.channels.device_figures(),
            "flow_control": {each.info.name: self._flow_figures(each) for each in self.peers.current()},
            "broadcast_groups": self._network.channels.groups,
            **self._all_gather_service.describe(),
            **self._extensions.live_objects(),
        }

    def _flow_figures(self, peer: Peer) -> Mapping[str, int]:
        return {
            **self._flow_control.figures(peer.window),
            "send_queue_bytes": peer.queued_bytes(),
            **peer.received.figures(),
            **self._server.backlogs.figures(peer.backlog),
            "parked_requests": peer.parked_requests,
        }

    def join(self, timeout: float) -> None:
        """Waits until this worker can leave without losing a call."""
        if self._dynamic:
            began = time.monotonic()
            self._quiescence.wait_here(timeout)
            self._network.drain(max(MIN_WAIT_S, timeout - (time.monotonic() - began)) if timeout else 0.0)
        else:
            self._failures.on_shutdown(self, self._quiescence.wait_everywhere(timeout, self._failures.failed))
            self._server.answering.wait_for_none(CLOSE_TIMEOUT_S)  # the others need its answers to leave too

    @property
    def is_ending(self) -> bool:
        """Whether the agent ends, or has ended."""
        return self._shutdown.is_ending

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended."""
        return self._shutdown.has_ended

    def shutdown(self, *, graceful: bool, timeout: float, join: Callable[[], None] | None = None) -> None:
        """Leaves the group; if `graceful`, when all its workers do."""
        if graceful:
            self._shutdown.wait_and_end(partial(self.join, timeout) if join is None else join, timeout)
        else:
            self._shutdown.end(SHUT_DOWN)

    def leave_at_exit(self, end: WorkerEnd) -> None:
        """Leaves the group because the process ends: at once, unless a graceful shutdown has begun."""
        self._shutdown.end_at_exit(end)

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, has futures, streams, contexts and events do nothing, or raise an error."""
        self._executor.leave_to_parent(why_useless)
        self._extensions.leave_to_parent(why_useless)
        self.worker_events.leave_to_parent(why_useless)

    def _close(self, end: WorkerEnd, in_order: bool) -> None:
        self._closed = True
        self._calls.close()
        self._server.answering.close()
        self.worker_events.close()
        self._network.leave()
        self._extensions.close()
        self._all_gather_service.close()
        self._network.disconnect(end)
        self.control.close()
        self._caller.stop_deadlines()
        self._server.close()
        self._caller.fail_all(self._closed_error())
        self._executor.close(CLOSE_TIMEOUT_S if in_order else HASTY_CLOSE_TIMEOUT_S)
        self._network.release()
        if self._group_store is not None:  # which would keep a store of torch's, its server and its port
            self._group_store.close()
        holder.clear(self)


@final
class _Dispatcher:
    """Hands answers to the calls that wait for them, and requests to the server: a MessageListener."""

    def __init__(
        self,
        caller: Caller,
        server: Server,
        control: ControlStreams,
        extensions: Extensions,
        executor: Executor,
    ) -> None:
        self._caller = caller
        self._server = server
        self._control = control
        self._extensions = extensions
        self._executor = executor

    def on_announced(self, peer: Peer, envelope: agent_pb2.Envelope) -> Pause:
        self._take_control(peer, envelope)
        self._server.arrive(peer, envelope)
        return peer.received.pause

    def on_dropped(self, peer: Peer, envelope: agent_pb2.Envelope) -> None:
        self._lose(peer, envelope, "its connection broke")

    def _lose(self, peer: Peer, envelope: agent_pb2.Envelope, reason: str) -> None:
        """Handles a message whose payloads do not come."""
        if envelope.id:  # a call, which fails with its worker
            self._server.drop((peer.id, envelope.id))
            return
        name, absence = peer.info.name, peer.absence
        error = absence.cause(name) if absence is not None else AnswerFailedError(name, reason)
        self._executor.submit(self._extensions.on_decode_error, peer.info, envelope, error)

    def on_message(
        self, peer: Peer, envelope: agent_pb2.Envelope, payloads: PayloadReader, nbytes: int, *, announced: bool
    ) -> Pause:
        kind = envelope.type
        if not announced and envelope.HasField("control") and self._control.receive(peer.control, envelope):
            if kind == CONTROL:
                self._executor.submit(self._control.process, peer.control)
            elif kind in _ANSWERS or kind == CANCEL:
                self._control.process_later(peer.control)
            # else whoever serves the request does it first
        if kind == CONTROL:
            pass  # it has nothing else
        elif kind == CANCEL:
            self._server.cancel(peer, envelope.id)
        elif kind in _ANSWERS:
            self._caller.receive(peer, envelope, payloads)
        else:
            call = self._server.find(peer, envelope) if announced else self._server.arrive(peer, envelope)
            call.payloads = payloads
            pause = peer.received.add(nbytes)
            self._executor.submit(self._server.serve, call)
            return pause
        return None

    def on_rejected(self, peer: Peer, envelope: agent_pb2.Envelope, error: Exception) -> Pause:
        self._take_control(peer, envelope)
        if isinstance(error, PayloadLostError) and not envelope.id:
            self._lose(peer, envelope, str(error))
            return None
        if envelope.type in _ANSWERS:
            then = self._caller.note_rejected(peer, envelope, error)
        else:
            then = partial(self._server.reject, peer, envelope, error)
        pause = peer.received.add(0)
        self._executor.submit(self._reject, peer, envelope, error, then)
        return pause

    def _take_control(self, peer: Peer, envelope: agent_pb2.Envelope) -> None:
        """Takes the control messages of an envelope whose message is not served now."""
        if envelope.HasField("control") and self._control.receive(peer.control, envelope):
            self._control.process_later(peer.control)

    def _reject(
        self, peer: Peer, envelope: agent_pb2.Envelope, error: Exception, then: Callable[[], None]
    ) -> None:
        """Runs on a thread of the executor."""
        peer.received.begin()
        self._extensions.on_decode_error(peer.info, envelope, error)
        then()
