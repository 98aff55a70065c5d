"""Looks for an answer among the frames that a thread, which waits for it, has read from a socket."""

from collections import deque
from collections.abc import Callable
from typing import Any

from ...proto.v1 import agent_pb2
from ..execution.futures import Future
from ..wire.parsing import SMALL_BYTES, check_envelope
from .answer_reader import Answer, AnswerRest, FindCompletion
from .large_envelope import AttachedBytes
from .segments import SegmentListener
from .socket_frames import HEADER, FrameKind, numbers_in

__all__ = ["find_answer"]

MAX_LOOKED_AT = 8
"""Frames among which a thread looks for the answer that it waits for; more of them are left to the executor."""

_ALL = slice(None)


def find_answer(
    received: list[Any],
    segments: SegmentListener | None,
    completion: FindCompletion,
    future: Future[Any],
    allocate: Callable[[int], memoryview] | None,
) -> Answer | AnswerRest | None:
    """Returns the answer, if it is there, or what is missing of what follows it. Raises DecodeError.

    Args:
        received: what has been read: bytes, or what `recvmsg` returns if there are `segments`. The answer is taken
            out of it by what is returned.
        segments: handles the frames about shared memory, on a unix socket.
        completion: returns what completes the future, if an envelope is its answer.
        future: the one that is waited for.
        allocate: returns memory for what follows the answer; None if the thread cannot read that.
    """
    nothing = b"" if segments is None else (b"", ())
    first = (received[:1] or [nothing])[0]  # nothing: another thread handles it already
    data, rights = (first, ()) if segments is None else first[:2]
    if rights:
        return None
    start, end = 0, len(data)
    others = b""
    returned: deque[int] | None = None
    numbers: list[int] = []
    for _ in range(MAX_LOOKED_AT):
        content = start + HEADER.size
        if content > end:
            break
        length, kind = HEADER.unpack_from(data, start)
        after = content + length
        if after > end:
            break
        if kind == FrameKind.ENVELOPE:
            if length > SMALL_BYTES:
                check_envelope(data[content:after])
            found = completion(agent_pb2.Envelope.FromString(data[content:after]), future)
            if found is not None:
                others += data[after:]
                left = others if segments is None else (others, ())
                taking: list[tuple[Any, ...]] = [(received.__setitem__, _ALL, [left] if others else [])]
                if returned is not None:
                    taking.append((returned.extend, numbers))
                return Answer(found, taking)
            others += data[start:after]
        elif kind == FrameKind.ATTACHED and allocate is not None:
            return _find_attached(
                received, data[content:after], memoryview(data)[after:], others, completion, future, allocate
            )
        elif kind == FrameKind.RELEASED and segments is not None and not length % 8:
            # Taken with the answer: the segments are free for the next call.
            returned = segments.returned
            if returned is None:
                break
            numbers += numbers_in(data[content:after])
        elif kind != FrameKind.HEARTBEAT:
            break  # what it tells comes before the answer
        start = after
    return None


def _find_attached(
    received: list[Any],
    envelope: bytes,
    following: memoryview,
    others: bytes,
    completion: FindCompletion,
    future: Future[Any],
    allocate: Callable[[int], memoryview],
) -> Answer | AnswerRest | None:
    """Returns the answer if it is this envelope and all that follows it is there; else what is missing of that.

    Args:
        received: as above.
        envelope: the serialized envelope.
        following: what has been read after it.
        others: the frames before it that are not the answer.
        completion: as above.
        future: as above.
        allocate: as above.
    """
    try:
        attached = AttachedBytes(envelope, allocate)
    except MemoryError:
        return None  # a thread of the executor handles that

    def find() -> Answer | None:
        found = completion(attached.envelope, future, attached.memory)
        return None if found is None else Answer(found, [(received.__setitem__, _ALL, [left] if left else [])])

    count = attached.fill(following)
    left = others + bytes(following[count:])
    answer = find()
    if answer is None or attached.arrived is not None:
        return answer
    return AnswerRest(attached.memory, count, find)
