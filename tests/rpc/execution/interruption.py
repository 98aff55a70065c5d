"""Ctrl-C for what a thread does, at each moment at which Python may run the handler of a signal.

Python runs the handlers of signals on the main thread, in calls of C functions and at the beginnings of functions
and loops. A trace function calls gradwire's in their place: at the first such moment, at the second, and so on.
"""

import dis
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from gradwire.rpc.execution.ctrl_c import ctrl_c
from gradwire.rpc.execution.poller import Poller, SocketWaiter

UNINTERRUPTED = 3
"""Runs in a row that end before the moment at which to interrupt: then there are no more of them."""

DELIVERED_WITHIN_S = 20.0
"""Seconds in which an interrupt that was noted is raised, on a busy machine."""


@contextmanager
def ctrl_c_within(seconds: float, chance: random.Random) -> Iterator[None]:
    """Sends Ctrl-C to this process, whose main thread is inside the block, at a random moment.

    Raises KeyboardInterrupt inside, or when it ends.
    """
    signal.signal(signal.SIGINT, ctrl_c.handle)  # as after `init_rpc`, if the parent process ignores it
    timer = threading.Timer(chance.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT))
    with ctrl_c.held_back():
        timer.start()
        yield
        time.sleep(DELIVERED_WITHIN_S)
        raise AssertionError("the interrupt is lost")


class Interruption:
    """Has Ctrl-C come at a moment of what the calling thread runs inside it: a context manager.

    KeyboardInterrupt is raised inside, or by the next line after it.

    Attributes:
        waits: whether the thread has waited for its socket.
        has_come: whether the moment has come.
    """

    def __init__(self, moment: int, tell: Callable[[], object] = lambda: None) -> None:
        """Interrupts nothing yet.

        Args:
            moment: which one, counted from 1.
            tell: called once the thread waits for its socket, or is not going to.
        """
        self.waits = False
        self.has_come = False
        self._left = moment
        self._tell = tell
        self._is_told = False
        self._has_returned = False

    def __enter__(self) -> Self:
        self._collects = gc.isenabled()
        gc.disable()  # else what other tests have left would be interrupted in its finalizers
        self._held_back = ctrl_c.held_back()
        self._held_back.__enter__()
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has such events only if it was set before settrace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_come:
            sys.settrace(self._before)
        if self._collects:
            gc.enable()
        self._tell_once()
        self._held_back.__exit__(None, None, None)

    def _tell_once(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell()

    def _come(self, frame: FrameType) -> None:
        self.has_come = True
        sys.settrace(None)
        traced: FrameType | None = frame
        while traced is not None:
            traced.f_trace = None
            traced = traced.f_back
        self._tell_once()
        ctrl_c.handle(signal.SIGINT, frame)

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code is SocketWaiter.wait.__code__:
            self.waits = True
            self._tell_once()
        operations = code.co_code
        is_moment = True

        def step(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
            nonlocal is_moment
            if event == "opcode":
                if is_moment and not self._has_returned:
                    self._left -= 1
                    if not self._left:
                        self._come(frame)
                        return None
                is_moment = dis.opname[operations[frame.f_lasti]].startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
                self._has_returned = False
            else:  # it returns, after which no handler runs before the next step of the caller
                self._has_returned = True
                if code is Poller.read_here.__code__:
                    self._tell_once()
            return step

        frame.f_trace = step  # before the next line, for Python 3.13
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return step
