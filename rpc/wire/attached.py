"""Bytes that travel with an envelope without being copied into it or out of it.

On a socket they follow the envelope: the sender writes them from the memory of the tensors. The receiver reads
what has not come with the envelope into memory that becomes that of its tensors. So a tensor of some 100 KiB
between hosts costs one write and needs no other connection. Without a socket, they are a field of the envelope.
"""

from collections.abc import Iterable, Sequence
from typing import Final, final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from .parsing import bytes_field

__all__ = ["ALIGNMENT", "AttachedReader", "embed", "find_misplaced"]

ALIGNMENT: Final = 64
"""Bytes: attached payloads begin at multiples of it."""


def embed(envelope: bytes, attached: Sequence[memoryview]) -> bytes:
    """Returns a serialized envelope that has the attached bytes as a field."""
    if not attached:
        return envelope
    nbytes = sum(each.nbytes for each in attached)
    return b"".join([envelope, bytes_field(agent_pb2.Envelope.ATTACHED_FIELD_NUMBER, nbytes), *attached])


def find_misplaced(payloads: Iterable[agent_pb2.Payload], nbytes: int, max_payload_bytes: int) -> str:
    """Returns what is wrong with the attached ones among all payloads of an envelope; empty if nothing is.

    `nbytes` bytes are attached. One payload may have `max_payload_bytes`.
    """
    places = [(each.attached.offset, each.attached.nbytes) for each in payloads if each.HasField("attached")]
    after = 0
    for offset, size in sorted(places):
        if offset < after or offset % ALIGNMENT or not 0 < size <= min(max_payload_bytes, nbytes - offset):
            return (
                f"a payload of {size} bytes at {offset} of {nbytes} attached ones is refused: max_payload_bytes "
                f"is {max_payload_bytes}"
            )
        after = offset + size
    return ""


@final
class AttachedReader:
    """Reads the payloads that came with one envelope. `read` is a PayloadReader."""

    def __init__(self, envelope: agent_pb2.Envelope, attached: memoryview | None) -> None:
        """Args: envelope: the envelope. attached: the bytes that followed it; None if they are a field of it."""
        self._attached: Buffer = envelope.attached if attached is None else attached

    def read(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes of a payload in the envelope, or attached to it; `find_misplaced` has found none."""
        if not payload.HasField("attached"):
            return payload.inline
        begin = payload.attached.offset
        return self._attached[begin : begin + payload.attached.nbytes]
