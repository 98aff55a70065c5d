"""HTTP/2 by hand, for tests in which a client of gRPC would check, encrypt or close too much."""

from collections.abc import Iterator

__all__ = ["PREFACE", "data_in", "grpc_request"]

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS = 4
_MAX_FRAME_BYTES = 1 << 14


def _header(name: str, value: str) -> bytes:
    """Returns a header that uses no table and no compression."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b"")
"""What a client says before it opens a stream, with empty settings."""


def grpc_request(method: str, *messages: bytes) -> bytes:
    """Returns what a gRPC client sends to call a method with these messages; the stream stays open."""
    fields = {":method": "POST", ":scheme": "https", ":path": method, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    sent = PREFACE + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_header(*each) for each in fields.items()))
    data = b"".join(b"\x00" + len(each).to_bytes(4, "big") + each for each in messages)
    for at in range(0, len(data), _MAX_FRAME_BYTES):
        sent += _frame(_DATA, 0, 1, data[at : at + _MAX_FRAME_BYTES])
    return sent


def data_in(received: bytes) -> bytes:
    """Returns what a server has answered: of HTTP/2 the content of messages, without headers and settings."""
    frames = list(_frames(received))
    if not frames or frames[0][0] != _SETTINGS:
        return received
    return b"".join(payload for kind, payload in frames if kind == _DATA)


def _frames(received: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields kind and payload of each frame; the last may be cut off."""
    while len(received) >= 9:
        length = 9 + int.from_bytes(received[:3], "big")
        yield received[3], received[9:length]
        received = received[length:]
