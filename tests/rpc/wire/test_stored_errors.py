"""A future that has failed keeps no frames, and so none of the local variables of those who waited for it."""

import gc
import weakref
from collections.abc import Callable

import pytest
from gradwire import rpc
from gradwire.errors import WorkerLostError
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.execution.futures import Future


class Local:
    """A local variable of the function that makes a call."""


def fail() -> None:
    raise ValueError("three is right out")


def is_freed(call: Callable[[], "weakref.ref[Local]"]) -> bool:
    """Returns whether the local variable is freed that `call` returns a reference to."""
    reference = call()
    gc.collect()
    return reference() is None


def test_an_error_raised_while_another_is_handled():
    """As a call fails whose connection breaks while it is sent."""
    executor = Executor(1, "gradwire-test")
    future: Future[None] = Future(executor)

    def fail_to_send() -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise WorkerLostError("worker1", "its connection broke") from None

    def call() -> "weakref.ref[Local]":
        local = Local()
        try:
            fail_to_send()
        except WorkerLostError as error:
            future.set_exception(error)
        return weakref.ref(local)

    assert is_freed(call)
    with pytest.raises(WorkerLostError, match="'worker1' is lost"):
        future.wait()
    assert executor.close(10), "its threads have ended"


@pytest.mark.parametrize("wait", ["wait", "value"])
def test_a_wait_while_another_exception_is_handled(two_workers, wait):
    a, _ = two_workers

    def call() -> "weakref.ref[Local]":
        local = Local()
        future = rpc.rpc_async("worker1", fail)
        with pytest.raises(ValueError, match="right out"):
            future.wait()
        try:
            raise LookupError("something else")
        except LookupError:
            with pytest.raises(ValueError, match="right out"):
                getattr(future, wait)()
        return weakref.ref(local)

    a.run(lambda: is_freed(call) or pytest.fail("the local variable is still there"))
