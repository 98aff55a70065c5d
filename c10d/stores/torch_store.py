"""Operations on any torch.distributed.Store: torch's own stores in C++, and stores that users write in Python.

These functions wait for keys by polling the store. A blocking wait inside one of torch's C++ stores cannot be
interrupted, even by Ctrl-C, and prints a C++ stack trace on timeout or when the store's server ends.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ...errors import StoreError, StoreTimeoutError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchQueueEmptyError, TorchStore
from .base import Store

__all__ = ["execute", "wait"]

MIN_POLL_INTERVAL_S = 0.001
"""Seconds between the first two checks for a key; the interval doubles with each check."""

MAX_POLL_INTERVAL_S = 0.05
"""Seconds between two checks for a key at most."""


def execute(store: TorchStore, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    """Runs an operation through the public methods of a store.

    Setting or getting several keys is atomic only if the store has multi_set and multi_get. The outcome has
    `missing` if keys did not appear within `seconds`, and `error` if the value to ADD to is not a number.

    Raises StoreError if the store failed for another reason than a timeout, or `closed` was set during a wait.
    """
    try:
        return _HANDLERS[operation.kind](store, operation, seconds, closed)
    except StoreError:
        raise
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:  # raised by torch's C++ stores
        reason = (str(error).splitlines() or [""])[0]
        if "timeout" in reason.lower():
            with suppress(RuntimeError):  # if this fails too, the store is gone: the first error is raised below
                if missing := _missing(store, operation):
                    return Outcome(missing=missing)
        if operation.kind == store_pb2.ADD and "stoll" in reason:  # the C++ function that parses the value
            return Outcome(error=f"add to {operation.keys[0]!r} needs a decimal number there")
        raise StoreError(f"{type(store).__name__}: {reason}") from error


def wait(store: TorchStore, keys: Sequence[str], seconds: float, closed: threading.Event | None = None) -> bool:
    """Waits until a store, gradwire's or not, has values for all of these keys; returns whether it has in time.

    Raises StoreError if `closed` was set during the wait (which only stores that are not gradwire's look at) or a
    gradwire store failed, RuntimeError if another one did.
    """
    if isinstance(store, Store):  # waits without polling, and can be interrupted
        with suppress(StoreTimeoutError):
            store.wait(list(keys), seconds)
            return True
        return False
    closed = closed or threading.Event()
    deadline, interval = time.monotonic() + seconds, MIN_POLL_INTERVAL_S
    while not _has_all(store, keys):
        if (remaining := deadline - time.monotonic()) <= 0:
            return False
        if closed.wait(min(interval, remaining)):
            raise StoreError("the store was closed while an operation waited for a key")
        interval = min(MAX_POLL_INTERVAL_S, 2 * interval)
    return True


# The handlers of operations. They take stores as Any, because torch's type stubs lack many methods of Store.


def _set(store: Any, operation: Operation) -> Outcome:
    if len(operation.keys) > 1 and store.has_extended_api():
        store.multi_set(list(operation.keys), list(operation.values))
    else:
        for key, value in zip(operation.keys, operation.values, strict=True):
            store.set(key, value)
    return Outcome()


def _wait(store: Any, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    has_keys = wait(store, operation.keys, seconds, closed)
    return Outcome(missing=[] if has_keys else _missing(store, operation))


def _get(store: Any, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    outcome = _wait(store, operation, seconds, closed)
    if outcome.missing:
        return outcome
    if len(operation.keys) > 1 and store.has_extended_api():
        return Outcome(values=store.multi_get(list(operation.keys)))
    return Outcome(values=[store.get(key) for key in operation.keys])


def _queue_pop(store: Any, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    # A blocking queue_pop of the store would wait for the store's own timeout instead of `seconds`.
    key, deadline = operation.keys[0], time.monotonic() + seconds
    while True:
        try:
            return Outcome(values=[store.queue_pop(key, False)])  # noqa: FBT003 - torch's argument
        except TorchQueueEmptyError:
            remaining = max(0.0, deadline - time.monotonic())
            outcome = _wait(store, operation, remaining, closed)  # a queue with an item counts as a key
            if outcome.missing or not remaining:
                return Outcome(missing=[key])


def _without_result(call: Callable[[Any, Operation], None]) -> "_Handler":
    """Returns a handler that calls a function and returns an empty outcome."""

    def run(store: Any, operation: Operation, _seconds: float, _closed: threading.Event) -> Outcome:
        call(store, operation)
        return Outcome()

    return run


def _missing(store: TorchStore, operation: Operation) -> list[str]:
    """Returns the keys of an operation that have no value, each once."""
    return [key for key in dict.fromkeys(operation.keys) if not _has_all(store, [key])]


def _has_all(store: Any, keys: Sequence[str]) -> bool:
    """Returns whether all keys have a value."""
    try:
        return bool(store.check(list(keys)))
    except RuntimeError as error:
        if "pure virtual" not in str(error):  # raised for a method that a Python store does not define
            raise
    # A Python store without `check` is asked by `get`, which may wait for the store's own timeout.
    try:
        for key in keys:
            store.get(key)
    except (RuntimeError, LookupError):
        return False
    return True


_Handler = Callable[[Any, Operation, float, threading.Event], Outcome]
"""Runs an operation of one kind. Takes what `execute` takes."""

_HANDLERS: dict[int, _Handler] = {
    store_pb2.SET: lambda store, op, *_: _set(store, op),
    store_pb2.GET: _get,
    store_pb2.ADD: lambda store, op, *_: Outcome(number=store.add(op.keys[0], op.amount)),
    store_pb2.APPEND: _without_result(lambda store, op: store.append(op.keys[0], op.values[0])),
    store_pb2.COMPARE_SET: lambda store, op, *_: Outcome(values=[store.compare_set(op.keys[0], *op.values)]),
    store_pb2.WAIT: _wait,
    store_pb2.CHECK: lambda store, op, *_: Outcome(number=int(_has_all(store, op.keys))),
    store_pb2.DELETE: lambda store, op, *_: Outcome(number=int(store.delete_key(op.keys[0]))),
    store_pb2.COUNT_KEYS: lambda store, *_: Outcome(number=store.num_keys()),
    store_pb2.LIST_KEYS: lambda store, *_: Outcome(keys=store.list_keys()),
    store_pb2.QUEUE_PUSH: _without_result(lambda store, op: store.queue_push(op.keys[0], op.values[0])),
    store_pb2.QUEUE_POP: _queue_pop,
    store_pb2.QUEUE_LENGTH: lambda store, op, *_: Outcome(number=store.queue_len(op.keys[0])),
}
