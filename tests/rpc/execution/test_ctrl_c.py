"""Ctrl-C never splits a step of gradwire, and gets through wherever the program's own code, or a wait, runs."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from gradwire import rpc
from gradwire.rpc.execution.ctrl_c import HANG_TIMEOUT_S, ctrl_c
from gradwire.rpc.execution.interruptions import acquire

from tests.remote_functions import add, identity, set_event, wait_for


@pytest.fixture
def worker(workers) -> Iterator[Any]:
    made, _ = workers.rpc(2)
    made.run(default_handler)
    return made


def default_handler() -> None:
    """Has Ctrl-C do what it does in a program, even if the parent process ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


press = partial(signal.raise_signal, signal.SIGINT)
"""A function in C: the signal interrupts what calls it."""


class Slow:
    """Presses Ctrl-C where gradwire pickles it, in the program's own code, and once more when that has gone on."""

    def __reduce__(self) -> Any:
        press()
        return int, ()


def interrupted_in_own_code() -> bool:
    with ctrl_c.held_back(), pytest.raises(KeyboardInterrupt):
        rpc.rpc_async("worker1", identity, (Slow(),))
    return rpc.rpc_sync("worker1", add, (1, 2)) == 3


def test_the_programs_code_that_gradwire_calls_is_interrupted_at_once(worker):
    assert worker.run(interrupted_in_own_code)


def raised_in_callback() -> list[str]:
    steps: list[str] = []

    def callback(_: object) -> None:
        steps.append("began")
        try:
            press()
            steps.append("went on")
        except KeyboardInterrupt:
            steps.append("interrupted")

    with ctrl_c.held_back():
        future = rpc.rpc_async("worker1", identity, (1,))
        future.wait()
        future.add_done_callback(callback)  # is called at once, on this thread
    return steps


def test_a_callback_is_interrupted_at_once(worker):
    assert worker.run(raised_in_callback) == ["began", "interrupted"]


def function_of_gradwire(source: str) -> Any:
    """Returns the function `run` of a source, as one of a module of gradwire that does not wait."""
    names = {"__name__": "gradwire.rpc.steps"}
    exec(source, names)  # noqa: S102
    return names["run"]


PRESSED = """
def run(press, steps):
    steps.append("began")
    press()
    steps.append("ended")
"""

PRESSED_TWICE = """
def run(press, steps):
    press()
    press()
    steps.append("ended")
"""

WAITING = """
def run(press, wait):
    press()
    wait()
"""

HANGING = """
import time
def run(begun):
    begun.set()
    ends_at = time.monotonic() + 20
    while time.monotonic() < ends_at:
        pass
"""


@pytest.mark.parametrize("source", [PRESSED, PRESSED_TWICE])
def test_gradwire_ends_its_step_first(source):
    steps: list[str] = []
    with ctrl_c.held_back():
        try:
            function_of_gradwire(source)(press, steps)
            steps.append("went on")
        except KeyboardInterrupt:
            steps.append("interrupted")
    assert steps[-2:] == ["ended", "interrupted"]
    assert sys.gettrace() is None


def test_a_value_that_is_returned_is_lost_with_the_interrupt():
    """As it is where Python itself raises before the value is used."""

    def call() -> Any:
        return function_of_gradwire(PRESSED)(press, [])

    with ctrl_c.held_back(), pytest.raises(KeyboardInterrupt):
        call()


def test_a_wait_that_begins_later_is_interrupted():
    lock = threading.Lock()
    lock.acquire()
    with ctrl_c.held_back(), pytest.raises(KeyboardInterrupt):
        function_of_gradwire(WAITING)(press, lambda: acquire(lock))


def test_the_second_one_gets_through_to_a_program_that_hangs():
    """In code of gradwire that does not wait, which should not last."""
    begun = threading.Event()

    def press_twice() -> None:
        assert begun.wait(20)
        press()
        time.sleep(HANG_TIMEOUT_S + 0.1)
        press()

    thread = threading.Thread(target=press_twice)
    before = time.monotonic()
    with ctrl_c.held_back():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            function_of_gradwire(HANGING)(begun)
    assert time.monotonic() > before + HANG_TIMEOUT_S
    thread.join()


def test_other_handlers_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ctrl_c.held_back():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_pythons_handler_is_back_in_the_end():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with ctrl_c.held_back():
        assert signal.getsignal(signal.SIGINT) == ctrl_c.handle
        with ctrl_c.held_back():
            pass
        assert signal.getsignal(signal.SIGINT) == ctrl_c.handle
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt_a_wait() -> float:
    threading.Timer(0.2, press).start()
    with ctrl_c.held_back(), pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("worker1", wait_for, ("never",), timeout=0)
    rpc.rpc_sync("worker1", set_event, ("never",))
    return 0.0


def test_a_wait_is_interrupted(worker):
    worker.run(interrupt_a_wait)
