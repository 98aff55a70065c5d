"""The contract of gradwire's stores.

A store is a key-value map that workers share, to find each other and to coordinate. Every operation is atomic;
state.py defines what each one does. An implementation supplies `_execute`, `_release` and `clone`. All methods of
torch.distributed.Store are there, under the names that Python code uses (`delete_key`) and under those that
torch's C++ calls (`deleteKey`).
"""

import contextlib
import math
import operator
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Self, TypeAlias

from ...errors import QueueEmptyError, StoreError, StoreTimeoutError
from ...net.security import Credentials, printable_lines
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchStore
from .limits import MAX_BYTES, MAX_FIELDS

__all__ = ["DEFAULT_TIMEOUT", "Store", "Timeout", "Value", "to_seconds"]

Value: TypeAlias = bytes | str
"""A str is stored as UTF-8."""

Timeout: TypeAlias = timedelta | float
"""A timedelta, or seconds. With 0, operations do not wait."""

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Default timeout of operations that wait for keys."""

MAX_ERROR_CHARACTERS = 4096
"""Characters of an error of the server that are shown."""

_MAX_TIMEOUT_S = 1e9
"""Longer timeouts count as this one, because clocks overflow above it."""


class Store(TorchStore):
    """A key-value store, which is a torch.distributed.Store. The base class of gradwire's stores.

    Any thread may use a store, but only in the process that opened it. A store stays open until `close()`, the end
    of a `with` block, or the end of the process. Dropping the last reference does not close it, since C++ code may
    still use the store.

    The constructor of an implementation calls `super().__init__` last, when the store is ready.

    insecure: whether the program has allowed connections to other hosts without credentials. Process groups that
        form through the store may then make such connections, too.
    """

    insecure: bool = False

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT, *, parent: "Store | None" = None) -> None:
        """Opens the store; as a view of a parent, if there is one, which closes the view when it is closed."""
        super().__init__()
        self._closed = False
        self._process = os.getpid()
        self._views: dict[Store, None] = {}
        self._parent = parent
        TorchStore.set_timeout(self, timedelta(seconds=to_seconds(timeout)))
        if parent is None:
            _keep_alive(self)
        else:
            parent._views[self] = None

    credentials: Credentials | None = None
    """Those that the processes of this store use, also for connections between themselves."""

    # To be defined by implementations.

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        """Runs one operation atomically, waiting at most `seconds` for keys that it needs.

        The outcome has `missing` if keys did not appear in time, and `error` if the operation is not valid. Raises
        StoreError if the store cannot be reached.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Releases connections, files and threads. Called once, after the last operation was started."""

    def clone(self) -> "Store":
        """Opens another store on the same keys, with the same timeout, which is closed separately."""
        raise NotImplementedError

    # Keys.

    def set(self, key: str, value: Value) -> None:
        """Sets the value of a key."""
        self._run(Operation(kind=store_pb2.SET, keys=_keys(key), values=_values(value)))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits until it has one.

        Raises:
            StoreTimeoutError: it had none within the store's timeout.
        """
        return self._wait(Operation(kind=store_pb2.GET, keys=_keys(key))).values[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a decimal counter, which starts at 0, and returns the sum.

        Raises:
            StoreError: the value is not a decimal number, or the sum does not fit into 64 bits.
            TypeError, ValueError: `amount` is not an int, or does not fit into 64 bits.
        """
        try:
            number = operator.index(amount)
        except TypeError:
            raise TypeError(f"the amount to add is {amount!r}: give an int") from None
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"the amount to add is {number}: it does not fit into 64 bits")
        return self._run(Operation(kind=store_pb2.ADD, keys=_keys(key), amount=number)).number

    def append(self, key: str, value: Value) -> None:
        """Appends to the value of a key, or sets it if there is none."""
        self._run(Operation(kind=store_pb2.APPEND, keys=_keys(key), values=_values(value)))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Sets a key to `desired_value` if its value is `expected_value`. A missing key counts as empty.

        Returns:
            The value afterwards; for a key that is still missing, `expected_value`, as in torch.
        """
        values = _values(expected_value, desired_value)
        return self._run(Operation(kind=store_pb2.COMPARE_SET, keys=_keys(key), values=values)).values[0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until each key has a value, or is the name of a queue that has an item.

        Args:
            keys: keys or names of queues.
            timeout: the store's timeout if None.

        Raises:
            StoreTimeoutError: some keys did not appear in time.
        """
        self._wait(Operation(kind=store_pb2.WAIT, keys=_key_list(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether each key has a value, or is the name of a queue that has an item."""
        return bool(self._run(Operation(kind=store_pb2.CHECK, keys=_key_list(keys))).number)

    def delete_key(self, key: str) -> bool:
        """Deletes a key, and returns whether it existed."""
        return bool(self._run(Operation(kind=store_pb2.DELETE, keys=_keys(key))).number)

    def num_keys(self) -> int:
        """Returns the number of keys that have a value."""
        return self._run(Operation(kind=store_pb2.COUNT_KEYS)).number

    def list_keys(self) -> list[str]:
        """Returns the keys that have a value, in no particular order."""
        return list(self._run(Operation(kind=store_pb2.LIST_KEYS)).keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of several keys, read atomically; waits until all have one.

        Raises:
            StoreTimeoutError: some had none within the store's timeout.
        """
        return list(self._wait(Operation(kind=store_pb2.GET, keys=_key_list(keys))).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets several keys atomically.

        Raises:
            ValueError: there are not as many values as keys.
        """
        names, contents = _key_list(keys), _value_list(values)
        if len(names) != len(contents):
            raise ValueError(f"{len(names)} keys and {len(contents)} values: give one value for each key")
        self._run(Operation(kind=store_pb2.SET, keys=names, values=contents))

    # Queues.

    def queue_push(self, key: str, value: Value) -> None:
        """Appends an item to a queue. Queues have their own names: a key of the same name is separate."""
        self._run(Operation(kind=store_pb2.QUEUE_PUSH, keys=_keys(key), values=_values(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Removes the oldest item of a queue, and returns it.

        Args:
            key: name of the queue.
            block: wait for an item if there is none.

        Raises:
            StoreTimeoutError: there was none within the store's timeout.
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
        """Returns the number of items in a queue."""
        return self._run(Operation(kind=store_pb2.QUEUE_LENGTH, keys=_keys(key))).number

    # Barrier, timeout, closing.

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until `world_size` callers have called it with this key. Each barrier needs a new key.

        Args:
            key: of the barrier.
            world_size: number of callers.
            timeout: the store's timeout if None.

        Raises:
            StoreTimeoutError: some did not call it in time.
        """
        if world_size < 1:
            raise ValueError(f"the barrier's world_size is {world_size}: give the number of callers, at least 1")
        last = f"{key}/last_member"  # the same keys as in torch, whose C++ callers can then take part
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(last, b"1")
        self.wait([last], timeout)

    @property
    def timeout(self) -> timedelta:
        """Default timeout of operations that wait for keys."""
        # Kept in the C++ base class, where C++ code sets it too.
        return super().timeout  # type: ignore[misc, no-any-return] # the stub lacks it

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets the default timeout of operations that wait for keys; with 0 they do not wait."""
        super().set_timeout(timedelta(seconds=to_seconds(timeout)))

    def has_extended_api(self) -> bool:
        """Returns whether append, multi_get and multi_set are supported: True."""
        return True

    # Names by which torch's C++ calls two of the methods.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def close(self) -> None:
        """Closes the store and its views; operations that wait in it fail. Further calls do nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        for view in list(self._views):
            view.close()
        try:
            self._release()
        finally:
            if self._parent is None:
                _open_stores.pop(self, None)
            else:
                self._parent._views.pop(self, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, operation: Operation, seconds: float = 0.0) -> Outcome:
        self._check_usable()
        if (size := operation.ByteSize()) > MAX_BYTES:
            raise StoreError(
                f"an operation with keys and values of {size} bytes exceeds the limit of {MAX_BYTES}: "
                "stores are for small values, such as addresses and ids"
            )
        if (count := len(operation.keys) + len(operation.values)) > MAX_FIELDS:
            raise StoreError(f"an operation with {count} keys and values exceeds the limit of {MAX_FIELDS}")
        outcome = self._execute(operation, seconds)
        if outcome.missing:
            raise StoreTimeoutError(outcome.missing, seconds)
        if outcome.error:
            raise StoreError(printable_lines(outcome.error, MAX_ERROR_CHARACTERS))
        return outcome

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                f"this store was opened in process {self._process} and is used in its fork {os.getpid()}: "
                "open stores in the process that uses them"
            )
        if self._closed:
            raise self._closed_error()

    def _wait(self, operation: Operation, timeout: Timeout | None = None) -> Outcome:
        """Runs an operation that may wait for keys for `timeout`; for the store's timeout if None."""
        seconds = to_seconds(self.timeout if timeout is None else timeout)
        operation.timeout_ms = math.ceil(seconds * 1000)
        return self._run(operation, seconds)

    def _closed_error(self) -> StoreError:
        return StoreError(f"this {type(self).__name__} is closed")


def to_seconds(timeout: Timeout) -> float:
    """Returns a timeout in seconds, at most 1e9.

    Raises:
        TypeError: it is neither a timedelta nor a number.
        ValueError: it is negative or not finite.
    """
    given: object = timeout
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        seconds = float(given)
    else:
        raise TypeError(f"the timeout is {given!r}: give a timedelta or seconds")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the timeout is {timeout!r}: give a finite time of 0 s or more")
    return min(seconds, _MAX_TIMEOUT_S)


def _keys(key: str) -> list[str]:
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


# C++ code that was given a Python store (a torch.distributed.PrefixStore, a process group) does not keep the
# Python object alive, and its calls fail once that object is gone. So stores are kept alive until they are closed.

_open_stores: dict[Store, None] = {}
_process = 0


def _keep_alive(store: Store) -> None:
    """Holds a reference to a store until it is closed; closes it when the process ends before that."""
    global _process  # noqa: PLW0603 - a forked process starts over
    if _process != os.getpid():
        _process = os.getpid()
        # The parent's stores stay in `_open_stores`. They cannot be used in this process, but freeing them would
        # close connections that the parent still uses.
        # Finalize, unlike atexit, also runs in the children of multiprocessing.
        Finalize(None, _close_all, exitpriority=10)
    _open_stores[store] = None


def _close_all() -> None:
    for store in reversed(list(_open_stores)):
        with contextlib.suppress(Exception):  # the process is ending, so nobody could handle the error
            store.close()
