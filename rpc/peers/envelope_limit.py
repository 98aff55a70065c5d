"""The largest envelope that is sent: receivers refuse larger ones."""

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from ...errors import SerializationError
from ..transports.settings import MAX_ENVELOPE_BYTES
from ..wire.parsing import check_envelope

__all__ = ["LARGE_BYTES", "check_size"]

LARGE_BYTES = 1 << 20
"""Bytes of an envelope from which on it may be too large."""


def check_size(envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
    """Raises SerializationError if a serialized envelope has too many bytes, or too many parts.

    Args:
        envelope: the envelope.
        attached: what is put into it where there is no socket.
    """
    nbytes = len(envelope) + sum(map(len, attached))
    problem = f"{nbytes} bytes, of {MAX_ENVELOPE_BYTES} at most"
    if nbytes <= MAX_ENVELOPE_BYTES:
        try:
            check_envelope(envelope)
        except DecodeError:
            problem = "too many parts"
        else:
            return
    raise SerializationError(
        "the message",
        f"its envelope has {problem}: too many tensors or references; stack small tensors into large ones",
    )
