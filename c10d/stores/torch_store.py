"""Operations on stores that are not gradwire's: torch's C++ ones, and anybody's Python ones.

A wait asks the store again and again. One inside a store of torch's could be ended by nothing, not even by Ctrl-C,
and would print a C++ trace when its time is up or its server goes.
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

FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.05
"""Seconds between two looks for a key: doubled from the first to the longest."""


def execute(store: TorchStore, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    """Runs an operation by the public methods of any torch.distributed.Store.

    Keys that are set together appear one after another if the store has no multi_set.

    Args:
        store: where.
        operation: what.
        seconds: how long it may wait for keys.
        closed: ends such a wait.

    Raises:
        StoreError: the store failed for another reason than a timeout, or was closed while the operation waited.
    """
    try:
        return _CALLS[operation.kind](store, operation, seconds, closed)
    except StoreError:
        raise
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:  # what torch's C++ stores raise
        reason = (str(error).splitlines() or [""])[0]
        if "timeout" in reason.lower():
            with suppress(RuntimeError):  # then the store is gone, and that it is
                if missing := _missing(store, operation):
                    return Outcome(missing=missing)
        if operation.kind == store_pb2.ADD and "stoll" in reason:
            return Outcome(error=f"add to {operation.keys[0]!r} needs a decimal number there")
        raise StoreError(f"{type(store).__name__}: {reason}") from error


def wait(store: TorchStore, keys: Sequence[str], seconds: float, closed: threading.Event | None = None) -> bool:
    """Waits until any store has these keys; False if it has not got them within so many seconds.

    Raises:
        StoreError: `closed` was set meanwhile.
        RuntimeError: what the store raises.
    """
    if isinstance(store, Store):  # it knows better
        with suppress(StoreTimeoutError):
            store.wait(list(keys), seconds)
            return True
        return False
    closed = closed or threading.Event()
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while not _has_all(store, keys):
        if (left := deadline - time.monotonic()) <= 0:
            return False
        if closed.wait(min(pause, left)):
            raise StoreError("the store was closed while something waited in it")
        pause = min(LONGEST_PAUSE, 2 * pause)
    return True


# Stores are Any below: the type stubs of torch lack half of their methods.


def _set(store: Any, operation: Operation) -> Outcome:
    if len(operation.keys) > 1 and store.has_extended_api():
        store.multi_set(list(operation.keys), list(operation.values))
    else:
        for key, value in zip(operation.keys, operation.values, strict=True):
            store.set(key, value)
    return Outcome()


def _wait(store: Any, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    there = wait(store, operation.keys, seconds, closed)
    return Outcome(missing=[] if there else _missing(store, operation))


def _get(store: Any, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    outcome = _wait(store, operation, seconds, closed)
    if outcome.missing:
        return outcome
    if len(operation.keys) > 1 and store.has_extended_api():
        return Outcome(values=store.multi_get(list(operation.keys)))
    return Outcome(values=[store.get(key) for key in operation.keys])


def _queue_pop(store: Any, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
    # queue_pop would wait for as long as the store's own timeout says.
    key, deadline = operation.keys[0], time.monotonic() + seconds
    while True:
        try:
            return Outcome(values=[store.queue_pop(key, False)])  # noqa: FBT003 - torch's argument
        except TorchQueueEmptyError:
            left = max(0.0, deadline - time.monotonic())
            outcome = _wait(store, operation, left, closed)
            if outcome.missing or not left:
                return Outcome(missing=[key])


def _returning_nothing(call: Callable[[Any, Operation], None]) -> "_Call":
    def run(store: Any, operation: Operation, _seconds: float, _closed: threading.Event) -> Outcome:
        call(store, operation)
        return Outcome()

    return run


def _missing(store: TorchStore, operation: Operation) -> list[str]:
    return [key for key in dict.fromkeys(operation.keys) if not _has_all(store, [key])]


def _has_all(store: Any, keys: Sequence[str]) -> bool:
    """Have all keys a value?"""
    try:
        return bool(store.check(list(keys)))
    except RuntimeError as error:
        if "pure virtual" not in str(error):
            raise
    # A Python store that lacks `check` can say it only by giving the values, at once or after its own timeout.
    try:
        for key in keys:
            store.get(key)
    except (RuntimeError, LookupError):
        return False
    return True


_Call = Callable[[Any, Operation, float, threading.Event], Outcome]

_CALLS: dict[int, _Call] = {
    store_pb2.SET: lambda store, op, *_: _set(store, op),
    store_pb2.GET: _get,
    store_pb2.ADD: lambda store, op, *_: Outcome(number=store.add(op.keys[0], op.amount)),
    store_pb2.APPEND: _returning_nothing(lambda store, op: store.append(op.keys[0], op.values[0])),
    store_pb2.COMPARE_SET: lambda store, op, *_: Outcome(values=[store.compare_set(op.keys[0], *op.values)]),
    store_pb2.WAIT: _wait,
    store_pb2.CHECK: lambda store, op, *_: Outcome(number=int(_has_all(store, op.keys))),
    store_pb2.DELETE: lambda store, op, *_: Outcome(number=int(store.delete_key(op.keys[0]))),
    store_pb2.COUNT_KEYS: lambda store, *_: Outcome(number=store.num_keys()),
    store_pb2.LIST_KEYS: lambda store, *_: Outcome(keys=store.list_keys()),
    store_pb2.QUEUE_PUSH: _returning_nothing(lambda store, op: store.queue_push(op.keys[0], op.values[0])),
    store_pb2.QUEUE_POP: _queue_pop,
    store_pb2.QUEUE_LENGTH: lambda store, op, *_: Outcome(number=store.queue_len(op.keys[0])),
}
