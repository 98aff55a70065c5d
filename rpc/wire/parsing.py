"""The bytes of envelopes and other messages: a look at what peers send before it is parsed, and attached bytes.

An empty message takes 2 bytes on the wire and about 110 in memory, a number of a packed field 1 and 16. So 16 MiB
of hostile bytes can take 0.9 GB. The functions here walk through the tags and lengths of serialized messages
before protobuf allocates anything. Small messages, which cannot take much, are parsed at once.

Attached bytes travel with an envelope without being copied into it or out of it. On a socket they follow the
envelope: the sender writes them from the memory of the tensors. The receiver reads what has not come with the
envelope into memory that becomes that of its tensors. So a tensor of some 100 KiB between hosts costs one write
and needs no other connection. Without a socket, they are a field of the envelope.

Source: the encoding page of the Protocol Buffers documentation.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = [
    "ALIGNMENT",
    "MAX_PARSED_BYTES",
    "SMALL_BYTES",
    "bytes_field",
    "check_envelope",
    "embed",
    "find_misplaced",
    "parse_chunks",
    "parse_envelope",
    "parse_events",
    "parse_frame",
    "parse_hello",
    "read_attached",
]

M = TypeVar("M", bound=Message)

SMALL_BYTES = 1 << 10
"""Bytes of the largest message that is parsed without a look at it: it takes 60 KiB at most."""

MAX_PARSED_BYTES = 128 << 20
"""Bytes of memory that the messages in an envelope, or a frame, may take besides their payloads: enough for
400,000 tensors. Nothing of less than 2 MiB takes so much."""

ALIGNMENT: Final = 64
"""Bytes: attached payloads begin at multiples of it."""

MAX_CHUNKS_BYTES = 4 << 20
"""The same of the chunks that share a message."""

MAX_HELLO_BYTES = 64 << 10
"""The same of a hello."""

MAX_EVENTS_BYTES = 1 << 30
"""The same of a profile: of some 2 million events."""

_MESSAGE_BYTES = 112
"""Bytes of memory of a message, at most."""

_STRING_BYTES = 40
"""Bytes of memory of an element of a repeated field of strings, besides its characters."""

_SCALAR_BYTES = 16
"""Bytes of memory of an element of a repeated field of numbers, of which each byte may be one."""

_FIELD_BYTES = 24
"""What each field that is no message counts, at least. One that comes again takes no memory, but it takes time,
for which the event loop may wait."""

_NUMBER_BYTES = 8
"""What each byte of a number counts besides, but the last: it takes a third of that time."""

_MAX_DEPTH = 12
"""Messages inside of each other; of gradwire's there are 7 at most."""

_MAX_VARINT_BYTES = 10
_LONG_NUMBER = "a number of more than ten bytes"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""The wire types."""

_OPAQUE = (_FIELD_BYTES, 0)
"""What is known of other fields: they take no more than their bytes."""

_Table = dict[int, Any]
"""By tag: the table of a message, or bytes of memory for each element and for each byte of a repeated field."""


def parse_envelope(data: bytes) -> tuple[agent_pb2.Envelope, int]:
    """Returns an envelope and the bytes of memory it takes. Raises DecodeError if it is none, or too large."""
    nbytes = len(data)
    if nbytes > SMALL_BYTES:
        nbytes += check_envelope(data)
    return agent_pb2.Envelope.FromString(data), nbytes


def check_envelope(data: bytes) -> int:
    """Returns the bytes of memory that parsing an envelope takes, besides its own bytes. Raises DecodeError."""
    return _walk(data, 0, len(data), _ENVELOPE, MAX_PARSED_BYTES)


def parse_frame(data: bytes) -> tuple[agent_pb2.Frame, int]:
    """Returns a frame, and the bytes of memory that it takes. Raises DecodeError if it is none, or too large."""
    nbytes = len(data)
    if nbytes > SMALL_BYTES:
        nbytes += _walk(data, 0, nbytes, _FRAME, MAX_PARSED_BYTES)
    return agent_pb2.Frame.FromString(data), nbytes


def parse_chunks(data: bytes) -> agent_pb2.Chunks:
    """Returns chunks of payloads. Raises DecodeError if they are none, or too many."""
    return _parse(agent_pb2.Chunks, data, MAX_CHUNKS_BYTES)


def parse_events(data: bytes) -> agent_pb2.ProfileEvents:
    """Returns the events of a profile. Raises DecodeError if they are none, or take too much memory."""
    return _parse(agent_pb2.ProfileEvents, data, MAX_EVENTS_BYTES)


def parse_hello(data: bytes) -> agent_pb2.Hello:
    """Returns the hello of a stream. Raises DecodeError if it is none, or takes too much memory."""
    return _parse(agent_pb2.Opening, data, MAX_HELLO_BYTES).hello


def _parse(kind: type[M], data: bytes, max_bytes: int) -> M:
    if len(data) > SMALL_BYTES:
        _walk(data, 0, len(data), _TABLES[kind.DESCRIPTOR.full_name], max_bytes)
    return kind.FromString(data)


def _walk(  # noqa: PLR0912, PLR0915 - short numbers are read here: functions would be called for each field
    data: bytes, position: int, end: int, table: _Table, bytes_left: int, depth: int = 0
) -> int:
    """Returns the bytes of memory that the message from `position` to `end` takes, besides its payloads.

    `table` is that of its type; it is inside of `depth` messages. Raises DecodeError if it is malformed, or takes
    more than `bytes_left`.
    """
    nbytes = 0
    try:
        while position < end:
            tag = data[position]
            position += 1
            if tag > 0x7F:
                if (high := data[position]) <= 0x7F:
                    tag, position = tag & 0x7F | high << 7, position + 1
                else:
                    tag, position = _varint(data, position - 1)
                    nbytes += _MESSAGE_BYTES  # for the time of the call; gradwire has no such fields
            kind = tag & 7
            if kind == _BYTES:
                length = data[position]
                position += 1
                if length > 0x7F:
                    if (high := data[position]) <= 0x7F:
                        length, position = length & 0x7F | high << 7, position + 1
                    elif (highest := data[position + 1]) <= 0x7F:
                        length = length & 0x7F | (high & 0x7F) << 7 | highest << 14
                        position += 2
                    else:
                        length, position = _varint(data, position - 1)
                        nbytes += _MESSAGE_BYTES  # as above; few fields are that long
                after = position + length
                if after > end:
                    raise DecodeError("a field is longer than its message")
                entry: Any = table[tag] if tag in table else _OPAQUE  # noqa: SIM401 - `get` is a call
                if type(entry) is tuple:
                    nbytes += entry[0] + entry[1] * length
                else:
                    nbytes += _MESSAGE_BYTES
                    if entry and length:
                        nbytes += _walk(data, position, after, entry, bytes_left - nbytes, depth + 1)
                position = after
            else:
                if kind == _VARINT:
                    first = position
                    while data[position] > 0x7F:
                        position += 1
                        if position - first > _MAX_VARINT_BYTES:
                            raise DecodeError(_LONG_NUMBER)
                    nbytes += _NUMBER_BYTES * (position - first)
                    position += 1
                elif kind in (_FIXED64, _FIXED32):
                    position += 8 if kind == _FIXED64 else 4
                else:
                    raise DecodeError(f"a field of wire type {kind}")
                nbytes += _FIELD_BYTES  # it may be an element of a repeated field that is not packed
            if nbytes > bytes_left or depth > _MAX_DEPTH:
                raise DecodeError("it has too many parts, and would take more memory than is allowed")
    except IndexError:
        raise DecodeError("it ends within a field") from None
    return nbytes


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it. Raises IndexError at the end of the data."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            return value, position
        shift += 7
        if shift > 63:
            raise DecodeError(_LONG_NUMBER)


def _table_of(message: Descriptor, tables: dict[str, _Table]) -> _Table:
    """Returns the table of a type of messages; empty if it has neither messages nor repeated fields."""
    table = tables.get(message.full_name)
    if table is None:
        table = tables[message.full_name] = {}
        for field in message.fields:
            tag = field.number << 3 | _BYTES
            if field.message_type is not None:
                table[tag] = _table_of(field.message_type, tables)
            elif field.is_repeated:
                is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
                table[tag] = (_STRING_BYTES, 0) if is_text else (_FIELD_BYTES, _SCALAR_BYTES)
    return table


def bytes_field(number: int, length: int) -> bytes:
    """Returns tag and length of a field of bytes, which follow: a message object would copy these once more."""
    return _encoded(number << 3 | _BYTES) + _encoded(length)


def _encoded(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


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


def read_attached(attached: Buffer, payload: agent_pb2.Payload) -> Buffer:
    """Returns the bytes of a payload in its envelope, or attached to it; `find_misplaced` has found none."""
    if not payload.HasField("attached"):
        return payload.inline
    begin = payload.attached.offset
    return attached[begin : begin + payload.attached.nbytes]


_TABLES: dict[str, _Table] = {}
for _kind in (agent_pb2.Frame, agent_pb2.Chunks, agent_pb2.Opening, agent_pb2.ProfileEvents):
    _table_of(_kind.DESCRIPTOR, _TABLES)
_FRAME = _TABLES[agent_pb2.Frame.DESCRIPTOR.full_name]
_ENVELOPE = _TABLES[agent_pb2.Envelope.DESCRIPTOR.full_name]
