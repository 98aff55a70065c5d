"""A wait that is interrupted loses neither its answer nor a segment, wherever a signal handler raises.

Python runs the handlers of signals on the main thread, after calls and at the beginnings of functions and loops. A
trace function raises in their place: at the first such moment of a wait, at the second, and so on to the last.
"""

import dis
import gc
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import pytest
import torch
from gradwire import rpc
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.execution.poller import Poller
from gradwire.rpc.execution.waiter import SocketWaiter

from tests.remote_functions import wait_until
from tests.rpc.segments import MIB, segments_in_use, used_bytes
from tests.rpc.test_waiting_threads import nothing_is_pending

ELEMENTS = MIB // 4

UNINTERRUPTED = 3
"""Waits in a row that end before the moment at which to interrupt: then there are no more of them."""

FINALIZERS = frozenset({"_release", "<lambda>"})
"""Functions in which Python drops what is raised."""


class InterruptError(BaseException):
    """Is raised as KeyboardInterrupt is."""


def echo_when_told(path: str, value: Any) -> Any:
    """Returns a value when a byte can be read from a pipe."""
    with open(path, "rb", buffering=0) as pipe:
        pipe.read(1)
    return value


class Interruption:
    """Raises InterruptError at a moment of what the calling thread runs inside it: a context manager.

    Attributes:
        waits: whether the thread has waited for its socket.
    """

    def __init__(self, moment: int, tell: Callable[[], object]) -> None:
        """Interrupts nothing yet.

        Args:
            moment: which one, counted from 1.
            tell: called once the thread waits for its socket, or is not going to.
        """
        self.waits = False
        self._left = moment
        self._tell = tell
        self._is_told = False

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has such events only if it was set before settrace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._tell_once()

    def _tell_once(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell()

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_name in FINALIZERS:
            return None
        if code is SocketWaiter.wait.__code__:
            self.waits = True
            self._tell_once()
        operations = code.co_code
        is_moment = True

        def step(frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
            nonlocal is_moment
            if event == "opcode":
                if is_moment:
                    self._left -= 1
                    if not self._left:
                        raise InterruptError
                is_moment = dis.opname[operations[frame.f_lasti]].startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            elif code is Poller.read_here.__code__:  # which returns
                self._tell_once()
            return step

        frame.f_trace = step  # before the next line, for Python 3.13
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return step


def interrupt_at_each_moment(path: str, value: torch.Tensor) -> int:
    """Has worker1 send a value back again and again, and interrupts each wait later; returns how often."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    moment, uninterrupted = 1, 0
    values: list[torch.Tensor] = []
    while uninterrupted < UNINTERRUPTED:
        future = rpc.rpc_async("worker1", echo_when_told, (path, value))
        interruption = Interruption(moment, lambda: os.write(pipe, b"x"))
        try:
            with interruption:
                values.append(future.wait_alone())
            if interruption.waits:  # else another thread has, with fewer moments: once more
                uninterrupted += 1
                moment += 1
        except InterruptError:
            uninterrupted = 0
            moment += 1
        values.append(future.wait())
        # In the same memory as the last one if that has been given back too early.
        values.append(rpc.rpc_sync("worker1", torch.neg, (value,)))
        assert torch.equal(values[-2], value)
        assert torch.equal(values[-1], -value)
        values.clear()
    os.close(pipe)
    return moment - uninterrupted


def nothing_is_left() -> bool:
    """Returns whether no call is in flight and no segment in use."""
    agent = current_agent()
    assert isinstance(agent, GrpcAgent)
    gc.collect()
    return nothing_is_pending() and not agent._calls.in_flight and segments_in_use() == (0, 0)


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc")], ids=lambda names: names[0])
@pytest.mark.parametrize("elements", [2, ELEMENTS])
def test_a_wait_may_be_interrupted_at_any_moment(workers, transports, elements, tmp_path):
    a, b = workers.rpc(2, transports=transports, busy_poll=0)
    interrupts = a.run(interrupt_at_each_moment, str(tmp_path / "pipe"), torch.arange(elements))
    assert interrupts > 80
    for worker in (a, b):
        worker.run(wait_until, nothing_is_left)
        assert worker.run(used_bytes) <= 4 * 8 * ELEMENTS
