"""Waiting for all calls of a block."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["note_future", "thread_futures", "wait_all"]

thread_futures = threading.local()
"""Inside `wait_all`, `future_list` has the futures of this thread's calls."""


@contextmanager
def wait_all() -> Iterator[None]:
    """Waits at its end for all futures that `rpc_async` has returned in the block, on this thread.

        with rpc.wait_all():
            rpc.rpc_async("worker1", f)
            rpc.rpc_async("worker2", f)

    Raises:
        Exception: what the first failed call raised.
    """
    thread_futures.future_list = []
    try:
        yield
    finally:
        futures = thread_futures.future_list
        del thread_futures.future_list
        torch.futures.wait_all(futures)


def note_future(future: torch.futures.Future[Any]) -> None:
    """A call has been made."""
    if (futures := getattr(thread_futures, "future_list", None)) is not None:
        futures.append(future)
