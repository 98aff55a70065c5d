"""Ctrl-C where it does no harm: it never splits a step of gradwire.

Python raises KeyboardInterrupt between any two steps of the main thread. If that were in the middle of a message,
or of a list that other threads use, bytes would be lost, and locks would stay held. So while an agent runs, a
handler of gradwire takes the place of Python's. It looks at the frames that the signal has interrupted, from the
innermost one outwards, and the first of these that decides tells what happens:

- Code of the program, or of a library: KeyboardInterrupt is raised at once. So it is where gradwire has called the
  program: in a callback, in a remote function, in the pickling of an object.
- A function of gradwire that waits (`interruptible`), and what it has called: the same.
- Any other function of gradwire: the interrupt is noted, and raised as soon as gradwire waits, or returns to the
  program. The latter is noticed by a trace function, which is set for that.
- The standard library, and the libraries that gradwire calls, decide nothing; who calls them does. Nor does c10d:
  its process groups and stores undo by themselves what an interrupt splits.

That costs nothing on the way of a message. A second Ctrl-C is raised wherever it comes, if the first one has not
got through for HANG_TIMEOUT_S: the program hangs. (trio/_core/_ki.py looks at frames in the same way; it explains
what else was tried.)

A signal for which the program, or an event loop, has a handler is not concerned. What such a handler raises is
raised between any two steps, and may break connections, which heal.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar, final

__all__ = ["ctrl_c", "interruptible", "wait_interruptibly"]

HANG_TIMEOUT_S = 1.0
"""Seconds after which a further Ctrl-C is raised at once. Terminals and launchers may send two together."""

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]
_C10D = f"{_PACKAGE}.c10d"
_UNDECIDED = sys.stdlib_module_names | {"cloudpickle", "cupy", "google", "grpc", "numpy", "torch"}

_NAMEDTUPLE = "namedtuple_"
"""How the standard library begins the names of modules that it makes for the constructors of named tuples."""

_interruptible: set[CodeType] = set()


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: Ctrl-C may interrupt this function of gradwire at any step. It calls `check` first, and waits."""
    _interruptible.add(function.__code__)
    return function


@interruptible
def wait_interruptibly(wait: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function that waits, one of the standard library; Ctrl-C may interrupt it. Returns its result."""
    ctrl_c.check()
    return wait(*args, **kwargs)


def _may_raise(frame: FrameType | None) -> bool:
    """Returns whether an interrupt may be raised in code that a signal has interrupted."""
    is_ours = False
    while frame is not None:
        if frame.f_code in _interruptible:
            return True
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package == _PACKAGE:
            is_ours = is_ours or not module.startswith(_C10D)
        elif package not in _UNDECIDED and not package.startswith(_NAMEDTUPLE):
            return not is_ours
        frame = frame.f_back
    return not is_ours


@final
class _CtrlC:
    """What becomes of SIGINT in this process. Its state is the process's, as the handler of a signal is."""

    def __init__(self) -> None:
        self._users = 0
        self.noted_at: float | None = None
        """When an interrupt was noted that has not been raised, by the monotonic clock."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Context manager in which Ctrl-C does not split steps of gradwire.

        Has no effect where the main thread does not enter it, or where SIGINT has another handler than Python's.
        """
        self._users += 1
        if _is_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)
        try:
            yield
        finally:
            self._users -= 1
            if not self._users and _is_main() and signal.getsignal(signal.SIGINT) == self.handle:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def handle(self, _signal: int, frame: FrameType | None) -> None:
        """Handles SIGINT, which has interrupted a frame. Raises KeyboardInterrupt, or notes it for later."""
        now = time.monotonic()
        is_overdue = self.noted_at is not None and now > self.noted_at + HANG_TIMEOUT_S
        if is_overdue or not self._users or _may_raise(frame):
            self.noted_at = None
            raise KeyboardInterrupt
        if self.noted_at is None:
            self.noted_at = now
            self._trace_program(frame)

    @interruptible  # else one that comes right after the look would wait with it
    def check(self) -> None:
        """Raises an interrupt that was noted, if this is the main thread."""
        if self.noted_at is not None and _is_main():
            self.noted_at = None
            raise KeyboardInterrupt

    def _trace_program(self, frame: FrameType | None) -> None:
        """Has an interrupt that was noted raised in the next step of the program, unless a debugger traces it."""
        if sys.gettrace() is not None:
            return
        while frame is not None:
            if _may_raise(frame):
                frame.f_trace = self._on_step
            frame = frame.f_back
        sys.settrace(_trace_nothing)

    def _on_step(self, frame: FrameType, _event: str, _arg: object) -> None:
        """Is called before a line of the program runs, and when a function of it ends."""
        sys.settrace(None)
        frame.f_trace = None
        self.check()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _trace_nothing(_frame: FrameType, _event: str, _arg: object) -> None:
    """Traces no function that is called from now on."""


ctrl_c = _CtrlC()
