"""Serves the requests of other workers, from their arrival to their answers.

| state     | what it waits for               | event: next state                                      |
|-----------|---------------------------------|--------------------------------------------------------|
| arrived   | its payloads, then a thread     | a thread: running; values are missing: parked; its     |
|           |                                 | caller does not read its answers: postponed            |
| parked    | values that others have promised | one is there, or will not come: arrived               |
| postponed | its caller                      | it has read enough: arrived                            |
| running   | its handler                     | a value or an error: done; a future: deferred          |
| deferred  | that future                     | it is done, or nobody waits for the answer: done       |

Its cancellation, its deadline, and the loss or the silence of its caller end it in the first three states and when
it is deferred; those that come while it runs end it then. Until it runs it is in `Server.waiting`, and in
`Server.deferred` when it is deferred: whoever takes it out there decides what becomes of it, which is one
operation on a dict. Requests that carry no values of users, and messages without an id, are in neither: they run
when a thread comes to them.

Those that wait for a promise of another worker are parked: they hold no thread, and end with their timeout, by a
clock that starts with the first of them. Each caller may have a number of them, and so many bytes. Those whose
functions have returned futures are given up when nobody waits for their answers: a future may never be completed,
and a graceful shutdown would wait for it for ever.
"""

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

from ...errors import (
    AnswerFailedError,
    LimitReachedError,
    PolicyError,
    RemoteError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    SendFailedError,
    SerializationError,
    WorkerLostError,
    WorkerSuspectError,
)
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..channels.payloads import PayloadReader
from ..contracts.devices import NO_DEVICES, device_map_of_answer
from ..contracts.extension import Awaited
from ..contracts.messages import (
    ERROR,
    RESULT,
    Confirmation,
    Deferred,
    Handler,
    Incoming,
    Outgoing,
    UnwantedMessageError,
)
from ..contracts.options import FlowControlOptions
from ..contracts.worker import WorkerEnd, WorkerInfo, WorkerWatcher
from ..execution.timers import Deadlines, DeadlinesFactory
from ..peers.flow_control import CALL_BYTES, MIN_ANSWER_BYTES, Backlogs
from ..peers.peer import Peer
from .call import CallCounter, CallKey, CallParts
from .codec import Codec

__all__ = ["CONFIRMED", "MIN_WAIT_S", "ServedCall", "Server"]

CONFIRMED = "call.confirmed"
"""The kind of the control message in place of the answer None to a request, which it names by its id."""

MIN_WAIT_S = 1e-3
"""Seconds of the shortest wait."""

log = logging.getLogger(__name__)


@final
class ServedCall:
    """A request, and what is needed to run and to answer it."""

    def __init__(self, source: Peer, envelope: agent_pb2.Envelope, handler: Handler | None) -> None:
        """Has arrived from `source`; its payloads may still be on their way. An unknown type has no handler."""
        self.source = source
        self.envelope = envelope
        self.handler = handler
        self.key: CallKey = (source.id, envelope.id or -id(self))
        timeout = envelope.timeout_ms
        self.deadline = time.monotonic() + timeout / 1000 if timeout else 0.0
        """The time of `time.monotonic` until which its caller waits; 0 for ever."""
        self.is_cancelled = False
        """Whether its caller has cancelled it while it ran."""
        self.payloads: PayloadReader | None = None
        """Reads its payloads, when all have come."""
        self.nbytes = 0
        """Of envelope and payloads."""
        self.awaited: Sequence[Awaited] = ()
        """What it waits for, or has waited for: kept alive until it runs."""
        self.wake: Callable[[], None]
        """Ends its wait for that. A new one for each wait."""
        self.message: Incoming | None = None
        """Itself, decoded, when it is deferred."""
        self.on_aborted: Callable[[], None] | None = None
        """What is to be called when nobody waits for its deferred answer any more."""

    @property
    def is_expired(self) -> bool:
        """Whether its caller waits no longer."""
        return bool(self.deadline) and time.monotonic() >= self.deadline


def _may_begin(source: Peer) -> bool:
    """Returns whether requests of a worker may begin. One that has left has sent its last ones on purpose."""
    return source.end is None or source.end.orderly


@final
class Server(WorkerWatcher):
    """Decides what becomes of each request: runs its handler, on a thread of the executor, and answers it.

    Takes no lock for requests that are not parked: each step is one operation on a dict.
    """

    def __init__(
        self,
        parts: CallParts,
        codec: Codec,
        backlogs: Backlogs,
        options: FlowControlOptions,
        make_deadlines: DeadlinesFactory,
    ) -> None:
        """Starts no clock yet."""
        self.waiting: dict[CallKey, ServedCall] = {}
        """The requests that have arrived, and not begun to run."""
        self._running: dict[CallKey, ServedCall] = parts.counter.running
        """Those with values of users that a thread is busy with."""
        self.deferred: dict[CallKey, ServedCall] = {}
        """Those whose answers are not known yet, although no thread is busy with them."""
        self.backlogs = backlogs
        self.answering = CallCounter()
        """The requests that were deferred, and whose answers are known and have not been sent."""
        self._me = codec.values.me
        self._codec = codec
        self._peers, self._extensions, self._executor = parts.peers, parts.extensions, parts.executor
        self._counter, self._nesting = parts.counter, parts.flow_control.nesting
        self._parked: dict[CallKey, ServedCall] = {}
        # By its own calls and those that they make, a caller may have this many in flight.
        self._max_parked = max(options.max_in_flight, options.max_received)
        self._max_parked_bytes = options.max_received_bytes
        self._make_deadlines = make_deadlines
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._clock: Deadlines[CallKey] | None = None
        self._is_closed = False

    # Those that have not begun.

    def arrive(self, source: Peer, envelope: agent_pb2.Envelope) -> ServedCall:
        """Notes a request that has arrived; its payloads may be on their way. Called on any thread."""
        handler = self._extensions.handlers.get(envelope.type)
        call = ServedCall(source, envelope, handler)
        if handler is not None and handler.user_values and envelope.id:
            self.waiting[call.key] = call
            if source.end is not None and not _may_begin(source):  # it may have been told before this
                self.drop(call.key)
            for on_arrival in self._extensions.on_arrival:
                on_arrival(source.info, envelope)
        return call

    def find(self, source: Peer, envelope: agent_pb2.Envelope) -> ServedCall:
        """Returns a request that has arrived before its payloads. It may not be waiting any more."""
        found = self.waiting.get((source.id, envelope.id)) if envelope.id else None
        return found or ServedCall(source, envelope, self._extensions.handlers.get(envelope.type))

    def serve(self, call: ServedCall) -> None:
        """Runs a request and answers it, or has it wait. Runs on a thread of the executor."""
        source, envelope, handler = call.source, call.envelope, call.handler
        call.nbytes = source.received.begin()
        if envelope.HasField("control"):
            self._codec.control.process(source.control)
        if handler is None:
            self.reject(source, envelope, ValueError(f"message type {envelope.type} has no handler here"))
        elif (
            self.backlogs.full
            and handler.user_values
            and envelope.id  # not the items of a stream, which are no calls
            and self._postpone(call)
        ):
            pass
        elif not handler.user_values:
            self._nesting.depth = envelope.depth + 1  # hooks of a backward pass may make calls
            try:
                self._run(call, handler)
            finally:
                self._nesting.depth = 0
        elif envelope.id and (envelope.needed_values or envelope.references) and self._park(call):
            pass
        else:
            nesting, counter = self._nesting, self._counter
            # First: a cancellation finds it among those that wait, or here.
            self._running[call.key] = call
            try:
                if envelope.id and (error := self._begin(call, handler)) is not None:
                    self._refuse(call, error)
                    return
                counter.last_served = call.key
                nesting.depth, nesting.deadline = envelope.depth + 1, call.deadline
                self._run(call, handler)
            finally:
                nesting.depth, nesting.deadline = 0, 0.0
                self._running.pop(call.key, None)
                if counter.waiters:
                    counter.notify()

    def _begin(self, call: ServedCall, handler: Handler) -> RpcError | None:
        """Has a request begin to run; if it does not, returns the error that its caller gets."""
        source, is_waiting = call.source, self.waiting.pop(call.key, None) is not None
        if source.end is not None and not _may_begin(source):
            reason = f"this was noticed before a request of it began on {self._me.name!r}"
            return WorkerLostError(source.info.name, reason)
        if not is_waiting:
            return RpcCancelledError(self._me.name)
        if call.deadline and time.monotonic() >= call.deadline:
            activity = f"its time was up before it began: {handler.description}"
            return RpcTimeoutError(self._me.name, call.envelope.timeout_ms / 1000, activity)
        return None

    def drop(self, key: CallKey) -> bool:
        """Keeps a request from beginning, if it has arrived and has not begun; returns whether it does."""
        is_dropped = self.waiting.pop(key, None) is not None
        if self._parked:
            self._end_wait(key)
        return is_dropped

    def _drop_all(self, source: Peer) -> None:
        for key in list(self.waiting):
            if key[0] == source.id:
                self.drop(key)

    def _postpone(self, call: ServedCall) -> bool:
        """Returns whether a call is postponed, or refused because too many are."""
        try:
            return self.backlogs.add(call.source.backlog, partial(self._submit_again, call))
        except LimitReachedError as error:
            self._refuse(call, error)
            return True

    def _park(self, call: ServedCall) -> bool:
        """Returns whether a call waits for what it names, or is refused because too many do."""
        awaited: list[Awaited] = []
        for wait_before_run in self._extensions.wait_before_run:
            awaited += wait_before_run(call.envelope)
        if not awaited or call.key not in self.waiting or call.is_expired:
            return False
        try:
            self._count_parked(call.source, call.nbytes)
        except LimitReachedError as error:
            self._refuse(call, error)
        else:
            self._wait_for(call, awaited)
        return True

    def _count_parked(self, source: Peer, nbytes: int) -> None:
        """Raises LimitReachedError if too many requests of a caller are parked, or too many bytes."""
        nbytes = max(nbytes, CALL_BYTES)
        with self._lock:
            count, parked_bytes = source.parked_requests, source.parked_bytes
            if count >= self._max_parked or (count and parked_bytes + nbytes > self._max_parked_bytes):
                raise LimitReachedError(
                    f"{count} requests of worker {source.info.name!r}, of {parked_bytes} bytes, wait for values "
                    "that are not there",
                    f"waiting requests={self._max_parked}",
                )
            source.parked_requests += 1
            source.parked_bytes += nbytes

    def _wait_for(self, call: ServedCall, awaited: Sequence[Awaited]) -> None:
        """Has a request served again, once: when something of what it waits for is over, or it is not to run."""
        key, wake = call.key, partial(self._wake, call.key)
        call.awaited, call.wake = awaited, wake
        self._parked[key] = call
        for each in awaited:
            each.add_waiter(wake)
        # It may have been cancelled, and what it waits for may be over, before it was there to be found.
        if key not in self.waiting or any(each.is_over for each in awaited):
            wake()
        elif call.deadline:
            self._expire_later(key, call.deadline)
        # Woken meanwhile: its next wait may have begun, on another thread.
        if self._parked.get(key) is not call or call.wake is not wake:
            for each in awaited:
                each.remove_waiter(wake)

    def _end_wait(self, key: CallKey) -> None:
        if (call := self._parked.get(key)) is not None:
            call.wake()

    def _wake(self, key: CallKey) -> None:
        """Has a request served again if it is parked. Called on any thread."""
        call = self._parked.pop(key, None)
        if call is None:
            return
        for each in call.awaited:
            each.remove_waiter(call.wake)
        with self._lock:
            call.source.parked_requests -= 1
            call.source.parked_bytes -= max(call.nbytes, CALL_BYTES)
        self._submit_again(call)

    def _expire_later(self, key: CallKey, deadline: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._clock is None:
                self._clock = self._make_deadlines(
                    self._end_wait, self._parked.__contains__, f"gradwire-waits-{self._me.name}"
                )
            clock = self._clock
        # A request that has waited before expires at the same time, so an entry of that wait does no harm.
        clock.add(key, max(MIN_WAIT_S, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends the clock: no parked request times out from now on."""
        with self._lock:
            self._is_closed = True
            clock = self._clock
        if clock is not None:
            clock.close()

    def _refuse(self, call: ServedCall, error: RpcError) -> None:
        """Answers a request that does not begin, so that its caller knows that it is over."""
        self._extensions.on_decode_error(call.source.info, call.envelope, error)
        self.reject(call.source, call.envelope, error)

    def _submit_again(self, call: ServedCall) -> None:
        """Has a request run that was postponed or parked, if nothing else keeps it from that by then."""
        call.source.received.add(call.nbytes)
        self._executor.submit(self.serve, call)

    def reject(self, source: Peer, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Answers a request that cannot be read with an error."""
        self.drop((source.id, envelope.id))
        if not isinstance(error, LimitReachedError):  # which `_answer_error` records
            self._codec.values.record_refusal(source.info, error)
        if isinstance(error, PayloadLostError):
            error = SendFailedError(self._me.name, str(error))
        self._answer_error(source, envelope, error, has_begun=False)

    # Those that run.

    def _run(self, call: ServedCall, handler: Handler) -> None:
        """Runs the handler of a request and answers, with its error if it raises; or has it answered later."""
        source, envelope, payloads = call.source, call.envelope, call.payloads
        assert payloads is not None
        call.payloads = None  # which keep memory of the caller
        has_begun = False
        try:
            message = self._codec.read(source, envelope, payloads, user_values=handler.user_values)
            del payloads
            try:
                if handler.check is not None:
                    handler.check(message)
                if message.state and (scope := self._extensions.scope(message)) is not None:
                    with scope:
                        self._run_in_scope(call, message, handler)
                else:
                    self._run_in_scope(call, message, handler)
            finally:
                message.failure = None  # its traceback leads back to this frame
                has_begun = message.has_begun
        except BaseException as error:
            self._answer_error(source, envelope, error, has_begun=has_begun)

    def _run_in_scope(self, call: ServedCall, message: Incoming, handler: Handler) -> None:
        try:
            try:
                message.value = self._codec.values.unpack(message)
                message.has_begun = True
                result = handler.run(message)
            finally:
                if message.on_ran is not None:
                    message.on_ran()
            # Memory that the sender shares with this worker goes back to it with the answer.
            message.value, message.body = None, b""
            message.tensors.clear()
            kind = type(result)
            if kind is Confirmation:
                self._codec.control.send(message.source, CONFIRMED, (message.envelope.id,), urgent=False)
                self._executor.call_last(result.then)
            elif kind is Deferred:
                self._defer(call, message, handler, result)
            elif message.envelope.id:
                answer = self._pack_answer(message, result, handler)
                del result  # it may be in that memory, too
                self._send_answer(call.source, answer)
        except BaseException as error:
            self._answer_error(call.source, message.envelope, error, has_begun=message.has_begun)
            if handler.on_error is not None and isinstance(error, Exception):
                handler.on_error(message, error)

    def _pack_answer(self, request: Incoming, value: object, handler: Handler) -> Outgoing:
        mappings = request.envelope.device_map
        device_map = device_map_of_answer(mappings) if mappings else NO_DEVICES
        values = self._codec.values
        try:
            packed = values.packer.pack(value, "the result", device_map)
        except SerializationError as error:
            raise values.explained(error, request.source, is_answer=True) from error.__cause__
        envelope = agent_pb2.Envelope(id=request.envelope.id, type=RESULT)
        return Outgoing(request.source, envelope, *packed, request, handler.user_values, device_map)

    def _send_answer(self, source: Peer, answer: Outgoing) -> None:
        try:
            self._codec.send(source, answer)
            if answer.nbytes >= MIN_ANSWER_BYTES:
                self.backlogs.on_answer(source.backlog, answer.nbytes)
        except (WorkerLostError, WorkerSuspectError):
            pass  # a caller that is gone needs no answer; for one that is suspect, the call has failed
        except SendFailedError as error:
            raise AnswerFailedError(self._me.name, error.reason) from None

    # Those that are answered later.

    def _defer(self, call: ServedCall, message: Incoming, handler: Handler, answer: Deferred) -> None:
        """Has a request answered with what a future has, now or later."""
        if answer.future.done():
            self._answer_with(answer.future, call, message, handler)
            return
        if handler.user_values:
            self._counter.begin_answer()
        call.message, call.on_aborted = message, answer.on_aborted
        self.deferred[call.key] = call
        # What ends the wait for it may have come before it was there to be found.
        is_awaited = not call.is_cancelled and call.source.end is None
        answer.future.add_done_callback(partial(self._answer_later, call.key))
        if not is_awaited:
            self._executor.submit(self._abort, [call.key])

    def _answer_later(self, key: CallKey, future: "concurrent.futures.Future[Any]") -> None:
        """Has a thread of the executor answer a request with the result of a future, unless it was aborted."""
        if (call := self.deferred.pop(key, None)) is not None:
            self.answering.begin_answer()
            self._executor.submit(self._answer_deferred, call, future)

    def _answer_deferred(self, call: ServedCall, future: "concurrent.futures.Future[Any]") -> None:
        request, handler = call.message, call.handler
        assert request is not None
        assert handler is not None
        try:
            self._answer_with(future, call, request, handler)
        except BaseException as error:
            self._answer_error(call.source, request.envelope, error)
        finally:
            self.answering.end_answer()
            if handler.user_values:
                self._counter.end_answer()

    def _answer_with(
        self, future: "concurrent.futures.Future[Any]", call: ServedCall, request: Incoming, handler: Handler
    ) -> None:
        # Its error is not raised here: every raise would add a frame to an error that is kept.
        if (error := future.exception()) is not None:
            self._answer_error(call.source, request.envelope, error)
        elif request.envelope.id:
            self._send_answer(call.source, self._pack_answer(request, future.result(), handler))

    # Their ends without an answer.

    def on_cancelled(self, worker: WorkerInfo, payload: tuple[int]) -> None:
        """Handles CANCELLED. Called on any thread."""
        (identifier,) = payload
        self.cancel(self._peers.of(worker), identifier)

    def cancel(self, source: Peer, identifier: int) -> None:
        """Handles the message of a caller that it does not wait for an answer. Called on any thread."""
        key = source.id, identifier
        # Here and now: in the executor's queue it would come after the calls that wait for a thread.
        if self.drop(key):
            return
        if (call := self._running.get(key)) is not None:
            call.is_cancelled = True
        if self.deferred:
            self._executor.submit(self._abort, [key])

    def note_suspect(self, worker: WorkerInfo, reason: str) -> None:  # noqa: ARG002
        """Keeps the requests that have come by the broken connection from beginning."""
        self._drop_all(self._peers.of(worker))

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Keeps the requests of a worker that is lost from beginning, if they may not."""
        if not _may_begin(peer := self._peers.of(worker)):
            self._drop_all(peer)

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Aborts the answers to a worker that is lost."""
        self._abort([key for key in self.deferred.copy() if key[0] == worker.wire_id])

    def seconds_left(self) -> float | None:
        """Returns the time until the next deferred answer expires; None for never."""
        deadlines = [call.deadline for call in self.deferred.copy().values() if call.deadline]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def abort_expired(self) -> None:
        """Aborts the answers for which their callers do not wait any longer."""
        self._abort([key for key, call in self.deferred.copy().items() if call.is_expired])

    def _abort(self, keys: Iterable[CallKey]) -> None:
        """Aborts answers: their callers are told that there will be none, and nothing waits for them here."""
        for key in keys:
            if (call := self.deferred.pop(key, None)) is None:
                continue
            self._answer_error(call.source, call.envelope, RpcCancelledError(self._me.name))
            if call.on_aborted is not None:
                call.on_aborted()
            if call.handler is not None and call.handler.user_values:
                self._counter.end_answer()

    def _answer_error(
        self, source: Peer, request: agent_pb2.Envelope, error: BaseException, *, has_begun: bool = True
    ) -> None:
        if isinstance(error, LimitReachedError):
            self._codec.values.record_refusal(source.info, error)
        if not request.id:
            if isinstance(error, UnwantedMessageError):
                log.debug("a message from worker %s is dropped: %s", source.info.name, error)
            else:
                log.error("a message from worker %s failed", source.info.name, exc_info=error)
            return
        not_begun = not has_begun or _is_refusal(error)
        envelope = agent_pb2.Envelope(id=request.id, type=ERROR, not_begun=not_begun)
        with contextlib.suppress(AnswerFailedError):
            self._send_answer(source, Outgoing(source.info, envelope, self._codec.values.encode_failure(error)))


def _is_refusal(error: BaseException) -> bool:
    """Returns whether a handler has refused its request, before it has run anything of the program."""
    is_of_another_call = isinstance(error, RpcError) and (
        error.outcome is not None or isinstance(error.__cause__, RemoteError)
    )
    return isinstance(error, PolicyError | LimitReachedError) and not is_of_another_call
