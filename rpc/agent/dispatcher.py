"""The way up of a message: from the network to the client or the server."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import final

from ...errors import LossCause
from ...proto.v1 import agent_pb2
from ..channels.payloads import PayloadReader
from ..collectives.all_gather import AllGatherService
from ..contracts.messages import CANCEL, CONTROL, ERROR, RESULT
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.executor import Executor
from ..membership.worker_events import WorkerEvents
from ..peers.control import ControlStreams
from ..peers.network_listener import Pause
from ..peers.received_requests import ReceivedRequests
from ..requests.caller import Caller
from ..requests.extensions import Extensions
from ..requests.server import Server
from .failure_log import FailureLog

__all__ = ["Dispatcher"]

log = logging.getLogger(__name__)

ANSWERS = frozenset({RESULT, ERROR})


@final
class Dispatcher:
    """Hands answers to the requests that wait for them, and requests to the server, on the executor's threads.

    The methods that begin with `on_` are those of NetworkListener: they run on any thread and never block.
    """

    def __init__(
        self,
        caller: Caller,
        server: Server,
        all_gathers: AllGatherService,
        extensions: Extensions,
        worker_events: WorkerEvents,
        executor: Executor,
        received: ReceivedRequests,
        control: ControlStreams,
        failures: FailureLog,
        *,
        dynamic: bool,
    ) -> None:
        """Makes the dispatcher of one agent.

        Args:
            caller: completes the calls of this worker, and sends those to workers that are back.
            server: runs requests.
            all_gathers: is told of lost workers.
            extensions: are told of workers that are suspect, back or lost, and of messages that cannot be decoded.
            worker_events: is told of workers that join, leave or do not answer.
            executor: runs what may block.
            received: counts the requests that wait for a thread.
            control: takes the control messages that envelopes bring; is told of workers that are back, or lost.
            failures: logs workers that fail.
            dynamic: whether the group is a dynamic one.
        """
        self._caller = caller
        self._server = server
        self._all_gathers = all_gathers
        self._extensions = extensions
        self._worker_events = worker_events
        self._executor = executor
        self._received = received
        self._control = control
        self._dynamic = dynamic
        self._failures = failures
        self._lock = threading.Lock()
        self._changes: dict[int, deque[Callable[[], None]]] = {}
        """By worker, the changes of its state that are being handled, in their order. Guarded by the lock."""

    def on_announced(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> Pause:
        """Handles an envelope whose payloads have not arrived yet."""
        self._take_control(source, envelope)
        self._server.arrive(source, envelope)
        return self._received.pause_of(source)

    def on_dropped(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Handles a message whose payloads will not arrive."""
        self._server.calls.discard((source.wire_id, envelope.id))

    def on_message(
        self,
        source: WorkerInfo,
        envelope: agent_pb2.Envelope,
        payloads: PayloadReader,
        *,
        announced: bool,
        nbytes: int = 0,
    ) -> Pause:
        """Handles a message that has arrived."""
        kind = envelope.type
        if not announced and envelope.HasField("control") and self._control.receive(source, envelope):
            if kind == CONTROL:
                self._executor.submit(self._control.process, source)
            elif kind in ANSWERS or kind == CANCEL:
                self._control.process_later(source)
            # else whoever serves the request does it first
        if kind == CONTROL:
            pass  # it has nothing else
        elif kind == CANCEL:
            self._server.cancel(source, envelope)
        elif kind in ANSWERS:
            self._caller.receive(source, envelope, payloads)
        else:
            call = self._server.find(source, envelope) if announced else self._server.arrive(source, envelope)
            call.payloads = payloads
            pause = self._received.add(source, nbytes)
            self._executor.submit(self._server.serve, call)
            return pause
        return None

    def on_rejected(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> Pause:
        """Handles a message that cannot be read."""
        self._take_control(source, envelope)
        pause = self._received.add(source, 0)
        self._executor.submit(self._reject, source, envelope, error)
        return pause

    def _take_control(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Takes the control messages of an envelope whose message is not served now."""
        if envelope.HasField("control") and self._control.receive(source, envelope):
            self._control.process_later(source)

    def on_peer_joined(self, worker: WorkerInfo) -> None:
        """Handles a worker that has joined the group, maybe in the place of another one."""
        self._worker_events.record_joined(worker)
        self._executor.submit(self._all_gathers.on_worker_joined, worker)
        self._executor.submit(self._extensions.on_worker_joined, worker)

    def on_peer_lost(self, worker: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the loss of a worker."""
        if not end.orderly:  # who has left on purpose has sent its last calls on purpose, too
            self._server.calls.drop_worker(worker)  # here and now: `_lose` waits for a thread as they do
        self._worker_events.record_left(worker, end.reason)
        self._handle_change(worker, partial(self._lose, worker, end, unsent))

    def on_peer_suspect(self, worker: WorkerInfo, reason: str, unsent: Collection[bytes], *, waits: bool) -> None:
        """Handles a worker that does not answer: see NetworkListener."""
        self._worker_events.record_suspect(worker, reason)
        # Here and now: what comes by the next connection is not concerned.
        self._server.calls.cancel_all(worker)
        concerned = self._caller.sent_to(worker, waits=waits)
        self._extensions.on_connection_broken(worker)
        # By itself: callbacks of the futures may wait until the worker is back.
        self._executor.submit(self._caller.on_worker_suspect, worker, reason, concerned, unsent)
        self._handle_change(worker, partial(self._suspect, worker, reason))

    def on_peer_back(self, worker: WorkerInfo) -> None:
        """Handles a suspect worker that answers again."""
        self._worker_events.record_back(worker)
        self._executor.submit(self._caller.send_postponed, worker)
        self._handle_change(worker, partial(self._take_back, worker))

    def _handle_change(self, worker: WorkerInfo, change: Callable[[], None]) -> None:
        """Has a thread of the executor handle a change of a worker's state, after those before it."""
        with self._lock:
            changes = self._changes.setdefault(worker.wire_id, deque())
            changes.append(change)
            if len(changes) > 1:
                return
        self._executor.submit(self._handle_changes, changes)

    # On the executor's threads.

    def _reject(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        self._received.begin(source)
        self._extensions.on_decode_error(source, envelope, error)
        if envelope.type in ANSWERS:
            self._caller.on_rejected(source, envelope, error)
        else:
            self._server.reject(source, envelope, error)

    def _handle_changes(self, changes: deque[Callable[[], None]]) -> None:
        while True:
            try:
                changes[0]()
            except Exception:
                log.exception("a change of a worker's state cannot be handled")
            with self._lock:
                changes.popleft()
                if not changes:
                    return

    def _suspect(self, worker: WorkerInfo, reason: str) -> None:
        self._extensions.on_worker_suspect(worker, reason)

    def _take_back(self, worker: WorkerInfo) -> None:
        self._control.on_worker_back(worker)
        self._extensions.on_worker_back(worker)

    def _lose(self, worker: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        # Who leaves a dynamic group need not say goodbye to a worker that it has never talked to.
        if end.orderly or (self._dynamic and end.cause is LossCause.UNREACHABLE):
            log.info("worker %s is lost: %s", worker.name, end.reason)
        else:
            self._failures.on_lost(worker, end.reason)
        self._caller.on_worker_lost(worker, end, unsent)
        self._server.drop_worker(worker)
        self._control.on_worker_lost(worker, end.as_error(worker.name))
        self._all_gathers.on_worker_lost(worker)
        self._extensions.on_worker_lost(worker, end)
