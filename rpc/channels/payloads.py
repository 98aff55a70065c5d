"""Looks at the payloads of an envelope: its body, and the bytes of its tensors."""

from collections.abc import Callable, Iterator

from ...proto.v1 import agent_pb2
from ..contracts.devices import DeviceBuffer
from ..contracts.messages import Buffer

__all__ = [
    "HERE",
    "PayloadReader",
    "body_of",
    "has_come",
    "payloads_of",
    "read_inline",
]

HERE = ("inline", "attached", "gathered", None)
"""The locations of payloads that came with the envelope, and of parts of others."""

PayloadReader = Callable[[agent_pb2.Payload], Buffer | DeviceBuffer]
"""Returns the bytes of a payload of one received envelope. Only tensors have a DeviceBuffer."""


def has_come(payload: agent_pb2.Payload) -> bool:
    """Returns whether a payload came with its envelope, or is a part of another one."""
    return payload.WhichOneof("location") in HERE


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
    payloads = [envelope.body]
    for tensor in envelope.tensors:
        payloads.append(tensor.data)
        if tensor.parts:
            payloads += _payloads_of_parts(tensor)
    return payloads


def _payloads_of_parts(tensor: agent_pb2.Tensor) -> Iterator[agent_pb2.Payload]:
    parts = list(tensor.parts)
    while parts:
        part = parts.pop()
        yield part.data
        parts.extend(part.parts)
