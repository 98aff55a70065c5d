"""The requests that this worker has sent, until they are answered."""

import asyncio
import itertools
from functools import partial
from typing import Any, final

import torch

from ...errors import (
    Outcome,
    RpcCancelledError,
    SendFailedError,
    UnknownWorkerError,
    WorkerLostError,
    WorkerSuspectError,
    set_outcome,
)
from ...proto.v1 import agent_pb2
from ..channels.broadcast.sending import Broadcast
from ..contracts.devices import DeviceMap
from ..contracts.messages import CONTROL, Outgoing, Request
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly
from ..execution.deadlines import Deadlines
from ..execution.executor import Executor
from ..execution.futures import Future
from ..execution.kept_errors import copy_error
from ..wire.device_maps import device_map_to_proto
from ..wire.pickling import Packed
from ..wire.tensors import bytes_of
from .codec import Codec
from .extensions import Extensions
from .factories import DeadlinesFactory
from .finalizer_calls import FinalizerCalls
from .flow_control import FlowControl, Waiter
from .network import Network
from .pending import PendingRequest, PendingRequests
from .retries import Retries, Retry
from .stats import CallCounter
from .waiting_calls import WaitingCalls
from .withdrawals import Withdrawals

__all__ = ["Client"]


@final
class Client:
    """Sends the requests of one agent; they fail when their time is up, or when they are cancelled."""

    def __init__(
        self,
        requests: PendingRequests,
        codec: Codec,
        network: Network,
        extensions: Extensions,
        executor: Executor,
        calls: CallCounter,
        flow_control: FlowControl,
        make_deadlines: DeadlinesFactory,
        name: str,
    ) -> None:
        """Makes the client of one agent.

        Args:
            requests: completes requests.
            codec: encodes them.
            network: takes messages back that are cancelled.
            extensions: know the message types, and have hooks.
            executor: runs what an expired deadline causes, and is told of threads that wait for an answer.
            calls: counts users' calls in flight.
            flow_control: bounds them.
            make_deadlines: makes the clock of the timeouts.
            name: of this worker, for the clock's thread.
        """
        self._requests = requests
        self._codec = codec
        self._network = network
        self._extensions = extensions
        self._executor = executor
        self._calls = calls
        self._flow_control = flow_control
        self._nesting = flow_control.nesting
        self._finalizer_calls = FinalizerCalls(executor, network.call_soon)
        self._withdrawals = Withdrawals(requests, network, flow_control, extensions, executor)
        self._retries = Retries(executor, network.call_soon, calls, self._find_present, self._send_again)
        self.waiting = WaitingCalls(
            requests, codec, network, extensions, executor, self._withdrawals.keep, self._release_unsent
        )
        """The calls that wait for workers that do not answer."""
        self._ids = itertools.count(1)
        self._deadlines: Deadlines[int] = make_deadlines(
            self._expire, requests.pending.__contains__, requests.pending.__len__, f"gradwire-deadlines-{name}"
        )

    # Sending: on any thread.

    def send(self, worker: WorkerInfo, request: Request, timeout: float) -> Future[Any]:
        """Sends a request: see `RpcAgent.request`.

        Args:
            worker: the receiver.
            request: what to send.
            timeout: seconds, 0 for none.
        """
        if self._finalizer_calls.is_collecting_here():
            send = partial(self.send, worker, request, timeout)
            operation = self._extensions.handlers[request.kind].operation
            return self._finalizer_calls.send(send, worker.name, operation)
        device_map = self._codec.device_map(worker)
        packed = self._codec.pack_request(request, worker, device_map)
        retry = self._retry(worker, request, timeout) if request.idempotent else None
        return self.send_packed(worker, request, timeout, packed, packed.tensors, device_map, retry=retry)

    async def send_async(self, worker: WorkerInfo, request: Request, timeout: float) -> Future[Any]:
        """Sends a request as `send` does, but awaits capacity for it instead of blocking."""
        device_map = self._codec.device_map(worker)
        packed = self._codec.pack_request(request, worker, device_map)
        retry = self._retry(worker, request, timeout) if request.idempotent else None
        identifier, waiter = next(self._ids), None
        try:
            pending, message = self._begin(
                identifier, worker, request, timeout, packed, packed.tensors, device_map, retry
            )
            if message.user_values and (waiter := self._admit(pending, message, blocks=False)) is not None:
                await asyncio.wrap_future(waiter.woken)
            is_to_be_sent = waiter is None or self._is_to_be_sent(pending, message)
            is_sent = is_to_be_sent and self._send_or_wait(pending, message)
        except BaseException as error:
            if not self._roll_back(identifier, worker, error, retry):
                raise
        else:
            self._note_sent(pending, message, waiter, is_sent=is_sent)
        return pending.future

    def send_packed(
        self,
        worker: WorkerInfo,
        request: Request,
        timeout: float,
        packed: Packed,
        tensors: list[torch.Tensor],
        device_map: DeviceMap,
        broadcast: Broadcast | None = None,
        *,
        retry: Retry | None = None,
    ) -> Future[Any]:
        """Sends a request whose value is pickled.

        Args:
            worker: the receiver.
            request: what to send.
            timeout: seconds, 0 for none.
            packed: the value.
            tensors: those of the value, in a list that extensions may change.
            device_map: which the value was pickled for.
            broadcast: what the message shares with messages to other workers.
            retry: sends it again if it may run more than once.
        """
        identifier, waiter = next(self._ids), None
        try:
            pending, message = self._begin(
                identifier, worker, request, timeout, packed, tensors, device_map, retry
            )
            if message.user_values and (waiter := self._admit(pending, message)) is not None:
                with self._executor.blocking():
                    wait_interruptibly(waiter.woken.result)
            is_to_be_sent = waiter is None or self._is_to_be_sent(pending, message)
            is_sent = is_to_be_sent and self._send_or_wait(pending, message, broadcast)
            if broadcast is not None and not is_sent:
                broadcast.not_sent(worker.wire_id)
        except BaseException as error:
            if broadcast is not None:
                broadcast.not_sent(worker.wire_id)
            if not self._roll_back(identifier, worker, error, retry):
                raise
        else:
            self._note_sent(pending, message, waiter, is_sent=is_sent)
        return pending.future

    def _begin(
        self,
        identifier: int,
        worker: WorkerInfo,
        request: Request,
        timeout: float,
        packed: Packed,
        tensors: list[torch.Tensor],
        device_map: DeviceMap,
        retry: Retry | None,
    ) -> tuple[PendingRequest, Outgoing]:
        """Makes the message of a request, and registers it: the answer may arrive before `send` returns."""
        handler = self._extensions.handlers[request.kind]
        if handler.user_values:
            for on_request in self._extensions.on_request:
                on_request(identifier, worker, request)
        envelope = agent_pb2.Envelope(id=identifier, type=request.kind)
        if device_map:
            envelope.device_map.extend(device_map_to_proto(device_map))
        if request.header is not None:
            request.header(envelope)
        message = Outgoing(
            worker,
            envelope,
            packed.body,
            tensors,
            packed.references,
            None,
            handler.user_values,
            device_map,
            packed.leaves,
        )
        if retry is not None and retry.attempts:
            future = retry.future
        else:
            cancel = partial(self.cancel, identifier) if handler.cancellable else None
            read_answer = self._network.answer_reader(worker)
            future = Future(self._executor, cancel, worker.name, handler.operation, read_answer)
        if handler.user_values:
            self._calls.begin_request(identifier)
        depth = self._nesting.depth
        if depth:
            envelope.depth = depth
        pending = PendingRequest(identifier, future, worker, handler, timeout, depth)
        pending.tell_timeout(envelope)
        if retry is not None:
            self._note_attempt(pending, retry)
        self._requests.pending[identifier] = pending
        if request.keep is not None:
            self._requests.kept[identifier] = worker.wire_id, request.keep
        return pending, message

    def _send_or_wait(
        self, pending: PendingRequest, message: Outgoing, broadcast: Broadcast | None = None
    ) -> bool:
        """Sends a request; returns False if it waits for its worker, which does not answer."""
        if message.envelope.type == CONTROL:  # which is sent again, by who has sent it
            self._codec.send(message)
        elif not self._codec.try_to_send(message, broadcast):
            self.waiting.add(pending, message)
            return False
        return True

    def _admit(self, pending: PendingRequest, message: Outgoing, *, blocks: bool = True) -> Waiter | None:
        """Counts a call as in flight. Returns what to wait for first if there is no capacity."""
        nbytes = len(message.body)
        if message.tensors:
            nbytes += bytes_of(message.tensors)
        waiter = self._flow_control.admit(pending.worker, pending.identifier, nbytes, blocks=blocks)
        if waiter is not None:
            pending.is_waiting = True
            pending.begin_wait(waiter.wake)
            # Its timeout, the loss of its worker and shutdown fail the call, which ends the wait.
            pending.future.add_done_callback(waiter.wake)
            if pending.timeout:
                self._deadlines.add(pending.identifier, pending.timeout)
            if pending.worker.wire_id in self._network.lost:  # handled before the request was registered
                waiter.wake()
        return waiter

    def _is_to_be_sent(self, pending: PendingRequest, message: Outgoing) -> bool:
        """Returns whether a call that has waited for capacity has not failed meanwhile."""
        pending.is_waiting = False
        if pending.identifier in self._requests.pending:
            pending.tell_timeout(message.envelope)
            return True
        self._release_unsent(pending.identifier, pending.worker)
        return False

    def _release_unsent(self, identifier: int, worker: WorkerInfo) -> None:
        self._requests.kept.pop(identifier, None)
        self._flow_control.abandon(worker.wire_id, identifier)

    def _note_sent(
        self, pending: PendingRequest, message: Outgoing, waiter: Waiter | None, *, is_sent: bool
    ) -> None:
        if is_sent:
            self._withdrawals.keep(pending, message)
        if pending.timeout and waiter is None:
            self._deadlines.add(pending.identifier, pending.timeout)

    def _roll_back(self, identifier: int, worker: WorkerInfo, error: BaseException, retry: Retry | None) -> bool:
        """Undoes `_begin` and `_admit` for a request that was not sent, however far they have come.

        Returns:
            Whether the error fails the future. Else the caller gets it at once.
        """
        self._release_unsent(identifier, worker)
        pending = self._requests.take(identifier)  # None if the loss of its worker has completed it
        if isinstance(error, SendFailedError) and pending is not None:
            error = SendFailedError(worker.name, error.reason, pending.handler.description)
        if isinstance(error, WorkerLostError | WorkerSuspectError | SendFailedError) or (
            isinstance(error, Exception) and retry is not None and retry.attempts > 1
        ):
            self._requests.fail(pending, error, Outcome.NOT_SENT)
            return True
        set_outcome(error, Outcome.NOT_SENT)
        self._extensions.on_failure(identifier, error, Outcome.NOT_SENT)
        self._extensions.on_complete(identifier)
        self._calls.end_request(identifier)
        return False

    def cancel(self, identifier: int) -> bool:
        """Fails a request with RpcCancelledError; returns False if it is complete. Called on any thread."""
        pending = self._requests.take(identifier)
        if pending is None:
            return False
        self._withdrawals.take_back(pending)
        self._requests.fail(pending, RpcCancelledError(pending.worker.name), pending.outcome_without())
        return True

    # Calls that may run more than once.

    def _retry(self, worker: WorkerInfo, request: Request, timeout: float) -> Retry | None:
        """Returns what sends a request again; None if this thread has something that another one lacks."""
        if not self._extensions.may_repeat():
            return None
        return Retry(self._retries, worker, request, timeout, self._nesting.depth)

    def _note_attempt(self, pending: PendingRequest, retry: Retry) -> None:
        if not retry.attempts:
            retry.future = pending.future
            retry.future.set_cancel(partial(self._cancel_attempts, retry))
        retry.attempts += 1
        retry.identifier = pending.identifier
        pending.retry = retry

    def _cancel_attempts(self, retry: Retry) -> bool:
        retry.is_cancelled = True  # for an attempt that begins at this moment
        if self.cancel(retry.identifier) or self._retries.cancel(retry):
            return True
        return not retry.future.is_completing

    def _find_present(self, name: str) -> WorkerInfo | None:
        try:
            worker = self._network.worker(name)
        except UnknownWorkerError:
            return None
        absence = self._network.absence(worker)
        return worker if absence is None or absence.waits else None

    def _send_again(self, worker: WorkerInfo, retry: Retry) -> None:
        """Sends a call once more. Raises what keeps it from being sent at all."""
        request = retry.request
        with self._nesting.at(retry.depth):
            device_map = self._codec.device_map(worker)
            packed = self._codec.pack_request(request, worker, device_map)
            timeout = retry.seconds_left()
            self.send_packed(worker, request, timeout, packed, packed.tensors, device_map, retry=retry)
        if retry.is_cancelled:
            self.cancel(retry.identifier)

    def is_collecting_here(self) -> bool:
        """Returns whether the calling thread runs a finalizer in a garbage collection."""
        return self._finalizer_calls.is_collecting_here()

    def stop_deadlines(self) -> None:
        """Ends the clock: no request times out from now on."""
        self._deadlines.close()

    def fail_all(self, error: Exception) -> None:
        """Fails all requests that are pending, and those that are sent from now on."""
        self._finalizer_calls.close()
        for identifier in list(self._requests.pending):
            if (pending := self._requests.take(identifier)) is not None:
                self._requests.fail(pending, copy_error(error), pending.outcome_without())
        self._retries.close(error)
        self._flow_control.close()  # last: those that wait have failed, so they are not sent
        self._requests.kept.clear()

    def _expire(self, identifier: int) -> None:
        """Handles an expired timeout. Called on the thread of the deadlines; must not block."""
        # The request is not taken here: if the executor closes first, `fail_all` completes it.
        self._executor.submit(self._time_out, identifier)

    def _time_out(self, identifier: int) -> None:
        if (pending := self._requests.pending.get(identifier)) is not None:
            pending.is_expired = True
            then = partial(self._executor.submit, self._fail_timed_out, identifier)
            self._withdrawals.take_back(pending, then)

    def _fail_timed_out(self, identifier: int) -> None:
        if (pending := self._requests.take(identifier)) is not None:
            self._requests.fail(pending, pending.timeout_error(), pending.outcome_without())
