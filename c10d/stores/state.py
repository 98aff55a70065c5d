"""Defines what each operation of a store does. Every gradwire store runs its operations on a KeyValueState.

A HashStore is one, in the memory of one process. What other stores add is how several processes share one.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, final

from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout
from .limits import MAX_BYTES, MAX_LISTED, StoreLimits

__all__ = ["ADDING", "HashStore", "KeyValueState", "problem_of"]

_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,19}\s*")
_INT64 = range(-(2**63), 2**63)

_FIELD_BYTES = 8
"""What each key or value of a message takes at most, in addition to its own bytes."""

_MAX_SHOWN = 200
"""Characters of a key or a value that error messages show."""

ADDING = frozenset({store_pb2.SET, store_pb2.ADD, store_pb2.APPEND, store_pb2.COMPARE_SET, store_pb2.QUEUE_PUSH})
"""Operations that may add a key or a queue item that another operation waits for."""


class KeyValueState:
    """The keys and values of a store, and its queues, whose names are separate from the keys.

    It never waits, does no I/O and takes no lock: its owner runs one operation at a time.

    limits: what the store holds at most; None for no limit.
    version: number of changes so far; an operation that leaves it as it was has changed nothing.
    exceeded: the name and value of the limit for which an operation was refused last; its owner may reset it.
    joined, left: numbers of JOIN and LEAVE operations so far.
    """

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.version = 0
        self.exceeded = ""
        self.joined = 0
        self.left = 0
        self.limits = limits
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._item_count = 0  # in all queues
        self._key_bytes = 0  # of the keys that have a value
        self._value_bytes = 0  # of values, and of items with the names of their queues

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
        if problem := problem_of(operation):
            return Outcome(error=problem)
        if missing := self.missing(operation):
            return Outcome(missing=missing)
        return _KINDS[operation.kind].run(self, operation)

    def _has(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def answer_of(self, operation: Operation) -> Outcome | None:  # noqa: ARG002
        """Returns the outcome of an operation that its client sends again; None if it is to be run."""
        return None

    def confirm(self, operation: Operation, item: bytes) -> None:
        """Handles that a client has the item that it has popped."""

    def operations(self) -> Iterator[Operation]:
        """Yields operations that make an equal state."""
        for key, value in self._values.items():
            yield Operation(kind=store_pb2.SET, keys=[key], values=[value])
        for name, queue in self._queues.items():
            for item in queue:
                yield Operation(kind=store_pb2.QUEUE_PUSH, keys=[name], values=[item])

    def remove(self, name: str, item: bytes) -> None:
        """Removes the first of the equal items of a queue, if there is one."""
        queue = self._queues.get(name, deque())
        if item not in queue:
            return
        self.version += 1
        queue.remove(item)
        self._count_item(name, item, -1)
        if not queue:
            del self._queues[name]

    def put_back(self, operation: Operation, item: bytes) -> None:
        """Puts an item back to the front of the queue from which an operation has popped it."""
        name = operation.keys[0]
        self.version += 1
        self._count_item(name, item, 1)
        self._queues.setdefault(name, deque()).appendleft(item)

    def _put(self, key: str, value: bytes) -> None:
        self.version += 1
        previous = self._values.get(key)
        if previous is None:
            self._key_bytes += _size(key)
        self._value_bytes += len(value) - len(previous or b"")
        self._values[key] = value

    def _count_item(self, name: str, item: bytes, count: int) -> None:
        self._item_count += count
        self._value_bytes += count * (_size(name) + len(item))

    def _refusal(self, keys: Sequence[str], values: Sequence[bytes], *, is_queue: bool = False) -> str:
        """Returns why the store has no room for these values or items; "" if it has."""
        for value in values:
            if len(value) > MAX_BYTES:
                return f"a value of {len(value)} bytes exceeds the limit of {MAX_BYTES}"
        if self.limits is None:
            return ""
        added = keys if is_queue else [key for key in keys if key not in self._values]
        entries = len(self._values) + self._item_count + len(added)
        if entries > self.limits.max_entries:
            self.exceeded = f"max_entries={self.limits.max_entries}"
            return f"the store has {self.limits.max_entries} keys and items of queues, its max_entries"
        replaced = 0 if is_queue else sum(len(self._values.get(key, b"")) for key in dict.fromkeys(keys))
        size = self._key_bytes + self._value_bytes + sum(map(_size, added)) + sum(map(len, values)) - replaced
        if size > self.limits.max_bytes:
            self.exceeded = f"max_bytes={self.limits.max_bytes}"
            return f"the store would hold {size} bytes, more than its max_bytes of {self.limits.max_bytes}"
        return ""

    def _set(self, operation: Operation) -> Outcome:
        if refusal := self._refusal(operation.keys, operation.values):
            return Outcome(error=refusal)
        for key, value in zip(operation.keys, operation.values, strict=True):
            self._put(key, value)
        return Outcome()

    def _get(self, operation: Operation) -> Outcome:
        # Before the result is built: a request that repeats a key is much smaller than its result.
        size = sum(len(self._values[key]) + _FIELD_BYTES for key in operation.keys) - _FIELD_BYTES
        if size > MAX_BYTES:
            return _too_large(size)
        return Outcome(values=[self._values[key] for key in operation.keys])

    def _list_keys(self, _: Operation) -> Outcome:
        size = self._key_bytes + _FIELD_BYTES * len(self._values)
        if size > MAX_BYTES:
            return _too_large(size)
        if len(self._values) > MAX_LISTED:
            return Outcome(error=f"the store has {len(self._values)} keys, and lists {MAX_LISTED} at most")
        return Outcome(keys=self._values)

    def _add(self, operation: Operation) -> Outcome:
        key = operation.keys[0]
        # An empty value counts as 0, as in torch's HashStore and FileStore.
        before = self._values.get(key) or b"0"
        if not _NUMBER.fullmatch(before):
            shown = before[:32] + b"..." if len(before) > 32 else before
            return Outcome(error=f"add to {_shown(key)} needs a decimal number there, but its value is {shown!r}")
        total = int(before) + operation.amount
        if total not in _INT64:
            return Outcome(error=f"add to {_shown(key)} gives {total}, which does not fit into 64 bits")
        value = b"%d" % total
        if refusal := self._refusal([key], [value]):
            return Outcome(error=refusal)
        self._put(key, value)
        return Outcome(number=total)

    def _append(self, operation: Operation) -> Outcome:
        key, added = operation.keys[0], operation.values[0]
        before = self._values.get(key, b"")
        # With the key, since both are in one record of a log.
        if (size := _size(key) + len(before) + len(added)) > MAX_BYTES:
            return Outcome(error=f"append to {_shown(key)} gives {size} bytes, more than the limit of {MAX_BYTES}")
        value = before + added
        if refusal := self._refusal([key], [value]):
            return Outcome(error=refusal)
        self._put(key, value)
        return Outcome()

    def _compare_set(self, operation: Operation) -> Outcome:
        key, (expected, desired) = operation.keys[0], operation.values
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            if refusal := self._refusal([key], [desired]):
                return Outcome(error=refusal)
            self._put(key, desired)
            return Outcome(values=[desired])
        # For a missing key torch returns the expected value, so this does too.
        return Outcome(values=[expected if current is None else current])

    def _check(self, operation: Operation) -> Outcome:
        return Outcome(number=int(all(self._has(key) for key in operation.keys)))

    def _delete(self, operation: Operation) -> Outcome:
        key = operation.keys[0]
        value = self._values.pop(key, None)
        if value is None:
            return Outcome(number=0)
        self._key_bytes -= _size(key)
        self._value_bytes -= len(value)
        self.version += 1
        return Outcome(number=1)

    def _queue_push(self, operation: Operation) -> Outcome:
        if refusal := self._refusal(operation.keys, operation.values, is_queue=True):
            return Outcome(error=refusal)
        self.version += 1
        name, item = operation.keys[0], operation.values[0]
        self._count_item(name, item, 1)
        self._queues.setdefault(name, deque()).append(item)
        return Outcome()

    def _queue_pop(self, operation: Operation) -> Outcome:
        self.version += 1
        name = operation.keys[0]
        queue = self._queues[name]
        item = queue.popleft()
        self._count_item(name, item, -1)
        if not queue:
            del self._queues[name]
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


class _Kind(NamedTuple):
    """A kind of operation. None stands for any number; SET has as many keys as values."""

    keys: int | None
    values: int | None
    run: Callable[[KeyValueState, Operation], Outcome]


_KINDS: dict[int, _Kind] = {
    store_pb2.SET: _Kind(None, None, KeyValueState._set),
    store_pb2.GET: _Kind(None, 0, KeyValueState._get),
    store_pb2.ADD: _Kind(1, 0, KeyValueState._add),
    store_pb2.APPEND: _Kind(1, 1, KeyValueState._append),
    store_pb2.COMPARE_SET: _Kind(1, 2, KeyValueState._compare_set),
    store_pb2.WAIT: _Kind(None, 0, lambda *_: Outcome()),
    store_pb2.CHECK: _Kind(None, 0, KeyValueState._check),
    store_pb2.DELETE: _Kind(1, 0, KeyValueState._delete),
    store_pb2.COUNT_KEYS: _Kind(0, 0, lambda state, _: Outcome(number=len(state._values))),
    store_pb2.LIST_KEYS: _Kind(0, 0, KeyValueState._list_keys),
    store_pb2.QUEUE_PUSH: _Kind(1, 1, KeyValueState._queue_push),
    store_pb2.QUEUE_POP: _Kind(1, 0, KeyValueState._queue_pop),
    store_pb2.QUEUE_LENGTH: _Kind(1, 0, KeyValueState._queue_length),
    store_pb2.JOIN: _Kind(0, 0, KeyValueState._join),
    store_pb2.LEAVE: _Kind(0, 0, KeyValueState._leave),
}


def problem_of(operation: Operation) -> str:
    """Returns why an operation is not valid (its sender is not gradwire, or a newer version); "" if it is."""
    kind = _KINDS.get(operation.kind)
    if kind is None:
        return f"this version of gradwire does not know store operation {operation.kind}"
    keys, values = len(operation.keys), len(operation.values)
    fits = keys == values if operation.kind == store_pb2.SET else kind[:2] in ((keys, values), (None, values))
    return "" if fits else f"store operation {operation.kind} cannot have {keys} keys and {values} values"


def _size(key: str) -> int:
    return len(key) if key.isascii() else len(key.encode())


def _shown(key: str) -> str:
    return repr(key if len(key) <= _MAX_SHOWN else f"{key[:_MAX_SHOWN]}...")


def _too_large(size: int) -> Outcome:
    return Outcome(error=f"a result of {size} bytes exceeds the limit of {MAX_BYTES}: ask for fewer keys")


@final
class HashStore(Store):
    """A store that the threads of one process share."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._state, self._changed = KeyValueState(), threading.Condition()
        super().__init__(timeout)

    def clone(self) -> "HashStore":
        """Opens another HashStore on the same keys."""
        twin = HashStore(self.timeout)
        twin._state, twin._changed = self._state, self._changed
        return twin

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._state.missing(operation):
                if self._closed:
                    raise self._closed_error()
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(remaining)
            outcome = self._state.apply(operation)
            if operation.kind in ADDING:
                self._changed.notify_all()
            return outcome

    def _release(self) -> None:
        with self._changed:
            self._changed.notify_all()
