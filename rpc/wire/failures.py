"""Exceptions across workers: as themselves where that is possible, as their text where it is not."""

import pickle
from typing import Any

from ...errors import RemoteError, RemoteUnpicklableError, rebuild
from ...proto.v1 import agent_pb2
from ..execution.kept_errors import copy_error, is_plain, text_of
from .tracebacks import format_error

__all__ = ["decode_failure", "encode_failure", "without_frames"]

MAX_TEXT = 256 * 1024
"""Characters of a message or traceback that travel; what is in the middle of a longer one is left out."""


def encode_failure(error: BaseException) -> bytes:
    """The body of an ERROR envelope. Never raises."""
    failure = agent_pb2.RemoteFailure(
        type_name=type(error).__qualname__,
        text=_shorten(text_of(error)),
        traceback=_shorten(format_error(error)),
    )
    # SystemExit and KeyboardInterrupt end a program: they must not do so to the caller's.
    if isinstance(error, Exception):
        try:
            failure.pickled = pickle.dumps(_Portable(error) if is_plain(error) else error)
        except Exception:
            failure.pickled = b""
    return failure.SerializeToString()


def decode_failure(body: bytes | memoryview, worker: str) -> Exception:
    """The exception to raise at the caller: the remote one with a RemoteError as its cause, or a RemoteError."""
    failure = agent_pb2.RemoteFailure.FromString(bytes(body))
    text = f"{failure.type_name}: {failure.text}"
    if not failure.pickled:
        return RemoteUnpicklableError(worker, text, failure.traceback)
    try:
        error = pickle.loads(failure.pickled)
        if not isinstance(error, Exception):
            raise TypeError(f"{type(error).__name__} is no exception")
    except Exception as problem:
        reason = f"{text}\n(it could not be rebuilt here: {type(problem).__name__}: {problem})"
        return RemoteUnpicklableError(worker, reason, failure.traceback)
    error.__cause__ = RemoteError(worker, text, failure.traceback)
    return error


def without_frames(error: Exception, worker: str) -> Exception:
    """A copy of an error, to be kept. Its traceback is text, in a RemoteError as its cause.

    A traceback would keep the frames of the call, and of all its callers, with what they have at hand.
    """
    kept = copy_error(error)
    trace = format_error(error)
    kept.__cause__ = RemoteError(
        worker, f"{type(error).__qualname__}: {_shorten(text_of(error))}", _shorten(trace)
    )
    return kept.with_traceback(None)


class _Portable:
    """Pickles as an exception, but one that is rebuilt without its constructor."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates do not fit in a protobuf string
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]}\n… {len(text) - MAX_TEXT} characters …\n{text[-MAX_TEXT // 2 :]}"
