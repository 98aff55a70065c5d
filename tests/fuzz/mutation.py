"""Changes inputs at random, as fuzzers do: much faster than strategies make new ones."""

import random
from collections.abc import Callable, Sequence

__all__ = ["mutate"]

MAX_INPUT_BYTES = 16 * 1024
"""Longest input that is made."""

NUMBERS = (
    b"\x00",
    b"\x01",
    b"\x7f",
    b"\x80\x01",
    b"\xff",
    b"\xff\xff\xff\x7f",
    b"\xff" * 9 + b"\x01",
    b"\x80" * 10,
)
"""Bytes and varints at the limits of what they can be."""

TEXTS = (
    b"\n",
    b" ",
    b"=",
    b'"',
    b"[",
    b"{",
    b"-1",
    b"4294967296",
    b"1e999",
    b"NaN",
    b"null",
    b"\xc3\xa9",
    b"\xff\xfe",
)
"""Texts that lines and JSON treat in a special way."""


_REPEATS = (*[1, 2, 3, 4] * 25, 100, 1000)
"""How often a piece may be repeated; rarely often, because long inputs take long."""


def mutate(data: bytes, corpus: Sequence[bytes], source: random.Random) -> bytes:
    """Returns an input with one to four random changes; some take parts of other inputs in `corpus`."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 4)):
        position = source.randint(0, len(changed))
        source.choice(_CHANGES)(changed, position, corpus, source)
    return bytes(changed[:MAX_INPUT_BYTES])


def _flip(changed: bytearray, position: int, _: Sequence[bytes], source: random.Random) -> None:
    if changed:
        changed[position % len(changed)] ^= 1 << source.randint(0, 7)


def _set(changed: bytearray, position: int, _: Sequence[bytes], source: random.Random) -> None:
    changed[position : position + 1] = source.randbytes(1)


def _insert(changed: bytearray, position: int, _: Sequence[bytes], source: random.Random) -> None:
    changed[position:position] = source.choice(source.choice((NUMBERS, TEXTS)))


def _overwrite(changed: bytearray, position: int, _: Sequence[bytes], source: random.Random) -> None:
    piece = source.choice(source.choice((NUMBERS, TEXTS)))
    changed[position : position + len(piece)] = piece


def _delete(changed: bytearray, position: int, _: Sequence[bytes], source: random.Random) -> None:
    del changed[position : position + source.randint(1, 8)]


def _cut_off(changed: bytearray, position: int, _: Sequence[bytes], __: random.Random) -> None:
    del changed[position:]


def _repeat(changed: bytearray, position: int, _: Sequence[bytes], source: random.Random) -> None:
    piece = changed[position : position + source.randint(1, 16)]
    changed[position:position] = piece * source.choice(_REPEATS)


def _splice(changed: bytearray, position: int, corpus: Sequence[bytes], source: random.Random) -> None:
    other = source.choice(corpus)
    start = source.randint(0, len(other))
    changed[position:] = other[start:]


_CHANGES: tuple[Callable[[bytearray, int, Sequence[bytes], random.Random], None], ...] = (
    _flip,
    _set,
    _insert,
    _overwrite,
    _delete,
    _cut_off,
    _repeat,
    _splice,
)
