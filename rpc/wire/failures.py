"""Exceptions in messages: the caller gets the exception itself where it can be rebuilt, else its text.

Tracebacks of users' functions are shown without the frames of gradwire above them. A module that calls users'
functions lists the names of the functions that do so in its constant `USER_CODE_CALLERS`. A traceback is shown
from below the last frame of such a function. An error that gradwire itself raised has no such frame, and is shown
as it is.
"""

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from google.protobuf.message import DecodeError

from ...errors import RemoteError, RemoteUnpicklableError, rebuild_exception
from ...net.security import printable, printable_lines
from ...proto.v1 import agent_pb2
from ..execution.futures import copy_error, is_plain, text_of

__all__ = ["decode_failure", "encode_failure", "format_error", "user_traceback", "with_traceback_as_text"]

MAX_TEXT_CHARS = 256 * 1024
"""Characters of an error's text or traceback that are sent; the middle of a longer one is cut out."""

MAX_PROBLEM_CHARS = 2000
"""Characters of why an exception cannot be rebuilt, which may have names that it has."""

MAX_SHOWN_CHARS = 2 * MAX_TEXT_CHARS
"""Characters of a text that has been received, and may have been sent by something else."""


_INTERNAL_PACKAGES = (__name__.partition(".")[0], "asyncio")
"""Packages whose frames may be above those of users' functions."""


def encode_failure(error: BaseException, dump: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """Returns the body of an ERROR envelope for an exception, which `dump` pickles. Never raises."""
    failure = agent_pb2.RemoteFailure(
        type_name=type(error).__qualname__,
        text=_shorten(text_of(error)),
        traceback=_shorten(format_error(error)),
    )
    # SystemExit and KeyboardInterrupt must not end the caller's program: only their text is sent.
    if isinstance(error, Exception):
        try:
            failure.pickled = dump(_PlainError(error) if is_plain(error) else error)
        except Exception:
            failure.pickled = b""
    return failure.SerializeToString()


def decode_failure(body: object, worker: str, load: Callable[[bytes], Any] = pickle.loads) -> Exception:
    """Returns the exception to raise at the caller.

    It is the remote exception with a RemoteError as its cause; a RemoteUnpicklableError if it cannot be rebuilt.
    The `body` is what `encode_failure` has returned on that worker, but it is not trusted to be that. `load`
    unpickles what is accepted from it.
    """
    failure = _parse(body)
    text = f"{printable(failure.type_name)}: {printable_lines(failure.text, MAX_SHOWN_CHARS)}"
    traceback = printable_lines(failure.traceback, MAX_SHOWN_CHARS)
    if not failure.pickled:
        return RemoteUnpicklableError(worker, text, traceback)
    try:
        error = load(failure.pickled)
        if not isinstance(error, Exception):
            raise TypeError(f"{type(error).__name__} is no exception")
    except Exception as problem:
        problem_text = printable(text_of(problem), MAX_PROBLEM_CHARS)
        reason = f"{text}\n(it could not be rebuilt here: {type(problem).__name__}: {problem_text})"
        return RemoteUnpicklableError(worker, reason, traceback)
    error.__cause__ = RemoteError(worker, text, traceback)
    return error


def _parse(body: object) -> agent_pb2.RemoteFailure:
    if isinstance(body, bytes | memoryview):  # and no int, of which `bytes` would make as many zeros
        with suppress(DecodeError):
            return agent_pb2.RemoteFailure.FromString(bytes(body))
    return agent_pb2.RemoteFailure(type_name="Exception", text="what the worker says of it is malformed")


def with_traceback_as_text(error: Exception, worker: str) -> Exception:
    """Returns a copy of an error that can be stored: its traceback is text, in a RemoteError as its cause.

    A real traceback would keep the frames of the call and of its callers alive, with all of their local variables.
    `worker` is the name of this worker.
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


def user_traceback(error: BaseException) -> TracebackType | None:
    """Returns the traceback of an error from the user's function on; None if the call itself raised the error."""
    found = error.__traceback__
    each = found
    while each is not None and _is_internal(each):
        if each.tb_frame.f_code.co_name in each.tb_frame.f_globals.get("USER_CODE_CALLERS", ()):
            found = each.tb_next
        each = each.tb_next
    return found


def format_error(error: BaseException) -> str:
    """Returns what Python prints of an uncaught error, with `user_traceback`."""
    return "".join(traceback.format_exception(type(error), error, user_traceback(error)))


def _is_internal(each: TracebackType) -> bool:
    name = each.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] in _INTERNAL_PACKAGES
