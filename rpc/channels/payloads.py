"""The payloads of an envelope, its body and the bytes of its tensors, and how its receiver collects them."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.devices import DeviceBuffer
from ..contracts.messages import Buffer
from ..wire.parsing import find_misplaced, read_attached
from .base import Arriving, Channel
from .channels import PeerChannels

__all__ = [
    "Collecting",
    "EnvelopePayloads",
    "PayloadReader",
    "body_of",
    "has_come",
    "payloads_of",
    "read_inline",
]

_HERE = ("inline", "attached", "gathered", None)
"""The locations of payloads that came with the envelope, and of parts of others."""

PayloadReader = Callable[[agent_pb2.Payload], Buffer | DeviceBuffer]
"""Returns the bytes of a payload of one received envelope. Only tensors have a DeviceBuffer."""

Collecting = concurrent.futures.Future[PayloadReader]
"""The payloads of an envelope, some of which have not arrived."""

_ON_LOOP = frozenset({"chunked", "broadcast"})
"""The channels that receive on the event loop only."""

_ARRIVING = frozenset({*_ON_LOOP, "bulk"})
"""The channels that allocate memory before the bytes of a payload arrive."""


def has_come(payload: agent_pb2.Payload) -> bool:
    """Returns whether a payload came with its envelope, or is a part of another one."""
    return payload.WhichOneof("location") in _HERE


def read_inline(payload: agent_pb2.Payload) -> Buffer:
    """Returns the bytes of a payload inside its envelope."""
    return payload.inline


def body_of(envelope: agent_pb2.Envelope, payloads: PayloadReader) -> Buffer:
    """Returns the body of a received envelope. Raises ValueError if it is on a device, as only tensors are."""
    body = payloads(envelope.body)
    if not isinstance(body, bytes | memoryview):
        raise ValueError("malformed message: its body is in device memory")
    return body


def payloads_of(envelope: agent_pb2.Envelope) -> list[agent_pb2.Payload]:
    """Returns the payloads of body and tensors, those of the parts of sparse and quantized tensors included."""
    payloads, tensors = [envelope.body], list(envelope.tensors)
    for tensor in tensors:
        payloads.append(tensor.data)
        if tensor.parts:
            tensors += tensor.parts  # which this loop reaches, too
    return payloads


@final
class EnvelopePayloads:
    """The payloads of one received envelope."""

    def __init__(
        self, channels: PeerChannels, envelope: agent_pb2.Envelope, attached: memoryview | None = None
    ) -> None:
        """Finds where the payloads are, and collects none of them.

        `attached` are the bytes that followed the envelope, if they are not in it.
        """
        self._channels = channels
        self._outside: list[tuple[agent_pb2.Payload, Channel]] = []
        self._received: dict[bytes, Buffer | DeviceBuffer] = {}
        """By serialized description."""
        self._announced, self._announced_bytes = 0, 0
        """Payloads that are received into memory of this worker, and their bytes."""
        self.nbytes = 0
        """Of the payloads outside the envelope, as it tells them."""
        self.needs_loop = False
        """Whether some of them have to be collected on the event loop."""
        problem = ""
        payloads = payloads_of(envelope)
        for payload in payloads:
            if (location := payload.WhichOneof("location")) in _HERE:
                continue
            assert location is not None
            if (channel := channels.find(location)) is None:
                problem = f"a payload is refused: there is no channel {location!r} to this worker"
                continue
            self._outside.append((payload, channel))
            self.needs_loop |= location in _ON_LOOP
            if location != "local":
                nbytes = getattr(payload, location).nbytes
                self.nbytes += nbytes
                if location in _ARRIVING:
                    self._announced += 1
                    self._announced_bytes += nbytes
        self._read_here: PayloadReader = read_inline
        data = envelope.attached if attached is None else attached
        if attached is not None or data:
            problem = problem or find_misplaced(payloads, len(data), channels.options.max_payload_bytes)
            self._read_here = partial(read_attached, data)
        self._problem = problem
        """Why all of them are refused; empty if they are not."""

    def collect(self) -> PayloadReader | Collecting:
        """Collects the payloads. Called on the event loop if `needs_loop`, else by the thread that reads.

        Returns their reader if all have arrived; else a future of it, which fails with the first that does. Raises
        an error, and discards all of them, if one is refused, or there is no memory for it.
        """
        if self._problem:
            self._discard(self._outside)
            raise ValueError(self._problem)
        if not self._outside:
            return self._read_here
        begun, pending = 0, {}
        try:
            if self._announced:
                self._channels.announced.begin(self._announced, self._announced_bytes)
                begun = self._announced
            for payload, channel in self._outside:
                data, key = channel.receive(payload), payload.SerializeToString()
                if isinstance(data, concurrent.futures.Future):
                    pending[key] = data
                else:
                    self._received[key] = data
        except Exception:
            if begun:
                self._end()
            self._discard([each for each in self._outside if each[0].SerializeToString() not in self._received])
            raise
        if not pending:
            return self.read
        return self._when_all_arrived(pending)

    def _when_all_arrived(self, pending: dict[bytes, Arriving]) -> Collecting:
        collected = Collecting()
        count = len(self._received) + len(pending)

        # Futures keep their callbacks, so these refer to no payload.
        def on_arrival(key: bytes, arrived: Arriving) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread was first
                if arrived.cancelled():  # it is discarded, because another message announces the same transfer
                    collected.cancel()
                elif (error := arrived.exception()) is not None:
                    collected.set_exception(error)
                else:
                    self._received[key] = arrived.result()
                    if len(self._received) == count:
                        collected.set_result(self.read)

        collected.add_done_callback(lambda _: self._end())
        for key, future in pending.items():
            future.add_done_callback(partial(on_arrival, key))
        return collected

    def read(self, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
        """Returns the bytes of a payload, once."""
        if has_come(payload):
            return self._read_here(payload)
        # Kept no longer: a segment goes back when nothing refers to its bytes.
        return self._received.pop(payload.SerializeToString())

    def _end(self) -> None:
        self._channels.announced.end(self._announced, self._announced_bytes)

    def _discard(self, payloads: Sequence[tuple[agent_pb2.Payload, Channel]]) -> None:
        for payload, channel in payloads:
            with contextlib.suppress(Exception):  # else those after it would not be discarded
                channel.discard(payload)
