"""Control messages inside the envelopes of other messages to the same worker.

A control message that is not urgent waits for any envelope to its worker, and is attached to that: it costs no
message of its own, and no thread is woken for it. What has become of it comes back in the same way. If nobody
sends anything, the control thread sends an envelope for them. None of this is repeated: if an attached message is
not acknowledged in time, it is sent as a request, as urgent ones are.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo
from ..execution.scheduler import Scheduler
from .control_queue import ControlMessage, ControlQueue, do_nothing

__all__ = ["AttachedControl", "Dumps", "Settle"]

MAX_ATTACHED = 64
"""Messages that are attached to one envelope, at most, and numbers of others that have been processed."""

MAX_ATTACHED_FAILURES = 8
"""Errors of others that are attached to one envelope, at most: each may have some KiB (control_inbox.py)."""

MAX_ATTACHED_BYTES = 1 << 10
"""Bytes of the payload of an attached message. A larger one is sent as a request."""

Dumps = Callable[[Any], bytes]
"""Pickles a payload."""

Settle = Callable[[ControlQueue, ControlMessage, Exception | None], None]
"""Tells whoever has sent a message what has become of it."""

T = TypeVar("T")


@final
class AttachedControl:
    """Attaches control messages to envelopes, and takes what is attached to those that arrive."""

    def __init__(
        self,
        scheduler: Scheduler,
        timeout: Callable[[], float],
        attempt: Callable[[ControlQueue, list[ControlMessage]], None],
        settle: Settle,
        resume: Callable[[ControlQueue], None],
        *,
        with_messages: bool,
    ) -> None:
        """Attaches nothing yet.

        Args:
            scheduler: runs `attempt`, `settle` and `resume` on the control thread.
            timeout: returns the seconds after which messages that are not acknowledged are sent as requests.
            attempt: sends messages as requests.
            settle: tells what has become of a message.
            resume: sends messages that have waited for acknowledgements.
            with_messages: whether to attach messages, and not only the outcomes of those received.
        """
        self._scheduler = scheduler
        self._timeout = timeout
        self._attempt = attempt
        self._settle = settle
        self._resume = resume
        self._with_messages = with_messages

    # Sending: on any thread, which holds the lock of the queue.

    def attach(self, queue: ControlQueue, header: agent_pb2.ControlHeader, dumps: Dumps) -> None:
        """Attaches the messages that wait, and the outcomes of those that have been received.

        Those that are to be sent as a request instead, because they are large, or cannot be pickled, are put with
        the urgent ones.
        """
        if queue.processed:
            header.processed.extend(_take(queue.processed, MAX_ATTACHED))
        if queue.failed:
            for number, failure in _take(queue.failed, MAX_ATTACHED_FAILURES):
                header.failed.add(number=number, failure=failure)
        waiting = list(itertools.islice(queue.lingering.copy(), MAX_ATTACHED)) if self._with_messages else []
        if not waiting or queue.exceeds_window(len(waiting)):
            return
        pickled = [(sent, payload) for sent in waiting if (payload := _pickled(sent, dumps)) is not None]
        queue.number([sent for sent, _ in pickled])
        header.acknowledged_below = queue.first_unacknowledged()
        for sent, payload in pickled:
            sent.is_attached = True
            header.messages.add(number=sent.number, kind=sent.kind, payload=payload)
        if len(pickled) < len(waiting):
            queue.urgent.extend([sent for sent in waiting if sent.number < 0])
        for _ in waiting:
            queue.lingering.popleft()

    # Receiving: on any thread.

    def settle(
        self,
        queue: ControlQueue,
        header: agent_pb2.ControlHeader,
        decode: Callable[[WorkerInfo, bytes], Exception],
    ) -> None:
        """Takes note of what has become of attached messages. May be called again with the same header.

        Args:
            queue: that of the worker which tells.
            header: what it tells.
            decode: decodes an error.
        """
        settled: dict[int, tuple[ControlMessage, bytes]] = {}  # a peer may repeat a number
        for number in header.processed:
            sent = queue.unacknowledged.get(number)
            if sent is None:
                continue
            if sent.done is do_nothing:
                queue.unacknowledged.pop(number, None)
            else:
                settled[number] = sent, b""
        for each in header.failed:
            if (sent := queue.unacknowledged.get(each.number)) is not None:
                settled[each.number] = sent, each.failure
        if settled or queue.is_full:
            self._scheduler.submit(partial(self._settle_all, queue, [*settled.values()], decode), urgent=False)

    # On the control thread.

    def send_again(self, queue: ControlQueue) -> None:
        """Sends all attached messages that are not acknowledged as requests: they may be lost."""
        self._send_again(queue, _attached(queue))

    def _send_again(self, queue: ControlQueue, messages: list[ControlMessage]) -> None:
        for sent in messages:
            sent.is_attached = False
        if messages:
            self._attempt(queue, messages)

    def check_later(self, queue: ControlQueue) -> None:
        """Looks later whether the messages that are attached by now have been acknowledged."""
        if not queue.is_checked and (attached := _attached(queue)):
            queue.is_checked = True
            self._scheduler.call_later(self._timeout(), partial(self._check, queue, attached))

    def _check(self, queue: ControlQueue, attached: list[ControlMessage]) -> None:
        queue.is_checked = False
        left = [sent for sent in attached if sent.is_attached and sent.number in queue.unacknowledged]
        self._send_again(queue, left)
        self.check_later(queue)

    def _settle_all(
        self,
        queue: ControlQueue,
        settled: list[tuple[ControlMessage, bytes]],
        decode: Callable[[WorkerInfo, bytes], Exception],
    ) -> None:
        for sent, failure in settled:
            if sent.number in queue.unacknowledged:  # else it was settled meanwhile
                self._settle(queue, sent, decode(queue.worker, failure) if failure else None)
        self._resume(queue)


def _take(queue: deque[T], count: int) -> list[T]:
    """Takes what is in a queue, the first of it if there is more."""
    taken: list[T] = []
    with contextlib.suppress(IndexError):  # also where another thread has dropped the rest
        while len(taken) < count:
            taken.append(queue.popleft())
    return taken


def _attached(queue: ControlQueue) -> list[ControlMessage]:
    """Returns the attached messages that are not acknowledged."""
    return [sent for sent in queue.unacknowledged.copy().values() if sent.is_attached]


def _pickled(sent: ControlMessage, dumps: Dumps) -> bytes | None:
    """Returns the payload of a message as bytes; None if it is to be sent as a request."""
    try:
        payload = dumps(sent.payload)
    except Exception:  # which the request tells whoever has sent it
        return None
    return payload if len(payload) <= MAX_ATTACHED_BYTES else None
