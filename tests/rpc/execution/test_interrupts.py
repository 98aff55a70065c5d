"""Ctrl-C ends a program that waits for other workers, and the traceback shows the user's functions."""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from gradwire import compat, rpc

from tests.remote_functions import wait_for
from tests.workers import _context, _init_rpc

MAX_EXIT_S = 30.0
"""Seconds within which a process ends, on a busy machine."""


def call() -> None:
    rpc.rpc_sync("worker1", wait_for, ("never",), timeout=0)


def call_for_a_value() -> None:
    rpc.remote("worker1", wait_for, ("never",), timeout=0).to_here()


def wait_for_calls() -> None:
    with rpc.wait_all():
        rpc.rpc_async("worker1", wait_for, ("never",), timeout=0)


def gather() -> None:
    rpc.all_gather(1, timeout=0)


def shut_down() -> None:
    rpc.shutdown()


def shut_down_as_in_torch() -> None:
    compat.install()
    import torch.distributed.rpc

    torch.distributed.rpc.shutdown()


def interrupted(function: Callable[..., Any], url: str, stderr: str, ready: Any) -> None:
    """Runs a worker that gets a Ctrl-C. Handles it even if the parent process, like some shells, ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY, 0o600), 2)
    arguments = (url,)
    if function is not join_alone:
        _init_rpc("worker0", 0, 2, url, {})
        arguments = ()
    threading.Thread(target=set_when_waiting, args=(function.__name__, ready), daemon=True).start()
    function(*arguments)


def set_when_waiting(name: str, ready: Any) -> None:
    """Sets an event once the main thread blocks inside a function: once its stack stops changing."""
    seen: list[Any] = []
    while len(seen) < 20:
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        if not any(each.name == name for each in stack) or (seen and stack != seen[-1]):
            seen.clear()
        seen.append(stack)
        time.sleep(0.01)
    ready.set()


def join_alone(url: str) -> None:
    _init_rpc("worker0", 0, 2, url, {})


def end_by_interrupt(function: Callable[..., Any], tmp_path: Any, url: str) -> tuple[list[str], float]:
    """Returns the functions in the traceback of an interrupted worker, and the seconds that it took to exit."""
    ready = _context.Event()
    errors = tmp_path / "stderr"
    process = _context.Process(target=interrupted, args=(function, url, str(errors), ready), daemon=True)
    process.start()
    assert ready.wait(60)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 1
    text = errors.read_text()
    assert text.count("Traceback") == 1
    assert text.splitlines()[-1] == "KeyboardInterrupt"
    found = re.findall(r"^  File .*, in (\w+)$", text, re.M)
    return found[found.index("interrupted") + 1 :], time.monotonic() - started


@pytest.mark.parametrize(
    "function", [call, call_for_a_value, wait_for_calls, gather, shut_down, shut_down_as_in_torch]
)
def test_a_wait_for_others_is_interrupted(workers, tmp_path, function):
    url = f"file://{tmp_path}/rendezvous"
    (other,) = workers(1)
    joining = other.start(_init_rpc, "worker1", 1, 2, url, {})
    frames, seconds = end_by_interrupt(function, tmp_path, url)
    joining.result()
    assert frames[0] == function.__name__
    assert len(frames) <= 9
    assert seconds < MAX_EXIT_S


def test_joining_is_interrupted(tmp_path):
    frames, seconds = end_by_interrupt(join_alone, tmp_path, f"file://{tmp_path}/rendezvous")
    assert frames == ["join_alone", "_init_rpc", "init_rpc"]
    assert seconds < MAX_EXIT_S


def fork_children() -> None:
    for _ in range(5):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def test_forks_print_nothing(workers):
    """While gRPC is busy, as with the workers of a DataLoader."""
    a, _ = workers.rpc(2)

    def fork_meanwhile() -> None:
        futures = [rpc.rpc_async("worker1", os.getpid) for _ in range(20)]
        fork_children()
        for future in futures:
            future.wait()

    a.run(fork_meanwhile)
    assert a.log.read_text() == ""
