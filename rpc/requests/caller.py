"""Sends the calls of this worker, and has them end: by an answer, or without one.

call.py has the states of a call. A call that is cancelled, or whose time is up, is taken back if nothing of it is
on its way yet; else its worker is asked not to begin it.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, final

from ...errors import (
    AnswerFailedError,
    Outcome,
    RpcCancelledError,
    SendFailedError,
    UnknownWorkerError,
    WorkerSuspectError,
    set_outcome,
)
from ...proto.v1 import agent_pb2
from ...torch_internals import has_local_modes
from ..channels.base import PayloadLostError
from ..channels.broadcast import Broadcast
from ..channels.payloads import PayloadReader, body_of, read_inline
from ..contracts.devices import NO_DEVICES, DeviceMap, device_map_to_proto
from ..contracts.messages import CANCEL, ERROR, RESULT, Outgoing, Request
from ..contracts.worker import WorkerEnd, WorkerInfo, WorkerWatcher
from ..execution.ctrl_c import wait_interruptibly
from ..execution.futures import Future, copy_error
from ..execution.timers import Deadlines, DeadlinesFactory
from ..peers.flow_control import Waiter
from ..peers.peer import Peer
from ..wire.pickling import Packed
from ..wire.tensors import bytes_of
from .call import (
    CONNECTION_ERRORS,
    MAX_KEPT_BYTES,
    MAX_TIMEOUT_MS,
    Call,
    CallParts,
    FinalizerCalls,
    Repeats,
    State,
)
from .codec import Codec

__all__ = ["Caller"]

_MAX_ORPHANS = 1 << 16
"""Requests that have failed because their worker was suspect, and whose answers may still come."""

log = logging.getLogger(__name__)


@final
class Caller(WorkerWatcher):
    """The calls of one agent. Safe to use from any thread."""

    def __init__(self, parts: CallParts, codec: Codec, make_deadlines: DeadlinesFactory) -> None:
        """Has sent nothing yet. `make_deadlines` makes the clock of the timeouts."""
        self.in_flight: dict[int, Call] = {}
        """The calls that are not answered, and have not failed, by id."""
        self.kept: dict[int, object] = {}
        """The `keep` of each request by its id, until it is answered or never will be: also if it has failed."""
        self.finalizer_calls = FinalizerCalls(parts.executor, parts.call_soon)
        self._parts = parts
        self._codec = codec
        self._maps_devices = codec.maps_devices
        self._peers, self._extensions, self._executor = parts.peers, parts.extensions, parts.executor
        self._counter, self._flow_control = parts.counter, parts.flow_control
        self._nesting = parts.flow_control.nesting
        self._ids = itertools.count(1)
        self._orphans: OrderedDict[int, Peer] = OrderedDict()
        """The worker of each request that has failed because that was suspect, and that it may answer all the
        same: references in the answer must be counted. The first ones are forgotten when there are too many."""
        self._arrived: set[int] = set()
        """The requests whose answers wait for a thread. What becomes of their workers does not matter to them."""
        self._postponed: dict[int, tuple[Call, Outgoing]] = {}
        """The calls that wait for workers which do not answer, with the messages of these attempts, by id."""
        self._paused: dict[int, Call] = {}
        """The calls that pause before they are sent again, by a negative number."""
        self._pauses = itertools.count(-1, -1)
        self._closed_by: Exception | None = None
        self._deadlines: Deadlines[int] = make_deadlines(
            self._expire,
            self.in_flight.__contains__,
            f"gradwire-deadlines-{codec.values.me.name}",
        )

    # Sending: on any thread.

    def send(self, worker: WorkerInfo, request: Request, timeout: float) -> Future[Any]:
        """Sends a request: see `RpcAgent.request`."""
        finalizer_calls = self.finalizer_calls
        if finalizer_calls.collecting and finalizer_calls.is_collecting_here():
            send = partial(self.send, worker, request, timeout)
            operation = self._extensions.handlers[request.kind].operation
            return finalizer_calls.send(send, worker.name, operation)
        device_map = self._codec.device_map(worker) if self._maps_devices else NO_DEVICES
        packed = self._codec.pack_request(request, worker, device_map)
        repeats = Repeats(request, timeout) if request.idempotent and self._extensions.may_repeat() else None
        handler = self._extensions.handlers[request.kind]
        call = Call(self._parts, self._peers.by_id[worker.wire_id], handler, timeout, self._nesting.depth, repeats)
        self._start(call, request, packed, device_map)
        return call.future

    async def send_async(self, worker: WorkerInfo, request: Request, timeout: float) -> Future[Any]:
        """Sends a request as `send` does, but awaits capacity for it instead of blocking."""
        device_map = self._codec.device_map(worker)
        packed = self._codec.pack_request(request, worker, device_map)
        repeats = Repeats(request, timeout) if request.idempotent and self._extensions.may_repeat() else None
        handler = self._extensions.handlers[request.kind]
        call = Call(self._parts, self._peers.of(worker), handler, timeout, self._nesting.depth, repeats)
        peer = call.peer
        try:
            waiter = self._begin(call, request, packed, device_map, blocks=False)
            if waiter is not None:
                await asyncio.wrap_future(waiter.woken)
            self._go_on(call, peer, waiter)
        except BaseException as error:
            if not self._take_back_unsent(call, error):
                raise
        return call.future

    def send_packed(
        self,
        worker: WorkerInfo,
        request: Request,
        timeout: float,
        packed: Packed,
        device_map: DeviceMap,
        broadcast: Broadcast | None,
    ) -> Future[Any]:
        """Sends a request whose value is pickled for a device map. Extensions may change the list of its tensors.

        A broadcast is what the message shares with messages to other workers.
        """
        handler = self._extensions.handlers[request.kind]
        call = Call(self._parts, self._peers.of(worker), handler, timeout, self._nesting.depth)
        self._start(call, request, packed, device_map, broadcast)
        return call.future

    def _start(
        self,
        call: Call,
        request: Request,
        packed: Packed,
        device_map: DeviceMap,
        broadcast: Broadcast | None = None,
    ) -> None:
        """Sends a call, when there is capacity for it. Raises what keeps it from being sent, or fails it."""
        peer, is_sent = call.peer, False
        try:
            waiter = self._begin(call, request, packed, device_map)
            if waiter is not None:
                with self._executor.blocking():
                    wait_interruptibly(waiter.woken.result)
            is_sent = self._go_on(call, peer, waiter, broadcast)
        except BaseException as error:
            if not self._take_back_unsent(call, error):
                raise
        finally:
            if broadcast is not None and not is_sent:
                broadcast.not_sent(peer.channels)

    def _begin(
        self, call: Call, request: Request, packed: Packed, device_map: DeviceMap, *, blocks: bool = True
    ) -> Waiter | None:
        """Makes the message of a call, registers it, and counts it as in flight.

        Returns:
            What to wait for first, if there is no capacity; then `_go_on` follows.
        """
        peer, handler = call.peer, call.handler
        worker = peer.info
        identifier = call.identifier = next(self._ids)
        if handler.user_values:
            for on_request in self._extensions.on_request:
                on_request(identifier, worker, request)
        envelope = agent_pb2.Envelope(id=identifier, type=request.kind)
        if device_map:
            envelope.device_map.extend(device_map_to_proto(device_map))
        if request.header is not None:
            request.header(envelope)
            envelope.has_headers = True
        if call.depth:
            envelope.depth = call.depth
        call.message = Outgoing(worker, envelope, *packed, None, handler.user_values, device_map)
        if (repeats := call.repeats) is None:
            cancel = partial(self.cancel, identifier) if handler.cancellable else None
            read_answer = peer.transport.read_answer if peer.link is not None else None
            call.future = Future(self._executor, cancel, worker.name, handler.operation, read_answer)
        else:
            self._begin_attempt(call, repeats)
        self.in_flight[identifier] = call  # the answer may arrive before `send` returns
        if request.keep is not None:
            self.kept[identifier] = request.keep
        if not handler.user_values:
            return None
        self._counter.requests.add(identifier)
        self._counter.last_request = identifier
        if call.timeout:
            envelope.timeout_ms = max(1, min(int(1000 * call.timeout), MAX_TIMEOUT_MS))
        nbytes = len(packed.body)
        if packed.tensors:
            nbytes += bytes_of(packed.tensors)
        waiter = self._flow_control.admit(peer.window, identifier, nbytes, blocks=blocks)
        if waiter is not None:
            self._queue(call, waiter)
        return waiter

    def _queue(self, call: Call, waiter: Waiter) -> None:
        call.begin_wait(State.QUEUED, waiter.wake)
        if call.timeout:
            self._deadlines.add(waiter.identifier, call.timeout)
        # It has ended, or its worker has, before it was there to be found.
        if waiter.identifier not in self.in_flight or call.peer.end is not None:
            waiter.wake()

    def _go_on(self, call: Call, peer: Peer, waiter: Waiter | None, broadcast: Broadcast | None = None) -> bool:
        """Sends a call that there is capacity for, or has it wait for its worker; not if it has ended.

        By then another attempt may have begun, to another peer. Returns whether it was sent.
        """
        message, identifier = call.message, call.identifier
        assert message is not None
        if waiter is not None:
            if waiter.identifier not in self.in_flight:
                self._release_unsent(peer, waiter.identifier)
                return False
            call.state = State.NEW
            if call.timeout:
                call.tell_timeout(message.envelope)
        call.state = State.SENT
        is_sent = self._codec.try_to_send(call.peer, message, broadcast)
        if not is_sent:
            self._postpone(call, message)
        elif message.nbytes > MAX_KEPT_BYTES or message.tensors or message.references:
            call.note_sent(message)
        if call.timeout and waiter is None:
            self._deadlines.add(identifier, call.timeout)
        return is_sent

    def _release_unsent(self, peer: Peer, identifier: int) -> None:
        """Counts a call as not sent."""
        self.kept.pop(identifier, None)
        self._flow_control.abandon(peer.window, identifier)

    def _take_back_unsent(self, call: Call, error: BaseException) -> bool:
        """Undoes `_begin` for a call that was not sent, however far it has come.

        Returns:
            Whether the error fails the future of the call. Else the caller gets it at once.
        """
        self._release_unsent(call.peer, call.identifier)
        # It may have been failed, by the loss of its worker.
        is_taken = self.in_flight.pop(call.identifier, None) is not None
        if isinstance(error, SendFailedError) and is_taken:
            error = SendFailedError(call.peer.info.name, error.reason, call.handler.description)
        is_repeated = call.repeats is not None and call.repeats.attempts > 1
        if isinstance(error, Exception) and (is_repeated or isinstance(error, CONNECTION_ERRORS)):
            if is_taken:
                self._fail(call, error, Outcome.NOT_SENT)
            return True
        set_outcome(error, Outcome.NOT_SENT)
        self._extensions.on_failure(call.identifier, error, Outcome.NOT_SENT)
        self._extensions.on_complete(call.identifier)
        self._counter.end_request(call.identifier)
        return False

    # Calls that wait for workers which do not answer: without a thread, and without what they have in channels.

    def _postpone(self, call: Call, message: Outgoing) -> None:
        """Has a call wait until its worker is back or lost, or the call has failed otherwise."""
        call.begin_wait(State.POSTPONED, partial(self._drop_postponed, call.identifier))
        self._put_postponed(call, message)
        # Its worker's state may have changed before it was there to be found.
        absence = call.peer.absence
        if absence is None:
            self._executor.submit(self._send_postponed, call.peer)
        elif not absence.waits:
            self._take_and_fail(call, absence.as_error(call.peer.info.name), Outcome.NOT_SENT)

    def _put_postponed(self, call: Call, message: Outgoing) -> None:
        call.state, identifier = State.POSTPONED, message.envelope.id
        if message.user_values or message.references:
            self._extensions.on_send_postponed(message)
        self._postponed[identifier] = call, message
        if identifier not in self.in_flight:  # it has ended before it was there to be found
            self._drop_postponed(identifier)

    def _send_postponed(self, peer: Peer) -> None:
        """Sends the calls to a worker that is back. Runs on a thread of the executor."""
        for identifier, (call, message) in sorted(self._postponed.copy().items()):
            if message.destination.wire_id == peer.id and self._postponed.pop(identifier, None) is not None:
                self._send_one_postponed(call, message)

    def _send_one_postponed(self, call: Call, message: Outgoing) -> None:
        # Before it is looked for: who takes it from now on does not count it as not sent.
        call.state = State.SENT
        if message.envelope.id not in self.in_flight:
            self._abort_postponed(message)
            return
        if call.timeout:
            call.tell_timeout(message.envelope)
        try:
            self._codec.send_prepared(call.peer, message)
        except WorkerSuspectError:  # again: what is told of that comes later
            self._put_postponed(call, message)
        except Exception as error:
            self._abort_postponed(message)
            self._take_and_fail(call, error, Outcome.NOT_SENT)
        else:
            if message.user_values or message.references:
                self._extensions.on_postponed_sent(message)
            call.note_sent(message)

    def _drop_postponed(self, identifier: int) -> None:
        """Drops an attempt that is over, if it has not been sent."""
        if (postponed := self._postponed.pop(identifier, None)) is not None:
            self._executor.submit(self._abort_postponed, postponed[1])

    def _abort_postponed(self, message: Outgoing) -> None:
        if message.user_values or message.references:
            self._extensions.on_send_aborted(message)
        self._release_unsent(self._peers.of(message.destination), message.envelope.id)

    # Calls that may run more than once.

    def _pause(self, call: Call) -> bool:
        """Has a call sent again after its pause; returns False if the agent has ended."""
        assert call.repeats is not None
        call.state = State.PAUSED
        call.identifier = number = next(self._pauses)
        self._counter.begin_request(number)
        self._paused[number] = call
        try:
            self._parts.call_soon(self._end_pause_later, number, call.repeats.take_pause())
        except RuntimeError:  # the event loop has ended
            return self._take_paused(number) is None
        return self._closed_by is None or self._take_paused(number) is None  # `fail_all` has failed it

    def _take_paused(self, number: int) -> Call | None:
        call = self._paused.pop(number, None)
        if call is not None:
            self._counter.end_request(number)
        return call

    def _end_pause_later(self, number: int, seconds: float) -> None:
        """Called on the event loop."""
        asyncio.get_running_loop().call_later(seconds, self._executor.submit, self._send_again, number)

    def _send_again(self, number: int) -> None:
        """Runs on a thread of the executor."""
        if (call := self._paused.pop(number, None)) is None:
            return
        repeats = call.repeats
        assert repeats is not None
        try:
            peer = self._find_present(call.peer.info.name)
            if peer is not None:
                repeats.context.copy().run(self._attempt, call, repeats, peer)
            elif repeats.error is not None and not (repeats.has_time() and self._pause(call)):
                call.end(repeats.error, repeats.outcome)
        except Exception as error:
            call.end(error, repeats.outcome)
        finally:
            self._counter.end_request(number)

    def _attempt(self, call: Call, repeats: Repeats, peer: Peer) -> None:
        """Sends a call once more. Raises what keeps it from being sent at all."""
        request = repeats.request
        call.peer, call.timeout, call.state = peer, repeats.seconds_left(), State.NEW
        call.waits_since, call.abandon, call.is_expired, call.is_withdrawn = 0.0, None, False, False
        with self._nesting.at(call.depth):
            device_map = self._codec.device_map(peer.info)
            packed = self._codec.pack_request(request, peer.info, device_map)
            self._start(call, request, packed, device_map)
        if repeats.is_cancelled:
            self.cancel(call.identifier)

    def _begin_attempt(self, call: Call, repeats: Repeats) -> None:
        if not repeats.attempts:
            cancel = partial(self._cancel_attempts, call, repeats)
            call.future = Future(self._executor, cancel, call.peer.info.name, call.handler.operation)
        repeats.attempts += 1

    def _cancel_attempts(self, call: Call, repeats: Repeats) -> bool:
        repeats.is_cancelled = True  # for an attempt that begins at this moment
        if self.cancel(call.identifier):
            return True
        if self._take_paused(call.identifier) is not None:
            call.end(RpcCancelledError(call.peer.info.name), repeats.outcome)
            return True
        return not call.future.is_completing

    def _find_present(self, name: str) -> Peer | None:
        try:
            peer = self._peers.find(name)
        except UnknownWorkerError:
            return None
        absence = peer.absence
        return peer if absence is None or absence.waits else None

    # Answers.

    def receive(self, source: Peer, envelope: agent_pb2.Envelope, payloads: PayloadReader) -> None:
        """Has the call completed that a message answers. Called on any thread; does not block.

        An answer is awaited once, by the request to its sender, also if that has timed out, or failed because the
        worker was suspect.
        """
        identifier, is_result = envelope.id, envelope.type == RESULT and not envelope.HasField("profile")
        call = self.in_flight.get(identifier)
        is_awaited = self._awaits(source, identifier) if call is None else call.peer is source
        if not is_awaited or identifier in self._arrived:
            log.info("worker %s answers a request that it has not got, or has answered; dropped", source.info.name)
            return
        if call is not None and is_result and not call.future.has_callbacks:
            if call.handler.is_quick and payloads is read_inline:
                self.complete(source, envelope, payloads)
                return
            # A thread that waits may have modes of torch of its own, which the value must not depend on.
            if not has_local_modes() and call.future.complete_here(self.complete, source, envelope, payloads):
                self._arrived.add(identifier)
                return
        self._arrived.add(identifier)
        # A thread that answers a call of this worker to itself has nothing more to do then.
        self._executor.call_last(partial(self._executor.submit_urgent, self.complete, source, envelope, payloads))

    def complete(self, source: Peer, envelope: agent_pb2.Envelope, payloads: PayloadReader) -> None:
        """Completes the call that a message answers. It may have failed meanwhile."""
        identifier = envelope.id
        call = self.in_flight.pop(identifier, None)
        self._arrived.discard(identifier)  # not before: its worker may be lost now
        if kept := self.kept:
            kept.pop(identifier, None)
        try:
            self._flow_control.release(source.window, identifier)
            if envelope.type == ERROR:
                error = self._codec.values.decode_failure(source.info, body_of(envelope, payloads))
                if call is not None and call.is_expired and isinstance(error, RpcCancelledError):
                    raise call.timeout_error()  # because of which it was cancelled
                raise self._extensions.map_error(error, source.info)
            # An answer that arrives after the timeout is read all the same: references in it must be counted.
            message = self._codec.read(source, envelope, payloads, user_values=True)
            value = self._codec.values.unpack(message)
            del message  # a thread that gets the value may take over the memory of its tensors
        except Exception as error:
            if call is not None:
                self._fail(call, error, _outcome_of(envelope))
        else:
            if call is not None:
                call.succeed(value)

    def on_confirmed(self, worker: WorkerInfo, payload: object) -> None:
        """Completes a call with None, as a control message in place of its answer says. Does not block."""
        source = self._peers.by_id[worker.wire_id]
        if not isinstance(payload, tuple) or len(payload) != 1:
            raise ValueError("malformed message: it confirms no request")
        call = self.in_flight.get(identifier := payload[0])
        if call is not None and call.peer is not source:
            raise ValueError(f"worker {worker.name!r} confirms a request to another worker")
        call = self.in_flight.pop(identifier, None)
        if call is not None or identifier in source.window.calls:
            self._release(source, identifier)
        if call is None:
            self._take_orphan(source, identifier)  # it has failed meanwhile
        elif call.future.has_callbacks:
            self._executor.submit(call.succeed, None)
        else:
            call.succeed(None)

    def note_rejected(self, source: Peer, envelope: agent_pb2.Envelope, error: Exception) -> Callable[[], None]:
        """Notes an answer that cannot be read; returns what fails its call. Called on any thread."""
        identifier = envelope.id
        call = self.in_flight.get(identifier)
        is_awaited = self._awaits(source, identifier) if call is None else call.peer is source
        if not is_awaited or identifier in self._arrived:
            log.info("worker %s answers a request that it has not got, or has answered; dropped", source.info.name)
            return partial(self._codec.values.record_refusal, source.info, error)
        self._arrived.add(identifier)
        return partial(self._fail_rejected, source, envelope, error)

    def _fail_rejected(self, source: Peer, envelope: agent_pb2.Envelope, error: Exception) -> None:
        self._codec.values.record_refusal(source.info, error)
        call = self.in_flight.pop(envelope.id, None)
        self._arrived.discard(envelope.id)
        self._release(source, envelope.id)
        if isinstance(error, PayloadLostError):
            error = AnswerFailedError(source.info.name, str(error))
        if call is not None:
            self._fail(call, error, _outcome_of(envelope))

    def _awaits(self, source: Peer, identifier: int) -> bool:
        """Returns whether a worker answers a request that has failed meanwhile, and has not been answered."""
        return identifier in source.window.calls or self._take_orphan(source, identifier)

    def _release(self, peer: Peer, identifier: int) -> None:
        """Counts a request to a worker as answered, or as one that never will be."""
        self.kept.pop(identifier, None)
        self._flow_control.release(peer.window, identifier)

    def _take_orphan(self, peer: Peer, identifier: int) -> bool:
        """Returns, once, whether a worker answers a request that has failed because it was suspect."""
        return self._orphans.get(identifier) is peer and self._orphans.pop(identifier, None) is not None

    # Other ends.

    def _fail(self, call: Call, error: Exception, outcome: Outcome) -> None:
        """Fails a call that has been taken out of those in flight, or has it sent again."""
        if not call.fail(error, outcome) and not self._pause(call):
            assert call.repeats is not None
            call.end(error, call.repeats.outcome)

    def _take_and_fail(self, call: Call, error: Exception, outcome: Outcome | None = None) -> bool:
        """Fails a call unless it has ended; returns whether it had not."""
        if self.in_flight.pop(call.identifier, None) is None:
            return False
        self._fail(call, error, call.outcome_without() if outcome is None else outcome)
        return True

    def cancel(self, identifier: int) -> bool:
        """Fails a call with RpcCancelledError; returns False if it has ended. Called on any thread."""
        if (call := self.in_flight.pop(identifier, None)) is None:
            return False
        try:
            self._withdraw(call)
        finally:
            self._fail(call, RpcCancelledError(call.peer.info.name), call.outcome_without())
        return True

    def _withdraw(self, call: Call, then: Callable[[], None] = lambda: None) -> None:
        """Takes a call back that was sent, and notes in `is_withdrawn` whether nothing of it will arrive.

        What follows is called on any thread, and must not block; it is not called if the event loop has ended.
        """
        message = call.message if call.state is State.SENT and call.handler.cancellable else None
        if message is None:
            then()
        elif message.payloads:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it what was queued
                self._parts.call_soon(self._withdraw_message, call, message, then)
        else:
            self._withdraw_message(call, message, then)

    def _withdraw_message(self, call: Call, message: Outgoing, then: Callable[[], None]) -> None:
        """Called on the event loop if there are payloads outside the envelope."""
        identifier = message.envelope.id
        if call.peer.withdraw(message):
            call.is_withdrawn = True
            self._release(call.peer, identifier)
            self._codec.resend_control(call.peer, message)
            self._executor.submit(self._extensions.on_send_aborted, message)
        else:
            cancel = agent_pb2.Envelope(id=identifier, type=CANCEL)
            with contextlib.suppress(*CONNECTION_ERRORS):
                call.peer.send(cancel.SerializeToString())
        then()

    def _expire(self, identifier: int) -> None:
        """Handles an expired timeout. Called on the thread of the deadlines; must not block."""
        # The call is not taken here: if the executor closes first, `fail_all` completes it.
        self._executor.submit(self.time_out, identifier)

    def time_out(self, identifier: int) -> None:
        """Fails a call whose time is up. Runs on a thread of the executor."""
        if (call := self.in_flight.get(identifier)) is not None:
            call.is_expired = True
            self._withdraw(call, partial(self._executor.submit, self._fail_timed_out, call))

    def _fail_timed_out(self, call: Call) -> None:
        self._take_and_fail(call, call.timeout_error())

    # What becomes of its workers.

    def note_suspect(self, worker: WorkerInfo, reason: str) -> Callable[[], None]:
        """Returns what fails the calls that get no answer from a worker that does not answer."""
        peer = self._peers.of(worker)
        sent = peer.window.calls.copy()
        in_flight = self.in_flight.copy()  # after the others, to which a new call is added later
        # Those of the first kind are about to find out; what has not been sent may wait for the worker.
        waits = peer.absence is not None and peer.absence.waits
        spared = {State.NEW, State.POSTPONED} if waits else {State.NEW}
        concerned = [
            call
            for call in in_flight.values()
            if call.peer is peer and call.state not in spared and call.identifier not in self._arrived
        ]
        failed = sent.keys() - in_flight.keys()
        return partial(self._fail_suspect, peer, reason, peer.take_unsent(), concerned, failed)

    def _fail_suspect(
        self,
        peer: Peer,
        reason: str,
        unsent: Collection[bytes],
        concerned: Collection[Call],
        failed: Collection[int],
    ) -> None:
        """Fails the calls concerned to a worker that does not answer; those with the ids `failed` have failed.

        `unsent` has the beginnings of the envelopes that have not left this process.
        """
        for identifier in (*failed, *(call.identifier for call in concerned)):
            self._release(peer, identifier)  # first: callbacks may make calls that wait for capacity
        for call in concerned:
            identifier = call.identifier
            if self.in_flight.pop(identifier, None) is None:
                continue
            outcome = call.outcome_without(unsent)
            if outcome is Outcome.UNKNOWN:
                self._orphans[identifier] = peer
                while len(self._orphans) > _MAX_ORPHANS:
                    self._orphans.popitem(last=False)
            self._fail(call, WorkerSuspectError(peer.info.name, reason), outcome)

    def note_back(self, worker: WorkerInfo) -> Callable[[], None]:
        """Returns what sends the calls to a worker that has not answered."""
        return partial(self._send_postponed, self._peers.of(worker))

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Fails the calls to a worker that is lost."""
        peer = self._peers.of(worker)
        sent = peer.window.calls.copy()
        self._flow_control.release_all(peer.window)  # first: callbacks may make calls that wait for capacity
        unsent = peer.take_unsent()
        for call in self.in_flight.copy().values():
            if call.peer is peer and call.identifier not in self._arrived:
                self._take_and_fail(call, end.as_error(worker.name), call.outcome_without(unsent))
        for identifier in sent:
            self.kept.pop(identifier, None)
        for identifier, receiver in self._orphans.copy().items():
            if receiver is peer:
                self._orphans.pop(identifier, None)

    def count_unanswered(self) -> Mapping[str, int]:
        """Returns the number of users' calls without an answer, by the name of the worker called."""
        calls = [each for each in list(self.in_flight.values()) if each.handler.user_values]
        return Counter(each.peer.info.name for each in calls)

    def stop_deadlines(self) -> None:
        """Ends the clock: no request times out from now on."""
        self._deadlines.close()

    def fail_all(self, error: Exception) -> None:
        """Fails all calls, and those that are sent from now on."""
        self.finalizer_calls.close()
        for call in list(self.in_flight.values()):
            self._take_and_fail(call, copy_error(error))
        self._closed_by = error
        for number in list(self._paused):
            if (paused := self._take_paused(number)) is not None and paused.repeats is not None:
                paused.end(copy_error(error), paused.repeats.outcome)
        self._flow_control.close()  # last: those that wait have failed, so they are not sent
        self.kept.clear()


def _outcome_of(answer: agent_pb2.Envelope) -> Outcome:
    """Returns what has become of a request that an error answers, or another answer that cannot be read."""
    return Outcome.NOT_SENT if answer.not_begun else Outcome.RAN
