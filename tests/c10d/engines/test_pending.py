"""Operations with a final step, and operations made of others."""

import signal
import time
from typing import NoReturn

import pytest
from gradwire.c10d.engines.base import CombinedOperation, CompletedOperation, OperationWithFinalStep
from gradwire.c10d.engines.threads import SerialQueue
from gradwire.c10d.groups.work import GroupWork
from gradwire.errors import ProcessGroupError


def interrupted_in_the_final_step() -> list[bool]:
    """Returns what a signal handler sees that asks for the operation whose final step it interrupts."""
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(task.done()))
    queue = SerialQueue("test")
    operation = OperationWithFinalStep(CompletedOperation(None), lambda: signal.raise_signal(signal.SIGUSR1))
    task = queue.submit(lambda: operation, needs_thread=False)
    task.wait(None)
    queue.close()
    return [*seen, task.done()]


def test_a_signal_handler_may_ask_for_the_operation_that_it_interrupts(workers):
    assert workers(1)[0].run(interrupted_in_the_final_step) == [False, True]


def fail() -> NoReturn:
    raise ValueError("no space")


@pytest.mark.parametrize("first", ["wait", "done"])
def test_an_error_in_the_final_step_is_raised_by_every_wait(first):
    operation = OperationWithFinalStep(CompletedOperation(None), fail)
    if first == "done":
        assert operation.done()
    for _ in range(2):
        with pytest.raises(ValueError, match="no space"):
            operation.wait(None)
        assert operation.done()


def interrupt_the_final_step() -> tuple[bool, str]:
    """Returns whether a Work has succeeded after Ctrl-C in its final step, and the error of the next `wait`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    operation = OperationWithFinalStep(CompletedOperation(None), lambda: signal.raise_signal(signal.SIGINT))
    work = GroupWork("all_reduce", [], operation)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    with pytest.raises(ProcessGroupError) as caught:
        work.wait()
    return work.is_success(), str(caught.value)


def test_an_operation_interrupted_in_its_final_step_has_failed(workers):
    succeeded, error = workers(1)[0].run(interrupt_the_final_step)
    assert not succeeded
    assert "interrupted before it had written its outputs" in error


class _SlowPart:
    """A part that notes the timeout of each wait for it, during which the clock advances."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None) -> None:
        self.timeouts.append(timeout)
        begun = time.monotonic()
        while time.monotonic() == begun:
            pass

    def done(self) -> bool:
        return True

    def source(self) -> int:
        return 0

    def on_done(self, callback: object) -> None:
        raise NotImplementedError


def test_the_parts_of_an_operation_share_its_timeout():
    part = _SlowPart()
    CombinedOperation([part, part, part]).wait(60)
    first, second, third = part.timeouts
    assert 60 >= first > second > third
    CombinedOperation([part]).wait(None)
    assert part.timeouts[-1] is None
