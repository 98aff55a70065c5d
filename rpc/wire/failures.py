"""The errors of messages: of values that cannot be sent or read, and exceptions that are sent themselves.

The error for a value that does not pickle says where in the value the problem is, and what to do about it.

Of an exception that is sent, the caller gets the exception itself where it can be rebuilt, else its text.
Tracebacks of users' functions are shown without the frames of gradwire above them. A module that calls users'
functions lists the names of the functions that do so in its constant `USER_CODE_CALLERS`. A traceback is shown
from below the last frame of such a function. An error that gradwire itself raised has no such frame, and is shown
as it is.
"""

import pickle
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import suppress
from types import FunctionType, TracebackType
from typing import Any

from google.protobuf.message import DecodeError

from ...errors import RemoteError, RemoteUnpicklableError, SerializationError, rebuild_exception
from ...net.security import printable, printable_lines
from ...proto.v1 import agent_pb2
from ...torch_internals import AnyFuture
from ..contracts.options import BY_NAME, BY_VALUE, SEND_CODE
from ..execution.futures import copy_error, is_plain, printable_text, text_of

__all__ = [
    "decode_failure",
    "encode_failure",
    "explain_failure",
    "explain_missing",
    "format_error",
    "user_traceback",
    "with_traceback_as_text",
]

MAX_DEPTH = 32
"""Levels of nested containers in which the problem is searched."""

MAX_TEXT_CHARS = 256 * 1024
"""Characters of an error's text or traceback that are sent; the middle of a longer one is cut out."""

MAX_PROBLEM_CHARS = 2000
"""Characters of why an exception cannot be rebuilt, which may have names that it has."""

MAX_SHOWN_CHARS = 2 * MAX_TEXT_CHARS
"""Characters of a text that has been received, and may have been sent by something else."""


_INTERNAL_PACKAGES = (__name__.partition(".")[0], "asyncio")
"""Packages whose frames may be above those of users' functions."""

_ADVICE: tuple[tuple[type, str], ...] = (
    (
        Generator,
        "it is a generator: call the function by rpc_stream, which sends what it yields item by item, or return a "
        "list",
    ),
    (
        AsyncGenerator,
        "it is an asynchronous generator: make the function an ordinary one and call it by rpc_stream, which "
        "sends what it yields item by item",
    ),
    (
        Coroutine,
        "it is a coroutine, which is not awaited: call an ordinary function that runs it, as by asyncio.run",
    ),
    (
        AnyFuture,
        # Programs search for torch's own text, with which this begins.
        "Can not pickle torch.futures.Future: wait for it, or mark the function that returns it with "
        "rpc.functions.async_execution, so that the call is answered when the future is done",
    ),
)
"""Types that do not pickle, and what to send instead."""

_ADVISED = tuple(kind for kind, _ in _ADVICE)


def explain_failure(
    value: object,
    label: str | Sequence[str],
    error: Exception,
    pickling_error: Callable[[object], Exception | None],
    pickler: str = BY_NAME,
) -> SerializationError:
    """Returns the error to raise for a value whose pickling raised an error, by a pickler of this kind.

    The label is that of `Packer.pack`. `pickling_error` tries to pickle a part, and returns what that raises.
    """
    path, part, error = _outermost(value, label, error, pickling_error)
    for _ in range(MAX_DEPTH):
        if isinstance(part, _ADVISED):
            break  # what it consists of is no concern of the program's
        for suffix, inner in _parts(part, pickler):
            if (problem := pickling_error(inner)) is not None:
                path, part, error = path + suffix, inner, problem
                break
        else:
            break
    return SerializationError(path, _advise(part, error, pickler))


def _outermost(
    value: object,
    label: str | Sequence[str],
    error: Exception,
    pickling_error: Callable[[object], Exception | None],
) -> tuple[str, object, Exception]:
    """Returns label, value and error of the labelled item that does not pickle, or of the whole value."""
    if isinstance(label, str):
        return label, value, error
    if isinstance(value, tuple) and len(value) == len(label):
        for item, name in zip(value, label, strict=True):
            if (problem := pickling_error(item)) is not None:
                return name, item, problem
    return " and ".join(label), value, error


def _parts(value: object, pickler: str) -> Iterator[tuple[str, object]]:
    """Yields what is pickled with a container or object, each part with how Python code would name it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
        yield from ((f" key {key!r}", key) for key in value)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f" item {item!r}", item) for item in value)
    elif isinstance(value, FunctionType):
        if pickler != BY_NAME:  # else only its name is sent
            yield from ((f".__closure__ {name}", item) for name, item in _captured(value))
    elif not isinstance(value, type) and hasattr(value, "__dict__") and not callable(value):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def _captured(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yields the variables that a function has from the function around it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents


def _advise(value: object, error: Exception, pickler: str) -> str:
    for kind, advice in _ADVICE:
        if isinstance(value, kind):
            return advice
    name = getattr(value, "__qualname__", "")
    if pickler == BY_NAME and isinstance(name, str) and ("<lambda>" in name or "<locals>" in name):
        return (
            f"{name} has no importable name; functions and classes are sent by name, "
            f"so define it at the top level of a module that the other worker can import, or {SEND_CODE}"
        )
    return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)


def explain_missing(error: AttributeError | ImportError, worker: str) -> SerializationError:
    """Returns the error for a message that names what a worker has not got."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == BY_VALUE:
        return SerializationError(
            "the message",
            f"it has a function or class by value, and worker {worker!r} has no cloudpickle: "
            "pip install cloudpickle there, too",
        )
    return SerializationError(
        "the message",
        f"worker {worker!r} cannot find what it names: {type(error).__name__}: {printable_text(error)}. "
        "RPC pickler does not serialize functions and classes, it names them: define them at the top level of a "
        "module that both workers can import (the program's __main__ and the cells of a notebook are none), or "
        f"{SEND_CODE}",
    )


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
