"""`wait_all`: a block of code that waits for the calls made in it."""

import concurrent.futures
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...net.inheritance import at_fork
from ..contracts.agent import holder
from ..execution.ctrl_c import wait_interruptibly
from ..execution.futures import as_concurrent_future

__all__ = ["note_future", "thread_futures", "wait_all", "wait_for_futures"]

thread_futures = threading.local()
"""Inside `wait_all`, the attribute `future_list` has the futures of this thread's calls."""


@contextmanager
def wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for all futures that `rpc_async` has returned in it on this thread.

        with rpc.wait_all():
            rpc.rpc_async("worker1", f)
            rpc.rpc_async("worker2", f)

    A block inside another waits for its own calls.

    Raises:
        Exception: what a call raised, as soon as it fails. The other calls are not waited for any longer.
    """
    outer = getattr(thread_futures, "future_list", None)
    thread_futures.future_list = []
    try:
        yield
    finally:
        futures = thread_futures.future_list
        if outer is None:
            del thread_futures.future_list
        else:
            thread_futures.future_list = outer
        wait_for_futures(futures)


def _leave_to_parent() -> None:
    """Has a forked child wait for no calls of its parent."""
    if (futures := getattr(thread_futures, "future_list", None)) is not None:
        futures.clear()


at_fork(in_child=_leave_to_parent)


def note_future(future: torch.futures.Future[Any]) -> None:
    """Adds the future of a call to the innermost `wait_all` block of this thread, if there is one."""
    if (futures := getattr(thread_futures, "future_list", None)) is not None:
        futures.append(future)


def wait_for_futures(futures: Sequence[torch.futures.Future[Any]]) -> None:
    """Waits until all futures are done. If one fails, raises its error and waits for the others no longer."""
    # Not torch.futures.wait_all: it takes a Python exception for a value, and so would wait for the others.
    outcomes = [as_concurrent_future(future) for future in futures]
    agent = holder.get()
    with nullcontext() if agent is None else agent.blocking():
        wait_interruptibly(concurrent.futures.wait, outcomes, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future, outcome in zip(futures, outcomes, strict=True):
        if outcome.done() and outcome.exception() is not None:
            future.wait()
