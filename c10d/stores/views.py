"""Views of other stores, gradwire's or not, and what lies under a view.

A view runs its operations on any torch.distributed.Store: gradwire's, torch's in C++, or one that a user has
written in Python. In those that are not gradwire's, it waits for keys by polling. A blocking wait inside one of
torch's C++ stores cannot be interrupted, even by Ctrl-C, and prints a C++ stack trace on timeout or when the
store's server ends.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, cast, final

from ...errors import StoreError, StoreTimeoutError
from ...net.addresses import format_address, is_loopback
from ...net.security import Credentials
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchQueueEmptyError, TorchStore, TorchTCPStore
from .base import Store
from .file import FileStore
from .tcp import TCPStore

__all__ = [
    "PrefixStore",
    "StoreView",
    "describe_store",
    "innermost_store",
    "is_insecure_store",
    "layers",
    "store_credentials",
    "store_host",
    "wait_for_keys",
]

MIN_POLL_INTERVAL_S = 0.001
"""Seconds between the first two checks for a key; the interval doubles with each check."""

MAX_POLL_INTERVAL_S = 0.05
"""Seconds between two checks for a key at most."""


class StoreView(Store):
    """A view of another store, gradwire's or not. Closing it leaves the underlying store open."""

    def __init__(self, store: TorchStore) -> None:
        self._store = cast(Any, store)  # torch's stubs lack timeout, clone and has_extended_api
        self._own_clone: Store | None = None
        self._closed_event = threading.Event()
        super().__init__(self._store.timeout, parent=store if isinstance(store, Store) else None)

    def _over(self, store: TorchStore) -> Self:
        """Makes the same view of another store. To be defined by subclasses."""
        raise NotImplementedError

    @property
    def underlying_store(self) -> TorchStore:
        """The store that this is a view of."""
        return cast(TorchStore, self._store)

    def has_extended_api(self) -> bool:
        """Returns whether the underlying store supports append, multi_get and multi_set."""
        return bool(self._store.has_extended_api())

    def clone(self) -> Self:
        """Makes the same view of a clone of the underlying store; both are closed together."""
        under = self._store.clone()
        twin = self._over(under)
        twin.set_timeout(self.timeout)
        twin.credentials, twin.insecure = self.credentials, self.insecure
        twin._own_clone = under if isinstance(under, Store) else None
        return twin

    def _release(self) -> None:
        self._closed_event.set()
        if self._own_clone is not None:
            self._own_clone.close()

    def _execute_below(self, operation: Operation, seconds: float = 0.0) -> Outcome:
        if isinstance(self._store, Store):
            self._store._check_usable()
            return self._store._execute(operation, seconds)
        return _execute_on(self._store, operation, seconds, self._closed_event)


@final
class PrefixStore(StoreView):
    """A view of the keys of another store that begin with `prefix/`, under names without it. Views can be nested.

    As in torch, `num_keys` counts the keys of the whole underlying store, while `list_keys` lists only this
    view's. The view has its own timeout, at first that of the underlying store (torch's PrefixStore sets that
    one's instead).

    Closing the view leaves the underlying store open. Operations that wait in an underlying gradwire store go on;
    those that wait in another store fail. Closing a gradwire store also closes the views of it.
    """

    def __init__(self, prefix: str, store: TorchStore) -> None:
        """Makes a view.

        Args:
            prefix: of the keys.
            store: any torch.distributed.Store, gradwire's or not.
        """
        if not isinstance(prefix, str):
            raise TypeError(f"the prefix is {prefix!r}: give a str")
        if not isinstance(store, TorchStore):
            raise TypeError(f"the store is {store!r}: give a torch.distributed.Store, such as a TCPStore")
        self._prefix = f"{prefix}/"
        super().__init__(store)

    def _over(self, store: TorchStore) -> "PrefixStore":
        return PrefixStore(self._prefix[:-1], store)

    @property
    def _underlying_non_prefix_store(self) -> TorchStore:
        """The store under all prefixes. The name is torch's."""
        return cast(TorchStore, innermost_store(self))

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        operation.keys[:] = [self._prefix + key for key in operation.keys]
        outcome = self._execute_below(operation, seconds)
        if outcome.missing:
            outcome.missing[:] = [key.removeprefix(self._prefix) for key in outcome.missing]
        if operation.kind == store_pb2.LIST_KEYS:
            own = [key for key in outcome.keys if key.startswith(self._prefix)]
            outcome.keys[:] = [key.removeprefix(self._prefix) for key in own]
        return outcome


def layers(store: Any) -> Iterator[Any]:
    """Yields a store and those of which it is a view, as PrefixStores are, gradwire's or torch's."""
    yield store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
        yield store


def innermost_store(store: Any) -> Any:
    """Returns the store under all views of it."""
    *_, innermost = layers(store)
    return innermost


def store_host(store: TorchStore | None) -> str:
    """Returns the host of a TCPStore, gradwire's or torch's, possibly under prefixes; empty for other stores."""
    return str(getattr(innermost_store(store), "host", ""))


def store_credentials(store: Any) -> Credentials | None:
    """Returns the credentials of a store, or of one under its prefixes; else those in the environment, if any."""
    found = (getattr(each, "credentials", None) for each in layers(store))
    return next((each for each in found if isinstance(each, Credentials)), None) or Credentials.from_environment()


def is_insecure_store(store: Any) -> bool:
    """Returns whether a store, or one under its prefixes, was opened with `insecure=True` (see Store.insecure)."""
    return any(getattr(each, "insecure", False) for each in layers(store))


def describe_store(store: TorchStore) -> str:
    """Returns what and where a store is, for messages. Says so if only this host can reach its address."""
    under = innermost_store(store)
    if isinstance(under, FileStore):
        return f"the file {under.path}"
    if isinstance(under, TCPStore | TorchTCPStore):
        text = f"the TCPStore at {format_address(under.host, under.port)}"
        with suppress(RuntimeError):
            if is_loopback(under.host):
                return f"{text}, a loopback address, which only processes of this host can reach"
        return text
    return f"a {type(under).__name__}"


def _execute_on(store: TorchStore, operation: Operation, seconds: float, closed: threading.Event) -> Outcome:
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


def wait_for_keys(
    store: TorchStore, keys: Sequence[str], seconds: float, closed: threading.Event | None = None
) -> bool:
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
    has_keys = wait_for_keys(store, operation.keys, seconds, closed)
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
"""Runs an operation of one kind. Takes what `_execute_on` takes."""

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
