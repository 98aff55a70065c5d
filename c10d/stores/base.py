"""The contract of gradwire's stores.

A store is a key-value map that workers meet through. Every operation is one atomic step, whose meaning is in
state.py; an implementation supplies `_execute` and nothing else. All of torch.distributed.Store is offered,
under the names that Python code uses (`delete_key`) and under those that torch's C++ calls (`deleteKey`).
"""

import math
import operator
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeAlias

from ...errors import QueueEmptyError, StoreError, StoreTimeoutError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchStore
from . import lifetime

__all__ = ["DEFAULT_TIMEOUT", "MAX_BYTES", "Store", "Timeout", "Value", "to_seconds"]

Value: TypeAlias = bytes | str
"""A str is stored as UTF-8."""

Timeout: TypeAlias = timedelta | float
"""A timedelta, or seconds. 0 is not to wait at all."""

DEFAULT_TIMEOUT = timedelta(seconds=300)

MAX_BYTES = 64 * 1024 * 1024
"""The most that the keys and values of one operation, or of its answer, may take together."""

_FOREVER = 1e9  # seconds; longer waits count as this one, because clocks overflow somewhere above


class Store(TorchStore):
    """A store. An implementation calls `super().__init__` last, when it is ready to work.

    Stores may be used from any thread, and only in the process that made them. They stay open until
    `close()`, the end of a `with` block, or the end of the process; dropping the last reference closes
    nothing, since C++ code may still use the store.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT, *, holder: "Store | None" = None) -> None:
        """Opens the store.

        Args:
            timeout: how long waiting operations wait.
            holder: the store that this one is a view of, and with which it is closed.
        """
        super().__init__()
        self._closed = False
        self._process = os.getpid()
        self._views: dict[Store, None] = {}
        self._holder = holder
        TorchStore.set_timeout(self, timedelta(seconds=to_seconds(timeout)))
        if holder is None:
            lifetime.hold(self)
        else:
            holder._views[self] = None

    # What implementations supply.

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        """Runs one operation, atomically, waiting at most `seconds` for keys that it needs.

        Returns:
            the outcome; one with `missing` if keys did not appear in time, or with `error` if it is refused.

        Raises:
            StoreError: the store cannot be reached.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Gives back what the store holds. Called once, after the last operation was started."""

    def clone(self) -> "Store":
        """Another store on the same keys, with this one's timeout, that is closed on its own."""
        raise NotImplementedError

    # Keys.

    def set(self, key: str, value: Value) -> None:
        """Makes `value` the value of `key`."""
        self._run(Operation(kind=store_pb2.SET, keys=_keys(key), values=_values(value)))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one.

        Raises:
            StoreTimeoutError: there was none within `timeout`.
        """
        return self._wait(Operation(kind=store_pb2.GET, keys=_keys(key))).values[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a decimal counter, which is 0 before the first time, and answers the sum.

        Raises:
            StoreError: the value is not a number, or the sum does not fit into 64 bits.
        """
        try:
            number = operator.index(amount)
        except TypeError:
            raise TypeError(f"the amount to add is {amount!r}: give an int") from None
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"the amount to add is {number}: it does not fit into 64 bits")
        return self._run(Operation(kind=store_pb2.ADD, keys=_keys(key), amount=number)).number

    def append(self, key: str, value: Value) -> None:
        """Puts `value` behind what is there, or makes it the value if there is none."""
        self._run(Operation(kind=store_pb2.APPEND, keys=_keys(key), values=_values(value)))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Makes `desired_value` the value if `expected_value` is, or if that is empty and there is no value.

        Returns:
            the value that stands afterwards; for a key that is still missing, `expected_value`.
        """
        values = _values(expected_value, desired_value)
        return self._run(Operation(kind=store_pb2.COMPARE_SET, keys=_keys(key), values=values)).values[0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until all keys have a value or, as the name of a queue, an item.

        Raises:
            StoreTimeoutError: some did not within `timeout` (by default the store's).
        """
        self._wait(Operation(kind=store_pb2.WAIT, keys=_key_list(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Have all keys a value, or an item in the queue of that name?"""
        return bool(self._run(Operation(kind=store_pb2.CHECK, keys=_key_list(keys))).number)

    def delete_key(self, key: str) -> bool:
        """Removes the key; tells whether it was there."""
        return bool(self._run(Operation(kind=store_pb2.DELETE, keys=_keys(key))).number)

    def num_keys(self) -> int:
        """How many keys have a value."""
        return self._run(Operation(kind=store_pb2.COUNT_KEYS)).number

    def list_keys(self) -> list[str]:
        """The keys that have a value, in no particular order."""
        return list(self._run(Operation(kind=store_pb2.LIST_KEYS)).keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, taken at one moment; waits until all have one.

        Raises:
            StoreTimeoutError: some had none within `timeout`.
        """
        return list(self._wait(Operation(kind=store_pb2.GET, keys=_key_list(keys))).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets several keys at one moment."""
        names, contents = _key_list(keys), _value_list(values)
        if len(names) != len(contents):
            raise ValueError(f"{len(names)} keys and {len(contents)} values: give one value for each key")
        self._run(Operation(kind=store_pb2.SET, keys=names, values=contents))

    # Queues.

    def queue_push(self, key: str, value: Value) -> None:
        """Puts an item at the end of a queue. Queues have names of their own: a key is another thing."""
        self._run(Operation(kind=store_pb2.QUEUE_PUSH, keys=_keys(key), values=_values(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Takes the oldest item of a queue.

        Args:
            key: the queue.
            block: wait for an item if there is none.

        Raises:
            StoreTimeoutError: none came within `timeout`.
            QueueEmptyError: there is none, and `block` is false.
        """
        operation = Operation(kind=store_pb2.QUEUE_POP, keys=_keys(key))
        if block:
            return self._wait(operation).values[0]
        try:
            return self._wait(operation, 0).values[0]
        except StoreTimeoutError:
            raise QueueEmptyError(f"queue is empty: {key!r}") from None

    def queue_len(self, key: str) -> int:
        """How many items are in a queue."""
        return self._run(Operation(kind=store_pb2.QUEUE_LENGTH, keys=_keys(key))).number

    # The rest.

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until `world_size` callers have come here. A key is good for one time.

        Raises:
            StoreTimeoutError: they did not come within `timeout` (by default the store's).
        """
        if world_size < 1:
            raise ValueError(f"the barrier's world_size is {world_size}: give how many will come to it")
        last = f"{key}/last_member"  # torch's own keys, so that its C++ callers can take part
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(last, b"1")
        self.wait([last], timeout)

    @property
    def timeout(self) -> timedelta:
        """How long waiting operations wait."""
        # It lives in the C++ base, where C++ code sets it too.
        return super().timeout  # type: ignore[misc, no-any-return] # the stub lacks it

    def set_timeout(self, timeout: Timeout) -> None:
        """Changes how long waiting operations wait. 0 is not to wait at all."""
        super().set_timeout(timedelta(seconds=to_seconds(timeout)))

    def has_extended_api(self) -> bool:
        """Are append, multi_get and multi_set supported?"""
        return True

    # The names by which torch's C++ calls two of them.

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """See delete_key."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802
        """See num_keys."""
        return self.num_keys()

    def close(self) -> None:
        """Ends the use of this store; what waits in it fails. Closing it again does nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        for view in list(self._views):
            view.close()
        try:
            self._release()
        finally:
            if self._holder is None:
                lifetime.release(self)
            else:
                self._holder._views.pop(self, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, operation: Operation, seconds: float = 0.0) -> Outcome:
        """Runs an operation, and raises what its outcome says."""
        self._check_usable()
        if (size := operation.ByteSize()) > MAX_BYTES:
            raise StoreError(
                f"keys and values of {size} bytes are more than the {MAX_BYTES} that a store takes at once: "
                "a store is for small things, such as addresses and ids"
            )
        outcome = self._execute(operation, seconds)
        if outcome.missing:
            raise StoreTimeoutError(outcome.missing, seconds)
        if outcome.error:
            raise StoreError(outcome.error)
        return outcome

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                f"this store was opened in process {self._process} and is used in {os.getpid()}, a fork of "
                "it: open stores in the process that uses them"
            )
        if self._closed:
            raise self._closed_error()

    def _wait(self, operation: Operation, timeout: Timeout | None = None) -> Outcome:
        """Runs an operation that may wait for keys: for `timeout`, or else for the store's."""
        seconds = to_seconds(self.timeout if timeout is None else timeout)
        operation.timeout_ms = math.ceil(seconds * 1000)
        return self._run(operation, seconds)

    def _closed_error(self) -> StoreError:
        return StoreError(f"this {type(self).__name__} is closed")


def to_seconds(timeout: Timeout) -> float:
    """A timeout in seconds.

    Raises:
        TypeError, ValueError: it is no timedelta, and no number of seconds from 0 on.
    """
    given: object = timeout
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        seconds = float(given)
    else:
        raise TypeError(f"the timeout is {given!r}: give a timedelta or seconds")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the timeout is {timeout!r}: give 0 s or more, and a finite time")
    return min(seconds, _FOREVER)


def _keys(key: str) -> list[str]:
    """The keys of an operation on one key, checked."""
    if not isinstance(key, str):
        raise TypeError(f"the key is {key!r}: keys are str")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the key is {key!r}: it cannot be written as UTF-8") from None
    return [key]


def _key_list(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"the keys are {keys!r}: give a list of str")
    return [_keys(key)[0] for key in keys]


def _values(*values: Value) -> list[bytes]:
    """The values of an operation, checked and encoded."""
    return [_encode(value) for value in values]


def _value_list(values: Iterable[Value]) -> list[bytes]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"the values are {values!r}: give a list of bytes or str")
    return _values(*values)


def _encode(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"the value is {value!r}: give bytes or str")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the value is {value!r}: it cannot be written as UTF-8; give bytes") from None
