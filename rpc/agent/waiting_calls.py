"""The calls to workers that do not answer, which are sent when these are back.

A call waits without a thread: its message is complete, but for its payloads, which go by the new connection.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import final

from ...errors import Outcome, WorkerSuspectError
from ..contracts.messages import Outgoing
from ..contracts.worker import WorkerInfo
from ..execution.executor import Executor
from .codec import Codec
from .extensions import Extensions
from .network import Network
from .pending import PendingRequest, PendingRequests

__all__ = ["WaitingCalls"]

_Call = tuple[PendingRequest, Outgoing]


@final
class WaitingCalls:
    """The calls of one agent that have not been sent for that reason. Safe to use from any thread."""

    def __init__(
        self,
        requests: PendingRequests,
        codec: Codec,
        network: Network,
        extensions: Extensions,
        executor: Executor,
        on_sent: Callable[[PendingRequest, Outgoing], None],
        on_not_sent: Callable[[int, WorkerInfo], None],
    ) -> None:
        """Has no calls yet.

        Args:
            requests: completes those that fail.
            codec: sends messages.
            network: knows which workers answer.
            extensions: have noted of each message that it is about to be sent.
            executor: its threads send.
            on_sent: called with each call that has been sent.
            on_not_sent: called with the id and the worker of each call that will not be.
        """
        self._requests = requests
        self._codec = codec
        self._network = network
        self._extensions = extensions
        self._executor = executor
        self._on_sent = on_sent
        self._on_not_sent = on_not_sent
        self._lock = threading.Lock()
        self._calls: dict[int, OrderedDict[int, _Call]] = {}
        """By worker and id of the request. Guarded by the lock."""

    def add(self, pending: PendingRequest, message: Outgoing) -> None:
        """Has a call wait until its worker is back or lost, or the call has failed otherwise."""
        pending.begin_wait(partial(self._drop, pending))
        self._put(pending, message)
        pending.future.add_done_callback(lambda _: self._drop(pending))
        # Its worker's state may have changed before it was there to be found.
        absence = self._network.absence(pending.worker)
        if absence is None:
            self._executor.submit(self.send_to, pending.worker)
        elif not absence.waits:
            error = absence.as_error(pending.worker.name)
            self._requests.fail(self._requests.take(pending.identifier), error, Outcome.NOT_SENT)

    def send_to(self, worker: WorkerInfo) -> None:
        """Sends the calls to a worker that is back. Runs on a thread of the executor."""
        with self._lock:
            identifiers = list(self._calls.get(worker.wire_id, ()))
        for identifier in identifiers:
            if (call := self._take(worker, identifier)) is not None:
                # Before it is looked for: who takes it from now on does not count it as not sent.
                call[0].waits_for_worker = False
                self._send(*call)

    def _send(self, pending: PendingRequest, message: Outgoing) -> None:
        if pending.identifier not in self._requests.pending:
            self._abort(pending, message)
            return
        pending.tell_timeout(message.envelope)
        try:
            self._codec.send_prepared(message)
        except WorkerSuspectError:  # again: what is told of that comes later
            self._put(pending, message)
        except Exception as error:
            self._abort(pending, message)
            self._requests.fail(self._requests.take(pending.identifier), error, Outcome.NOT_SENT)
        else:
            if message.user_values:
                self._extensions.on_postponed_sent(message)
            self._on_sent(pending, message)

    def _put(self, pending: PendingRequest, message: Outgoing) -> None:
        pending.waits_for_worker = True
        if message.user_values:
            self._extensions.on_send_postponed(message)
        with self._lock:
            calls = self._calls.setdefault(pending.worker.wire_id, OrderedDict())
            calls[pending.identifier] = pending, message

    def _take(self, worker: WorkerInfo, identifier: int) -> _Call | None:
        with self._lock:
            calls = self._calls.get(worker.wire_id)
            if calls is None or (call := calls.pop(identifier, None)) is None:
                return None
            if not calls:
                del self._calls[worker.wire_id]
            return call

    def _drop(self, pending: PendingRequest) -> None:
        """Drops a call that is over, if it has not been sent."""
        if (call := self._take(pending.worker, pending.identifier)) is not None:
            self._executor.submit(partial(self._abort, *call))

    def _abort(self, pending: PendingRequest, message: Outgoing) -> None:
        if message.user_values:
            self._extensions.on_send_aborted(message)
        self._on_not_sent(pending.identifier, pending.worker)
