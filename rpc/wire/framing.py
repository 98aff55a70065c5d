"""Protobuf's wire format by hand, where building a message object would copy its bytes once more.

Source: the encoding page of the Protocol Buffers documentation. A repeated or singular length-delimited
field is its tag, its length as a varint, and its bytes; messages are concatenated by concatenating bytes.
"""

__all__ = ["bytes_field"]

_LENGTH_DELIMITED = 2


def bytes_field(number: int, length: int) -> bytes:
    """Returns the prefix of a length-delimited field: its tag and length.

    Args:
        number: the field's number in its message.
        length: bytes of the field's content, which follow the prefix.
    """
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
