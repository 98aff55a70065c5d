"""The requests that this worker has sent, or is about to send, until they are answered."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from ...errors import (
    AnswerFailedError,
    Outcome,
    RpcCancelledError,
    RpcTimeoutError,
    WorkerSuspectError,
    set_outcome,
)
from ...proto.v1 import agent_pb2
from ...torch_internals import has_local_modes
from ..channels.base import PayloadLostError
from ..channels.payloads import PayloadReader, body_of
from ..contracts.messages import ERROR, RESULT, Handler, Outgoing
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.futures import Future
from .codec import Codec
from .extensions import Extensions
from .flow_control import FlowControl
from .retries import Retry
from .stats import CallCounter

__all__ = ["PendingRequest", "PendingRequests"]

MAX_ORPHANS = 1 << 16
"""Requests that have failed because their worker was suspect, and whose answers may still come."""

MAX_TIMEOUT_MS = (1 << 32) - 1
"""The longest timeout that a request tells its receiver; 50 days."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingRequest:
    """A request that is not answered yet."""

    identifier: int
    future: Future[Any]
    worker: WorkerInfo
    handler: Handler
    timeout: float
    depth: int = 0
    """How many calls it is inside of."""
    is_waiting: bool = False
    """Whether it waits for capacity, and nothing of it has been sent."""
    abandon: Callable[[], None] | None = None
    """Ends its wait for capacity, or for a worker that does not answer."""
    waits_since: float = 0.0
    """The time of `time.monotonic` at which it began to wait for that; 0 if it did not."""
    waits_for_worker: bool = False
    """Whether it waits for a worker that does not answer, and nothing of it has been sent."""
    is_expired: bool = False
    """Whether its time is up; it is about to be taken back, and to fail."""
    sent: Outgoing | None = None
    """Set once it is sent, if it can be cancelled."""
    is_withdrawn: bool = False
    """Whether it was taken back before anything of it was sent."""
    retry: Retry | None = None
    """Sends it again if it may run more than once."""

    def begin_wait(self, abandon: Callable[[], None]) -> None:
        """Notes that it waits before it is sent, and what ends the wait."""
        self.abandon = abandon
        self.waits_since = self.waits_since or time.monotonic()

    def tell_timeout(self, envelope: agent_pb2.Envelope) -> None:
        """Has its envelope say how long it may take until it begins to run."""
        if self.timeout and self.handler.user_values:
            waited = time.monotonic() - self.waits_since if self.waits_since else 0.0
            envelope.timeout_ms = max(1, int(min(1000 * (self.timeout - waited), MAX_TIMEOUT_MS)))

    def timeout_error(self) -> RpcTimeoutError:
        """Returns the error with which it fails when its time is up."""
        activity = self.handler.description
        if self.is_waiting:
            activity = f"not sent, because too much is in flight: {activity}"
        seconds = self.timeout if self.retry is None else self.retry.timeout
        return RpcTimeoutError(self.worker.name, seconds, activity)

    def outcome_without(self, unsent: Collection[bytes] = ()) -> Outcome:
        """Returns what has become of it if it gets no answer.

        Args:
            unsent: the beginnings of the envelopes that were queued when its connection broke.
        """
        is_unsent = self.is_waiting or self.waits_for_worker or self.is_withdrawn
        if is_unsent or (unsent and self.sent is not None and self.sent.beginning() in unsent):
            return Outcome.NOT_SENT
        return Outcome.UNKNOWN


@final
class PendingRequests:
    """The requests of one agent that are not answered, and what completes them.

    A request is completed by what takes it out of `pending` first: its answer, its timeout, its cancellation or
    the loss of its worker. Taking it out is one operation on a dict, so exactly one of them succeeds.
    """

    def __init__(
        self, codec: Codec, extensions: Extensions, calls: CallCounter, flow_control: FlowControl
    ) -> None:
        """Begins with no request.

        Args:
            codec: decodes answers.
            extensions: have hooks.
            calls: counts users' calls in flight.
            flow_control: bounds them.
        """
        self.pending: dict[int, PendingRequest] = {}
        """The requests without an answer, by id."""
        self.kept: dict[int, tuple[int, object]] = {}
        """The worker and the `keep` of each request that has not been answered, even if it has failed here."""
        self._orphans: OrderedDict[int, int] = OrderedDict()
        """The worker of each request that has failed because that was suspect, and that it may answer all the
        same: references in the answer must be counted. The first ones are forgotten when there are too many."""
        self._arrived: set[int] = set()
        """The requests whose answers wait for a thread."""
        self._codec = codec
        self._extensions = extensions
        self._calls = calls
        self._flow_control = flow_control
        self._nesting = flow_control.nesting

    def take(self, identifier: int) -> PendingRequest | None:
        """Takes a request out of `pending`; None if it is complete."""
        return self.pending.pop(identifier, None)

    def fail(self, pending: PendingRequest | None, error: Exception, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """Completes a request that was taken with an error.

        Args:
            pending: the request.
            error: no other request may fail with it.
            outcome: what has become of the request.
        """
        if pending is not None:
            if pending.handler.user_values:
                self._extensions.on_failure(pending.identifier, error, outcome)
                if pending.retry is not None:
                    if pending.retry.take_over(error, outcome):
                        if pending.abandon is not None:
                            pending.abandon()
                        self._tell_complete(pending)
                        self._count_end(pending)
                        return
                    outcome = pending.retry.outcome_with(outcome)
                set_outcome(error, outcome)
            self._tell_complete(pending)
            with self._nesting.at(pending.depth):  # of the calls that callbacks make
                pending.future.set_exception(error)
            self._count_end(pending)

    def begin_answer(self, source: WorkerInfo, identifier: int) -> bool:
        """Returns whether an answer that has arrived is awaited; then `on_answer` follows, on another thread.

        An answer is awaited once, by the request to its sender, also if that has timed out, or failed because the
        worker was suspect.
        """
        pending = self.pending.get(identifier)
        if pending is None:
            is_awaited = self._flow_control.is_in_flight(source.wire_id, identifier) or self._is_orphan(
                source, identifier
            )
        else:
            is_awaited = pending.worker.wire_id == source.wire_id
        if not is_awaited or identifier in self._arrived:
            log.info("worker %s answers a request that it has not got, or has answered; dropped", source.name)
            return False
        self._arrived.add(identifier)
        return True

    def on_answer(self, source: WorkerInfo, envelope: agent_pb2.Envelope, payloads: PayloadReader) -> None:
        """Completes the request that a message answers."""
        identifier = envelope.id
        self._arrived.discard(identifier)
        if self._is_from_another(source, identifier):
            return
        self._complete(self.pending.pop(identifier, None), source, envelope, payloads)

    def _complete(
        self,
        pending: PendingRequest | None,
        source: WorkerInfo,
        envelope: agent_pb2.Envelope,
        payloads: PayloadReader,
    ) -> None:
        identifier = envelope.id
        if self.kept:
            self.kept.pop(identifier, None)
        try:
            self._flow_control.release(source.wire_id, identifier)
            if envelope.type == ERROR:
                error = self._codec.decode_failure(source, body_of(envelope, payloads))
                if pending is not None and pending.is_expired and isinstance(error, RpcCancelledError):
                    raise pending.timeout_error()  # because of which it was cancelled
                raise self._extensions.map_error(error, source)
            # An answer that arrives after the timeout is read all the same: references in it must be counted.
            message = self._codec.read(source, envelope, payloads, user_values=True)
            value = self._codec.unpack(message)
            del message  # a thread that gets the value may take over the memory of its tensors
        except Exception as error:
            self.fail(pending, error, _outcome_of(envelope))
        else:
            if pending is not None:
                self._set_result(pending, value)
        if envelope.HasField("control"):
            self._codec.receive_control(source, envelope, with_answer=True)

    def is_quick(self, envelope: agent_pb2.Envelope) -> bool:
        """Returns whether the thread that has read a message, an answer, may complete its request."""
        pending = self.pending.get(envelope.id)
        return (
            pending is not None
            and pending.handler.is_quick
            and envelope.type == RESULT
            and not pending.future.has_callbacks
            and not envelope.HasField("profile")
        )

    def on_rejected_answer(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Fails the request whose answer cannot be read."""
        self._codec.record_refusal(source, error)
        if self._is_from_another(source, envelope.id):
            return
        self.kept.pop(envelope.id, None)
        self._flow_control.release(source.wire_id, envelope.id)
        if isinstance(error, PayloadLostError):
            error = AnswerFailedError(source.name, str(error))
        self.fail(self.take(envelope.id), error, _outcome_of(envelope))

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Fails the requests to a worker that is lost.

        Args:
            worker: the worker.
            end: how it ended.
            unsent: see `on_worker_suspect`.
        """
        self._flow_control.drop_worker(worker.wire_id)  # first: callbacks may make calls that wait for capacity
        for identifier, pending in self.pending.copy().items():
            if pending.worker.wire_id == worker.wire_id:
                self.fail(self.take(identifier), end.as_error(worker.name), pending.outcome_without(unsent))
        for identifier, (destination, _) in self.kept.copy().items():
            if destination == worker.wire_id:
                self.kept.pop(identifier, None)
        for identifier, destination in self._orphans.copy().items():
            if destination == worker.wire_id:
                self._orphans.pop(identifier, None)

    def sent_to(self, worker: WorkerInfo, *, waits: bool) -> Collection[int]:
        """Returns the ids of the requests to a worker.

        Args:
            worker: the worker.
            waits: whether to leave out those that wait for the worker.
        """
        return [
            identifier
            for identifier, pending in self.pending.copy().items()
            if pending.worker.wire_id == worker.wire_id and not (waits and pending.waits_for_worker)
        ]

    def on_worker_suspect(
        self, worker: WorkerInfo, reason: str, concerned: Collection[int], unsent: Collection[bytes]
    ) -> None:
        """Fails requests to a worker that does not answer.

        Args:
            worker: the worker.
            reason: how that was noticed.
            concerned: the ids of the requests.
            unsent: the beginnings of the envelopes that have not left this process.
        """
        self._flow_control.drop_worker(worker.wire_id)  # first: callbacks may make calls that wait for capacity
        for identifier in concerned:
            pending = self.take(identifier)
            self.kept.pop(identifier, None)
            if pending is None:
                continue
            outcome = pending.outcome_without(unsent)
            if outcome is Outcome.UNKNOWN:
                self._orphans[identifier] = worker.wire_id
            self.fail(pending, WorkerSuspectError(worker.name, reason), outcome)
        while len(self._orphans) > MAX_ORPHANS:
            self._orphans.popitem(last=False)

    def _is_orphan(self, source: WorkerInfo, identifier: int) -> bool:
        if self._orphans.get(identifier) != source.wire_id:
            return False
        return self._orphans.pop(identifier, None) is not None

    def unanswered(self) -> Mapping[str, int]:
        """Returns the number of users' calls without an answer, by the name of the worker called."""
        pending = [each for each in list(self.pending.values()) if each.handler.user_values]
        return Counter(each.worker.name for each in pending)

    def is_answered_here(self, source: WorkerInfo, envelope: agent_pb2.Envelope, payloads: PayloadReader) -> bool:
        """Returns whether the calling thread waits for an answer that has arrived, and completes its request.

        A thread that waits may have modes of torch of its own, which the value must not depend on.
        """
        pending = self.pending.get(envelope.id)
        return (
            pending is not None
            and envelope.type == RESULT
            and not envelope.HasField("profile")
            and not has_local_modes()
            and pending.future.complete_here(partial(self.on_answer, source, envelope, payloads))
        )

    def _set_result(self, pending: PendingRequest, value: object) -> None:
        self._tell_complete(pending)
        if pending.depth:
            with self._nesting.at(pending.depth):
                pending.future.set_result(value)
        else:
            pending.future.set_result(value)
        self._count_end(pending)

    def _is_from_another(self, source: WorkerInfo, identifier: int) -> bool:
        """Returns whether an answer comes from a worker that was not asked."""
        pending = self.pending.get(identifier)
        if pending is not None:
            asked = pending.worker.wire_id
        else:
            asked, _ = self.kept.get(identifier, (source.wire_id, None))
        if asked == source.wire_id:
            return False
        log.warning("worker %s answers a request to worker %d; dropped", source.name, asked)
        return True

    def _tell_complete(self, pending: PendingRequest) -> None:
        if pending.handler.user_values:
            self._extensions.on_complete(pending.identifier)

    def _count_end(self, pending: PendingRequest) -> None:
        if pending.handler.user_values:
            self._calls.end_request(pending.identifier)


def _outcome_of(answer: agent_pb2.Envelope) -> Outcome:
    """Returns what has become of a request that an error answers, or another answer that cannot be read."""
    return Outcome.NOT_SENT if answer.not_begun else Outcome.RAN
