"""Requests that nobody waits for any more, because they were cancelled or their time is up.

One of which nothing is on its way yet is taken back. The worker of another one is asked not to begin it.
"""

import contextlib
from collections.abc import Callable
from typing import final

from ...errors import SendFailedError, WorkerLostError, WorkerSuspectError
from ...proto.v1 import agent_pb2
from ..contracts.messages import CANCEL, Outgoing
from ..execution.executor import Executor
from .extensions import Extensions
from .flow_control import FlowControl
from .network import Network
from .pending import PendingRequest, PendingRequests

__all__ = ["Withdrawals"]

MAX_KEPT_BYTES = 1024
"""Bytes of the body and tensors of a pending request that may stay in its envelope; larger ones are removed."""


@final
class Withdrawals:
    """Takes requests of one agent back. Safe to use from any thread."""

    def __init__(
        self,
        requests: PendingRequests,
        network: Network,
        flow_control: FlowControl,
        extensions: Extensions,
        executor: Executor,
    ) -> None:
        """Takes nothing back yet.

        Args:
            requests: may keep objects alive for a request.
            network: has the queues.
            flow_control: counts requests in flight.
            extensions: have hooks.
            executor: runs the hooks.
        """
        self._requests = requests
        self._network = network
        self._flow_control = flow_control
        self._extensions = extensions
        self._executor = executor

    def keep(self, pending: PendingRequest, message: Outgoing) -> None:
        """Keeps what is needed to take a request back that has been sent: not its value."""
        if not pending.handler.cancellable:
            return
        if message.nbytes > MAX_KEPT_BYTES:
            message.envelope.ClearField("body")
            message.envelope.ClearField("tensors")
        message.body, message.tensors, message.references = b"", [], []
        pending.sent = message

    def take_back(self, pending: PendingRequest, then: Callable[[], None] = lambda: None) -> None:
        """Takes a request back, and notes in `is_withdrawn` whether nothing of it will arrive.

        Args:
            pending: the request.
            then: called afterwards, on any thread; not if the event loop has ended. Must not block.
        """
        if pending.sent is not None and pending.sent.payloads:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it what was queued
                self._network.call_soon(self._take_back, pending, pending.sent, then)
        elif pending.sent is not None:
            self._take_back(pending, pending.sent, then)
        else:
            then()

    def _take_back(self, pending: PendingRequest, sent: Outgoing, then: Callable[[], None]) -> None:
        """Called on the event loop if there are payloads outside the envelope."""
        identifier = pending.identifier
        if self._network.withdraw(sent, sent.payloads):
            pending.is_withdrawn = True
            self._requests.kept.pop(identifier, None)
            self._flow_control.release(pending.worker.wire_id, identifier)
            self._executor.submit(self._extensions.on_send_aborted, sent)
        else:
            cancel = agent_pb2.Envelope(id=identifier, type=CANCEL)
            with contextlib.suppress(WorkerLostError, WorkerSuspectError, SendFailedError):
                self._network.send(pending.worker, cancel.SerializeToString())
        then()
