"""Functions that tests call on other workers."""

import contextlib
import gc
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from gradwire import rpc

events: dict[str, threading.Event] = {}
kept: list[Any] = []
"""Values that `keep` keeps on this worker. A function that a test defines inside itself travels with copies of its
globals, so it must write `remote_functions.kept`."""


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
    """Blocks a thread of this worker until `set_event(name)` runs on it; fails after 60 s."""
    assert event(name).wait(60), f"no set_event({name!r}) ran on this worker within 60 s"
    return name


def set_event(name: str) -> None:
    event(name).set()


def keep(value: Any) -> int:
    """Keeps a value alive on this worker until its process ends. Returns how many are kept."""
    kept.append(value)
    return len(kept)


def wait_until(condition: Callable[[], Any], seconds: float = 20.0, pause: float = 0.005) -> None:
    """Polls until `condition()` is true, for state without an event, such as counts after garbage collection.

    Args:
        condition: what to wait for.
        seconds: how long to wait at most, besides the time that the calls of `condition` take.
        pause: seconds between two calls of `condition`; at least as many as the last one has taken, because a
            garbage collection lets no other thread run.
    """
    waited = 0.0
    began = time.monotonic()
    while not condition():
        took = time.monotonic() - began
        assert waited < seconds, f"after {seconds:g} s this is still not true: {_source_of(condition)}"
        time.sleep(max(pause, took))
        began = time.monotonic()
        waited += max(pause, took)


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function).strip()
    except (OSError, TypeError):
        return repr(function)


def counts() -> dict[str, int]:
    """Returns what this worker's RPC agent keeps; all of it is zero on an idle worker."""
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
    """Waits until this worker keeps no calls, references, contexts or streams; fails after 20 s."""

    def clean() -> bool:
        gc.collect()  # a reference in the frames of a traceback goes with the next collection
        return not any(counts().values())

    try:
        wait_until(clean, pause=0.02)
    except AssertionError:
        raise AssertionError(f"still there: {counts()}") from None


def torch_operations(*, scope: bool = False) -> torch.Tensor:
    """Runs a few operations of torch, for profilers to record."""
    with torch.autograd.profiler.record_function("a scope") if scope else contextlib.nullcontext():
        ones = torch.ones(8)
        return torch.mul(torch.add(ones, ones), ones).relu()


def many_operations(count: int) -> None:
    ones = torch.ones(1)
    for _ in range(count):
        torch.add(ones, ones)


def die() -> None:
    """Ends this worker's process at once, without any clean-up."""
    os._exit(3)


def connect_to(host: str, port: int, seconds: float | None = 20) -> socket.socket:
    """Connects to an address of a failure detector: `@` and a name are a unix socket in the abstract namespace."""
    if not host.startswith("@"):
        return socket.create_connection((host, port), seconds)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    connection.connect(f"\0{host[1:]}")
    return connection
