"""Interrupts what a thread does, at each moment at which the handler of a signal may raise.

Python runs the handlers of signals on the main thread, in calls of C functions and at the beginnings of functions
and loops. A trace function raises in their place: at the first such moment, at the second, and so on to the last.
"""

import dis
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from gradwire.rpc.execution.poller import Poller
from gradwire.rpc.execution.waiter import SocketWaiter

UNINTERRUPTED = 3
"""Runs in a row that end before the moment at which to interrupt: then there are no more of them."""

FINALIZERS = frozenset({"_end", "_on_lease_end", "_release", "<lambda>"})
"""Functions in which Python drops what is raised. They are not interrupted themselves, but what they call is."""


class InterruptError(BaseException):
    """Is raised as KeyboardInterrupt is."""


class Interruption:
    """Raises InterruptError at a moment of what the calling thread runs inside it: a context manager.

    Attributes:
        waits: whether the thread has waited for its socket.
        has_raised: whether the moment has come.
    """

    def __init__(
        self,
        moment: int,
        tell: Callable[[], object] = lambda: None,
        finalizers: frozenset[str] = FINALIZERS,
        error: type[BaseException] = InterruptError,
    ) -> None:
        """Interrupts nothing yet.

        Args:
            moment: which one, counted from 1.
            tell: called once the thread waits for its socket, or is not going to.
            finalizers: see FINALIZERS.
            error: what it raises.
        """
        self.waits = False
        self.has_raised = False
        self._left = moment
        self._tell = tell
        self._finalizers = finalizers
        self._error = error
        self._is_told = False
        self._has_returned = False

    def __enter__(self) -> Self:
        self._collects = gc.isenabled()
        gc.disable()  # else what other tests have left would be interrupted in its finalizers
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has such events only if it was set before settrace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()
        self._tell_once()

    def _tell_once(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell()

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_name in self._finalizers:
            return None
        if code is SocketWaiter.wait.__code__:
            self.waits = True
            self._tell_once()
        operations = code.co_code
        is_moment = True

        def step(frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
            nonlocal is_moment
            if event == "opcode":
                if is_moment and not self._has_returned:
                    self._left -= 1
                    if not self._left:
                        self.has_raised = True
                        raise self._error
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
