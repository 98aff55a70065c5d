"""Errors for values that cannot be pickled: where in the value the problem is, and what to do about it."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import suppress
from types import FunctionType

from ...errors import SerializationError
from ...torch_internals import AnyFuture
from ..contracts.options import BY_NAME, SEND_CODE

__all__ = ["explain_failure"]

MAX_DEPTH = 32
"""Levels of nested containers in which the problem is searched."""

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
