"""The control messages that a worker receives: each is processed once, and its outcome kept for a repetition.

control.py has the protocol.
"""

import logging
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from ...c10d.security import printable
from ...errors import LimitReachedError, RpcError
from ...proto.v1 import agent_pb2
from ..contracts.control import ControlHandler
from ..contracts.messages import Incoming
from ..contracts.worker import WorkerInfo
from ..execution.kept_errors import printable_text
from ..wire.failures import encode_failure

__all__ = ["WINDOW", "ControlInbox", "Loads", "OnRefused"]

WINDOW = 1 << 14
"""Numbers, from the first that is not acknowledged, with which messages are sent to a worker, or accepted."""

MAX_FAILURE_BYTES = 8 << 10
"""Bytes of an outcome that is kept."""

Loads = Callable[[bytes], Any]
"""Returns the value of a pickle from one worker. Raises what unpickling raises, or PolicyError."""

OnRefused = Callable[[WorkerInfo, BaseException], None]
"""Takes the sender of a control message, and the error that its handler has raised."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Received:
    """Control messages received from one worker, by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    floor: int = 0
    outcomes: dict[int, bytes | None] = field(default_factory=dict)
    """The encoded error of each handler that has raised one."""


@final
class ControlInbox:
    """Processes the control messages of all workers, on the executor's threads."""

    def __init__(self) -> None:
        self.handlers: dict[str, ControlHandler] = {}
        """By kind of message."""
        self.on_refused: OnRefused = lambda _source, _error: None
        """Called when a handler has raised."""
        self.received: dict[int, _Received] = defaultdict(_Received)
        """By the sender's wire id."""
        self._lock = threading.Lock()

    def process(self, message: Incoming) -> dict[int, bytes] | None:
        """Processes the control messages of a request; returns the encoded errors of those that failed, by index.

        Those without a request are attached: see `process_attached`.
        """
        header, payloads = message.envelope.control, message.value
        if not message.envelope.id:
            return None
        if len(header.messages) != len(payloads):
            raise ValueError(f"{len(header.messages)} control messages with {len(payloads)} payloads")
        outcomes = self._process_all(message.source, header, payloads)
        failures = {
            index: failure
            for index, each in enumerate(header.messages)
            if (failure := outcomes.get(each.number)) is not None
        }
        return failures or None

    def process_attached(
        self, source: WorkerInfo, header: agent_pb2.ControlHeader, loads: Loads
    ) -> Mapping[int, bytes | None]:
        """Processes the control messages that are attached to another message of a worker.

        Args:
            source: the worker.
            header: has the messages.
            loads: unpickles the payload of one.

        Returns:
            The encoded error of each, by number; None for those whose handlers have returned.
        """
        try:
            return self._process_all(source, header, None, loads)
        except LimitReachedError as error:
            self.on_refused(source, error)
            return {}

    def _process_all(
        self,
        source: WorkerInfo,
        header: agent_pb2.ControlHeader,
        payloads: Sequence[Any] | None,
        loads: Loads = pickle.loads,
    ) -> dict[int, bytes | None]:
        """Processes messages, those of which that have not been.

        Args:
            source: the sender.
            header: has them.
            payloads: of all of them; None if each has a pickle of its own.
            loads: unpickles that.
        """
        with self._lock:
            received = self.received[source.wire_id]
        outcomes: dict[int, bytes | None] = {}
        with received.lock:
            if header.acknowledged_below > received.floor:
                received.floor = header.acknowledged_below
                for number in [n for n in received.outcomes if n < received.floor]:
                    del received.outcomes[number]
            if max([each.number for each in header.messages], default=0) >= received.floor + WINDOW:
                raise LimitReachedError(
                    f"control messages with numbers from {received.floor + WINDOW} on are refused",
                    f"WINDOW={WINDOW}",
                )
            for index, each in enumerate(header.messages):
                if each.number < received.floor:
                    continue  # a straggler of a message that was acknowledged long ago
                if each.number not in received.outcomes:
                    payload = each.payload if payloads is None else payloads[index]
                    load = loads if payloads is None else None
                    received.outcomes[each.number] = self._process(source, each.kind, payload, load)
                outcomes[each.number] = received.outcomes[each.number]
        return outcomes

    def _process(self, source: WorkerInfo, kind: str, payload: Any, load: Loads | None) -> bytes | None:
        """Processes a message, whose payload is pickled if there is `load`. Returns its encoded error, if any."""
        try:
            self.handlers[kind](source, payload if load is None else load(payload))
        except BaseException as error:  # SystemExit, too: the message may be attached to one that has to be served
            problem = printable_text(error)
            log.info("control message %s of worker %s is refused: %s", printable(kind), source.name, problem)
            self.on_refused(source, error)
            failure = encode_failure(error)
            if len(failure) > MAX_FAILURE_BYTES:
                failure = encode_failure(RpcError(f"{type(error).__name__}: {str(error)[:1000]}"))
            return failure
        return None
