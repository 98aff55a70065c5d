"""Defines what each operation of a store does. Every gradwire store runs its operations on a KeyValueState."""

import re
from collections import deque
from collections.abc import Callable
from typing import final

from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome

__all__ = ["KeyValueState", "may_satisfy_waiters"]

_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,19}\s*")
_INT64 = range(-(2**63), 2**63)

_SATISFYING = frozenset(
    {store_pb2.SET, store_pb2.ADD, store_pb2.APPEND, store_pb2.COMPARE_SET, store_pb2.QUEUE_PUSH}
)

_COUNTS: dict[int, tuple[int | None, int | None]] = {
    store_pb2.SET: (None, None),
    store_pb2.GET: (None, 0),
    store_pb2.ADD: (1, 0),
    store_pb2.APPEND: (1, 1),
    store_pb2.COMPARE_SET: (1, 2),
    store_pb2.WAIT: (None, 0),
    store_pb2.CHECK: (None, 0),
    store_pb2.DELETE: (1, 0),
    store_pb2.COUNT_KEYS: (0, 0),
    store_pb2.LIST_KEYS: (0, 0),
    store_pb2.QUEUE_PUSH: (1, 1),
    store_pb2.QUEUE_POP: (1, 0),
    store_pb2.QUEUE_LENGTH: (1, 0),
    store_pb2.JOIN: (0, 0),
    store_pb2.LEAVE: (0, 0),
}
"""Numbers of keys and values of each kind of operation. None: any number; SET has as many keys as values."""


def may_satisfy_waiters(operation: Operation) -> bool:
    """Returns whether this operation may add a key or a queue item that another operation waits for."""
    return operation.kind in _SATISFYING


@final
class KeyValueState:
    """The keys and values of a store, and its queues, whose names are separate from the keys.

    It never waits, does no I/O and takes no lock: its owner runs one operation at a time.

    version: number of changes so far; an operation that leaves it as it was has changed nothing.
    joined, left: numbers of JOIN and LEAVE operations so far.
    """

    def __init__(self) -> None:
        self.version = 0
        self.joined = 0
        self.left = 0
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._handlers: dict[int, Callable[[Operation], Outcome]] = {
            store_pb2.SET: self._set,
            store_pb2.GET: self._get,
            store_pb2.ADD: self._add,
            store_pb2.APPEND: self._append,
            store_pb2.COMPARE_SET: self._compare_set,
            store_pb2.WAIT: lambda _: Outcome(),
            store_pb2.CHECK: self._check,
            store_pb2.DELETE: self._delete,
            store_pb2.COUNT_KEYS: lambda _: Outcome(number=len(self._values)),
            store_pb2.LIST_KEYS: lambda _: Outcome(keys=self._values),
            store_pb2.QUEUE_PUSH: self._queue_push,
            store_pb2.QUEUE_POP: self._queue_pop,
            store_pb2.QUEUE_LENGTH: self._queue_length,
            store_pb2.JOIN: self._join,
            store_pb2.LEAVE: self._leave,
        }

    def missing(self, operation: Operation) -> list[str]:
        """Returns the keys that an operation would have to wait for; empty if it can be applied now."""
        if operation.kind == store_pb2.GET:
            return [key for key in dict.fromkeys(operation.keys) if key not in self._values]
        if operation.kind == store_pb2.WAIT:
            return [key for key in dict.fromkeys(operation.keys) if not self._has(key)]
        if operation.kind == store_pb2.QUEUE_POP:
            return [key for key in operation.keys if key not in self._queues]
        return []

    def apply(self, operation: Operation) -> Outcome:
        """Runs one operation. If it would have to wait for keys, the outcome has them as `missing`."""
        if problem := _check(operation):
            return Outcome(error=problem)
        if missing := self.missing(operation):
            return Outcome(missing=missing)
        return self._handlers[operation.kind](operation)

    def _has(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _put(self, key: str, value: bytes) -> None:
        self.version += 1
        self._values[key] = value

    def _set(self, operation: Operation) -> Outcome:
        for key, value in zip(operation.keys, operation.values, strict=True):
            self._put(key, value)
        return Outcome()

    def _get(self, operation: Operation) -> Outcome:
        return Outcome(values=[self._values[key] for key in operation.keys])

    def _add(self, operation: Operation) -> Outcome:
        key = operation.keys[0]
        # An empty value counts as 0, as in torch's HashStore and FileStore.
        before = self._values.get(key) or b"0"
        if not _NUMBER.fullmatch(before):
            shown = before[:32] + b"..." if len(before) > 32 else before
            return Outcome(error=f"add to {key!r} needs a decimal number there, but its value is {shown!r}")
        total = int(before) + operation.amount
        if total not in _INT64:
            return Outcome(error=f"add to {key!r} gives {total}, which does not fit into 64 bits")
        self._put(key, b"%d" % total)
        return Outcome(number=total)

    def _append(self, operation: Operation) -> Outcome:
        key = operation.keys[0]
        self._put(key, self._values.get(key, b"") + operation.values[0])
        return Outcome()

    def _compare_set(self, operation: Operation) -> Outcome:
        key, (expected, desired) = operation.keys[0], operation.values
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, desired)
            return Outcome(values=[desired])
        # For a missing key torch returns the expected value, so this does too.
        return Outcome(values=[expected if current is None else current])

    def _check(self, operation: Operation) -> Outcome:
        return Outcome(number=int(all(self._has(key) for key in operation.keys)))

    def _delete(self, operation: Operation) -> Outcome:
        if self._values.pop(operation.keys[0], None) is None:
            return Outcome(number=0)
        self.version += 1
        return Outcome(number=1)

    def _queue_push(self, operation: Operation) -> Outcome:
        self.version += 1
        self._queues.setdefault(operation.keys[0], deque()).append(operation.values[0])
        return Outcome()

    def _queue_pop(self, operation: Operation) -> Outcome:
        self.version += 1
        queue = self._queues[operation.keys[0]]
        item = queue.popleft()
        if not queue:
            del self._queues[operation.keys[0]]
        return Outcome(values=[item])

    def _queue_length(self, operation: Operation) -> Outcome:
        return Outcome(number=len(self._queues.get(operation.keys[0], ())))

    def _join(self, _: Operation) -> Outcome:
        self.version += 1
        self.joined += 1
        return Outcome(number=self.joined)

    def _leave(self, _: Operation) -> Outcome:
        self.version += 1
        self.left += 1
        return Outcome(number=self.joined - self.left)


def _check(operation: Operation) -> str:
    """Returns why an operation is not valid (its sender is not gradwire, or a newer version); "" if it is."""
    counts = _COUNTS.get(operation.kind)
    if counts is None:
        return f"this version of gradwire does not know store operation {operation.kind}"
    keys, values = len(operation.keys), len(operation.values)
    fits = keys == values if operation.kind == store_pb2.SET else counts in ((keys, values), (None, values))
    return "" if fits else f"store operation {operation.kind} cannot have {keys} keys and {values} values"
