"""Runs the requests of other workers and answers them."""

import concurrent.futures
import contextlib
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, cast, final

from ...errors import (
    AnswerFailedError,
    LimitReachedError,
    PolicyError,
    RemoteError,
    RpcCancelledError,
    RpcError,
    SendFailedError,
    SerializationError,
    WorkerLostError,
    WorkerSuspectError,
)
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..contracts.devices import NO_DEVICES
from ..contracts.extension import Awaited
from ..contracts.messages import (
    ERROR,
    RESULT,
    Confirmation,
    Deferred,
    Handler,
    Incoming,
    LaterAnswer,
    Outgoing,
    UnwantedMessageError,
)
from ..contracts.watcher import WorkerWatcher
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..peers.backlog import MIN_ANSWER_BYTES, Backlogs
from ..peers.peer import Peer
from ..peers.received_requests import ReceivedRequests
from .call import CallParts
from .call_counter import CallCounter
from .codec import Codec
from .served_calls import CallKey, ServedCall, ServedCalls, may_begin

__all__ = ["Server"]

log = logging.getLogger(__name__)


@final
class Server(WorkerWatcher):
    """Runs the handlers of requests, on the executor's threads, and sends their answers."""

    def __init__(
        self,
        parts: CallParts,
        codec: Codec,
        received: ReceivedRequests,
        calls: ServedCalls,
        backlogs: Backlogs,
    ) -> None:
        """Makes the server of one agent."""
        self.calls = calls
        """The requests that have not begun to run, and those that are to be answered later."""
        self.answering = CallCounter()
        """Those of the latter whose answer is known and has not been sent."""
        self._me = codec.values.me
        self._codec = codec
        self._peers, self._extensions, self._executor = parts.peers, parts.extensions, parts.executor
        self._counter, self._nesting = parts.counter, parts.flow_control.nesting
        self._received = received
        self.backlogs = backlogs

    def arrive(self, source: Peer, envelope: agent_pb2.Envelope) -> ServedCall:
        """Notes a request that has arrived; its payloads may be on their way. Called on any thread."""
        handler = self._extensions.handlers.get(envelope.type)
        call = ServedCall(source, envelope, handler)
        if handler is not None and handler.user_values and envelope.id:
            self.calls.waiting[call.key] = call
            if source.end is not None and not may_begin(source):  # it may have been told before this
                self.calls.cancel(call.key)
            for on_arrival in self._extensions.on_arrival:
                on_arrival(source.info, envelope)
        return call

    def find(self, source: Peer, envelope: agent_pb2.Envelope) -> ServedCall:
        """Returns a request that has arrived before its payloads. It may not be waiting any more."""
        found = self.calls.waiting.get((source.id, envelope.id)) if envelope.id else None
        return found or ServedCall(source, envelope, self._extensions.handlers.get(envelope.type))

    def serve(self, call: ServedCall) -> None:
        """Runs a request and answers it, or has it wait. Runs on a thread of the executor."""
        source, envelope, handler = call.source, call.envelope, call.handler
        call.nbytes = self._received.begin(source.received)
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
            counter.serving[call.key] = call
            try:
                if envelope.id and (error := self.calls.begin(call, handler)) is not None:
                    self._refuse(call, error)
                    return
                counter.last_served = call.key
                nesting.depth, nesting.deadline = envelope.depth + 1, call.deadline
                self._run(call, handler)
            finally:
                nesting.depth, nesting.deadline = 0, 0.0
                counter.serving.pop(call.key, None)
                if counter.waiters:
                    counter.notify()

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
        if not awaited or not self.calls.is_due(call):
            return False
        try:
            self.calls.park(call, awaited, self._submit_again)
        except LimitReachedError as error:
            self._refuse(call, error)
        return True

    def _refuse(self, call: ServedCall, error: RpcError) -> None:
        """Answers a request that does not begin, so that its caller knows that it is over."""
        self._extensions.on_decode_error(call.source.info, call.envelope, error)
        self.reject(call.source, call.envelope, error)

    def _submit_again(self, call: ServedCall) -> None:
        """Has a request run that was postponed or parked, if nothing else keeps it from that by then."""
        self._received.add(call.source.received, call.nbytes)
        self._executor.submit(self.serve, call)

    def reject(self, source: Peer, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Answers a request that cannot be read with an error."""
        self.calls.cancel((source.id, envelope.id))
        if not isinstance(error, LimitReachedError):  # which `_answer_error` records
            self._codec.values.record_refusal(source.info, error)
        if isinstance(error, PayloadLostError):
            error = SendFailedError(self._me.name, str(error))
        self._answer_error(source, envelope, error, has_begun=False)

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
            if isinstance(result, LaterAnswer):
                if isinstance(result, Confirmation):
                    self._codec.confirm(message)
                    self._executor.call_last(result.then)
                    return
                deferred = cast(Deferred, result)
                future = deferred.future
                if not future.done():
                    if handler.user_values:
                        self._counter.begin_answer()
                    is_awaited = self.calls.defer(call, message, deferred)
                    future.add_done_callback(partial(self._answer_later, call.key))
                    if not is_awaited:
                        self._executor.submit(self.abort, [call.key])
                    return
                # Not raised here: every raise would add a frame to an error that is kept.
                if (error := future.exception()) is not None:
                    self._answer_error(call.source, message.envelope, error)
                    return
                result = future.result()
            if message.envelope.id:
                answer = self._pack_answer(message, result, handler)
                del result  # it may be in that memory, too
                self._send_answer(call.source, answer)
        except BaseException as error:
            self._answer_error(call.source, message.envelope, error, has_begun=message.has_begun)
            if handler.on_error is not None and isinstance(error, Exception):
                handler.on_error(message, error)

    def _pack_answer(self, request: Incoming, value: object, handler: Handler) -> Outgoing:
        has_map = request.envelope.device_map
        device_map = self._codec.device_map(request.source, request) if has_map else NO_DEVICES
        values = self._codec.values
        try:
            packed = values.packer.pack(value, "the result", device_map)
        except SerializationError as error:
            raise values.explained(error, request.source, is_answer=True) from error.__cause__
        return Outgoing(
            request.source,
            agent_pb2.Envelope(id=request.envelope.id, type=RESULT),
            packed.body,
            packed.tensors,
            packed.references,
            request,
            handler.user_values,
            device_map,
            packed.leaves,
        )

    def _send_answer(self, source: Peer, answer: Outgoing) -> None:
        try:
            self._codec.send(source, answer)
            if answer.nbytes >= MIN_ANSWER_BYTES:
                self.backlogs.on_answer(source.backlog, answer.nbytes)
        except (WorkerLostError, WorkerSuspectError):
            pass  # a caller that is gone needs no answer; for one that is suspect, the call has failed
        except SendFailedError as error:
            raise AnswerFailedError(self._me.name, error.reason) from None

    def _answer_later(self, key: CallKey, future: "concurrent.futures.Future[Any]") -> None:
        """Has a thread of the executor answer a request with the result of a future, unless it was aborted."""
        if (call := self.calls.take_deferred(key)) is not None:
            self.answering.begin_answer()
            self._executor.submit(self._answer_deferred, call, future)

    def _answer_deferred(self, call: ServedCall, future: "concurrent.futures.Future[Any]") -> None:
        request, handler = call.message, call.handler
        assert request is not None
        assert handler is not None
        try:
            # Not raised here: every raise would add a frame to an error that is kept.
            if (error := future.exception()) is not None:
                self._answer_error(call.source, request.envelope, error)
            elif request.envelope.id:
                self._send_answer(call.source, self._pack_answer(request, future.result(), handler))
        except BaseException as error:
            self._answer_error(call.source, request.envelope, error)
        finally:
            self.answering.end_answer()
            if handler.user_values:
                self._counter.end_answer()

    def on_cancelled(self, worker: WorkerInfo, payload: tuple[int]) -> None:
        """Handles CANCELLED. Called on any thread."""
        (identifier,) = payload
        self.cancel(self._peers.of(worker), identifier)

    def cancel(self, source: Peer, identifier: int) -> None:
        """Handles the message of a caller that it does not wait for an answer. Called on any thread."""
        key = source.id, identifier
        # Here and now: in the executor's queue it would come after the calls that wait for a thread.
        if self.calls.cancel(key):
            return
        if (call := self._counter.serving.get(key)) is not None:
            call.is_cancelled = True
        if self.calls.deferred:
            self._executor.submit(self.abort, [key])

    def note_suspect(self, worker: WorkerInfo, reason: str) -> None:  # noqa: ARG002
        """Keeps the requests that have come by the broken connection from beginning."""
        self.calls.cancel_all(self._peers.of(worker))

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Keeps the requests of a worker that is lost from beginning, if they may not."""
        if not may_begin(peer := self._peers.of(worker)):
            self.calls.cancel_all(peer)

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Aborts the answers to a worker that is lost."""
        self.abort(self.calls.deferred_of(self._peers.of(worker)))

    def abort_expired(self) -> None:
        """Aborts the answers for which their callers do not wait any longer."""
        self.abort(self.calls.expired())

    def abort(self, keys: Iterable[CallKey]) -> None:
        """Aborts answers: their callers are told that there will be none, and nothing waits for them here."""
        for key in keys:
            if (call := self.calls.take_deferred(key)) is None:
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
