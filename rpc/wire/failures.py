"""Exceptions in messages: the caller gets the exception itself where it can be rebuilt, else its text."""

import pickle
from typing import Any

from ...errors import RemoteError, RemoteUnpicklableError, rebuild_exception
from ...proto.v1 import agent_pb2
from ..execution.kept_errors import copy_error, is_plain, text_of
from .tracebacks import format_error

__all__ = ["decode_failure", "encode_failure", "with_traceback_as_text"]

MAX_TEXT_CHARS = 256 * 1024
"""Characters of an error's text or traceback that are sent; the middle of a longer one is cut out."""


def encode_failure(error: BaseException) -> bytes:
    """Returns the body of an ERROR envelope for an exception. Never raises."""
    failure = agent_pb2.RemoteFailure(
        type_name=type(error).__qualname__,
        text=_shorten(text_of(error)),
        traceback=_shorten(format_error(error)),
    )
    # SystemExit and KeyboardInterrupt must not end the caller's program: only their text is sent.
    if isinstance(error, Exception):
        try:
            failure.pickled = pickle.dumps(_PlainError(error) if is_plain(error) else error)
        except Exception:
            failure.pickled = b""
    return failure.SerializeToString()


def decode_failure(body: bytes | memoryview, worker: str) -> Exception:
    """Returns the exception to raise at the caller.

    Args:
        body: the body of an ERROR envelope.
        worker: the name of the worker that sent the envelope.

    Returns:
        The remote exception with a RemoteError as its cause; a RemoteUnpicklableError if it cannot be rebuilt.
    """
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


def with_traceback_as_text(error: Exception, worker: str) -> Exception:
    """Returns a copy of an error that can be stored: its traceback is text, in a RemoteError as its cause.

    A real traceback would keep the frames of the call and of its callers alive, with all of their local variables.

    Args:
        error: what a function raised on this worker.
        worker: the name of this worker.
    """
    copied = copy_error(error)
    text = f"{type(error).__qualname__}: {_shorten(text_of(error))}"
    copied.__cause__ = RemoteError(worker, text, _shorten(format_error(error)))
    return copied.with_traceback(None)


class _PlainError:
    """Pickles as an exception that is rebuilt without a call of its constructor."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_exception, (type(self._error), self._error.args, self._error.__dict__)


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates do not fit in a protobuf string
    if len(text) <= MAX_TEXT_CHARS:
        return text
    omitted = len(text) - MAX_TEXT_CHARS
    return f"{text[: MAX_TEXT_CHARS // 2]}\n… {omitted} characters …\n{text[-MAX_TEXT_CHARS // 2 :]}"
