"""Operations on stores that are not gradwire's: torch's C++ ones, and anybody's Python ones."""

from datetime import timedelta
from typing import Any

from ...errors import StoreError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_store import TorchQueueEmptyError, TorchStore

__all__ = ["execute"]


def execute(store: TorchStore, operation: Operation, seconds: float) -> Outcome:
    """Runs an operation by the public methods of any torch.distributed.Store.

    A pop from a queue waits for the store's own timeout, because no method says otherwise.

    Raises:
        StoreError: the store failed for another reason than a timeout.
    """
    try:
        return _dispatch(store, operation, seconds)
    except StoreError:
        raise
    except TorchQueueEmptyError:
        return Outcome(missing=operation.keys)
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:  # what torch's C++ stores raise
        lines = str(error).splitlines() or [""]
        if "timeout" in lines[0].lower() and (missing := _missing(store, operation)):
            return Outcome(missing=missing)
        if operation.kind == store_pb2.ADD and "stoll" in lines[0]:
            return Outcome(error=f"add to {operation.keys[0]!r} needs a decimal number there")
        raise StoreError(f"{type(store).__name__}: {lines[0]}") from error


def _dispatch(store: Any, operation: Operation, seconds: float) -> Outcome:
    # Any: the type stubs of torch lack half of the methods.
    kind, keys, values = operation.kind, list(operation.keys), list(operation.values)
    if kind in (store_pb2.GET, store_pb2.WAIT):
        if seconds < 0.001:  # torch takes 0 ms for no limit at all
            if missing := _missing(store, operation):
                return Outcome(missing=missing)
        else:
            store.wait(keys, timedelta(seconds=seconds))
        return Outcome(values=_values(store, keys) if kind == store_pb2.GET else [])
    if kind == store_pb2.SET:
        if len(keys) == 1 or not store.has_extended_api():
            for key, value in zip(keys, values, strict=True):
                store.set(key, value)
        else:
            store.multi_set(keys, values)
    elif kind == store_pb2.ADD:
        return Outcome(number=store.add(keys[0], operation.amount))
    elif kind == store_pb2.APPEND:
        store.append(keys[0], values[0])
    elif kind == store_pb2.COMPARE_SET:
        return Outcome(values=[store.compare_set(keys[0], *values)])
    elif kind == store_pb2.CHECK:
        return Outcome(number=store.check(keys))
    elif kind == store_pb2.DELETE:
        return Outcome(number=store.delete_key(keys[0]))
    elif kind == store_pb2.COUNT_KEYS:
        return Outcome(number=store.num_keys())
    elif kind == store_pb2.LIST_KEYS:
        return Outcome(keys=store.list_keys())
    elif kind == store_pb2.QUEUE_PUSH:
        store.queue_push(keys[0], values[0])
    elif kind == store_pb2.QUEUE_POP:
        return Outcome(values=[store.queue_pop(keys[0], seconds > 0)])
    elif kind == store_pb2.QUEUE_LENGTH:
        return Outcome(number=store.queue_len(keys[0]))
    return Outcome()


def _values(store: Any, keys: list[str]) -> list[bytes]:
    if len(keys) > 1 and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def _missing(store: TorchStore, operation: Operation) -> list[str]:
    return [key for key in dict.fromkeys(operation.keys) if not store.check([key])]
