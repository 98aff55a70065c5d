"""Bytes that travel with an envelope without being copied into it or out of it.

On a socket they follow the envelope: the sender writes them from the memory of the tensors, and the receiver reads
them into memory that becomes that of its tensors. So a tensor of some 100 KiB between hosts costs one write and
needs no other connection. Where there is no socket, they are a field of the envelope.
"""

from collections.abc import Sequence
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from .framing import bytes_field

__all__ = ["AttachedReader", "embed"]


def embed(envelope: bytes, attached: Sequence[memoryview]) -> bytes:
    """Returns a serialized envelope that has the attached bytes as a field."""
    if not attached:
        return envelope
    nbytes = sum(each.nbytes for each in attached)
    return b"".join([envelope, bytes_field(agent_pb2.Envelope.ATTACHED_FIELD_NUMBER, nbytes), *attached])


@final
class AttachedReader:
    """Reads the payloads that came with one envelope: a PayloadReader, and AnswerPayloads."""

    def __init__(self, envelope: agent_pb2.Envelope, attached: memoryview | None) -> None:
        """Args: envelope: the envelope. attached: the bytes that followed it; None if they are a field of it."""
        self._attached: Buffer = envelope.attached if attached is None else attached
        self.is_released = False

    def release(self) -> None:
        """Keeps the bytes no longer."""
        self.is_released = True
        self._attached = b""

    def read(self, payload: agent_pb2.Payload) -> Buffer:
        """Does what calling this object does."""
        return self(payload)

    def __call__(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes of a payload in the envelope, or attached to it. Raises ValueError."""
        if not payload.HasField("attached"):
            return payload.inline
        begin = payload.attached.offset
        end = begin + payload.attached.nbytes
        if end > len(self._attached):
            raise ValueError(f"malformed payload: bytes {begin} to {end} of {len(self._attached)} attached ones")
        return self._attached[begin:end]
