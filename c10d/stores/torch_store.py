"""Operations on stores that are not gradwire's: torch's C++ stores, and Python stores of users.

To wait, these functions poll the store. A wait inside a torch store could not be interrupted, not even by Ctrl-C,
and would print a C++ stack trace on timeout or when its server ends.
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
MAX_POLL_INTERVAL_S = 0.05
"""Seconds between two checks for a key, doubled from the first to the second."""


def execute(store: TorchStore, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    """Runs an operation with the public methods of any torch.distributed.Store.

    Setting several keys is atomic only if the store has multi_set.

    Args:
        store: any store.
        operation: the operation.
        seconds: how long it may wait for keys.
        closed: ends the wait when it is set.

    Returns:
        The outcome, with `missing` if keys did not appear in time.

    Raises:
        StoreError: the store failed for another reason than a timeout, or `closed` was set during a wait.
    """
    try:
        return _HANDLERS[operation.kind](store, operation, seconds, closed)
    except StoreError:
        raise
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:  # raised by torch's C++ stores
        reason = (str(error).splitlines() or [""])[0]
        if "timeout" in reason.lower():
            with suppress(RuntimeError):  # the store is gone, which is raised below
                if missing := _missing(store, operation):
                    return Outcome(missing=missing)
        if operation.kind == store_pb2.ADD and "stoll" in reason:
            return Outcome(error=f"add to {operation.keys[0]!r} needs a decimal number there")
        raise StoreError(f"{type(store).__name__}: {reason}") from error


def wait(store: TorchStore, keys: Sequence[str], seconds: float, closed: threading.Event | None = None) -> bool:
    """Waits at most `seconds` until a store has these keys. Returns whether it has.

    Args:
        store: any store.
        keys: to wait for.
        seconds: how long to wait.
        closed: ends the wait when it is set.

    Raises:
        StoreError: `closed` was set during the wait.
        RuntimeError: the store failed.
    """
    if isinstance(store, Store):  # it need not be polled
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


# Stores are Any below: torch's type stubs lack half of their methods.


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
    # The store's own queue_pop would wait for the store's timeout.
    key, deadline = operation.keys[0], time.monotonic() + seconds
    while True:
        try:
            return Outcome(values=[store.queue_pop(key, False)])  # noqa: FBT003 - torch's argument
        except TorchQueueEmptyError:
            remaining = max(0.0, deadline - time.monotonic())
            outcome = _wait(store, operation, remaining, closed)
            if outcome.missing or not remaining:
                return Outcome(missing=[key])


def _without_result(call: Callable[[Any, Operation], None]) -> "_Handler":
    def run(store: Any, operation: Operation, _seconds: float, _closed: threading.Event) -> Outcome:
        call(store, operation)
        return Outcome()

    return run


def _missing(store: TorchStore, operation: Operation) -> list[str]:
    return [key for key in dict.fromkeys(operation.keys) if not _has_all(store, [key])]


def _has_all(store: Any, keys: Sequence[str]) -> bool:
    """Returns whether all keys have a value."""
    try:
        return bool(store.check(list(keys)))
    except RuntimeError as error:
        if "pure virtual" not in str(error):
            raise
    # In a Python store without `check`, only `get` can tell, which may wait for the store's own timeout.
    try:
        for key in keys:
            store.get(key)
    except (RuntimeError, LookupError):
        return False
    return True


_Handler = Callable[[Any, Operation, float, threading.Event], Outcome]

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
