"""Functions that tests call on other workers."""

import contextlib
import gc
import os
import threading
import time
from typing import Any

import torch
from gradwire import rpc

events: dict[str, threading.Event] = {}
kept: list[Any] = []
"""Of the worker that this runs on. Functions that tests define inside themselves travel with copies of their
globals, so they must say `remote_functions.kept`."""


def identity(value: Any) -> Any:
    return value


def add(a: Any, b: Any) -> Any:
    return a + b


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def process_id() -> int:
    return os.getpid()


def event(name: str) -> threading.Event:
    return events.setdefault(name, threading.Event())


def wait_for(name: str) -> str:
    """Blocks a thread of this worker until `set_event(name)` comes."""
    assert event(name).wait(60), f"nobody set {name}"
    return name


def set_event(name: str) -> None:
    event(name).set()


def keep(value: Any) -> int:
    """Keeps a value on this worker for good."""
    kept.append(value)
    return len(kept)


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    """For what changes without telling anybody, such as counts after garbage collection."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def counts() -> dict[str, int]:
    """What should be zero on an idle worker."""
    info = rpc.debug_info()
    names = (
        "agent.client_active_calls",
        "num_pending_futures",
        "num_owner_rrefs",
        "num_forks",
        "num_awaited_rrefs",
        "num_user_rrefs",
        "num_pending_children",
        "num_autograd_contexts",
        "num_consumed_streams",
        "num_produced_streams",
    )
    return {name: info[name] for name in names}


def assert_clean() -> None:
    """Waits until nothing lives on this worker."""

    def clean() -> bool:
        gc.collect()  # a reference in the frames of a traceback goes with the next collection
        return not any(counts().values())

    try:
        wait_until(clean)
    except AssertionError:
        raise AssertionError(f"still there: {counts()}") from None


def torch_operations(*, scope: bool = False) -> torch.Tensor:
    """Some operations for profilers to see."""
    with torch.autograd.profiler.record_function("a scope") if scope else contextlib.nullcontext():
        ones = torch.ones(8)
        return torch.mul(torch.add(ones, ones), ones).relu()


def many_operations(count: int) -> None:
    ones = torch.ones(1)
    for _ in range(count):
        torch.add(ones, ones)


def die() -> None:
    """Ends this worker's process on the spot."""
    os._exit(3)
