"""How a worker ended, as it says in its goodbye or as others conclude from the end of its connection."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import current_process, parent_process
from types import CodeType
from typing import Self, final

from ...errors import LossCause, WorkerLostError
from ...net.security import printable
from ...proto.v1 import agent_pb2
from ..execution.kept_errors import text_of

__all__ = ["PROCESS_ENDED", "SHUT_DOWN", "WorkerEnd", "last_uncaught_error", "noting_error_of_child"]

MAX_REASON = 500
"""Characters of a reason at most: it may come from another worker, and goes into log lines."""

TOOL_IDS = (4, 3)
"""Numbers of `sys.monitoring` that it reserves for nobody, in the order in which they are tried."""

_errors_of_child: list[BaseException] = []
"""What the function of this process has raised: one error at most."""

_KINDS = {
    LossCause.SHUTDOWN: agent_pb2.Departure.SHUTDOWN,
    LossCause.EXCEPTION: agent_pb2.Departure.EXCEPTION,
    LossCause.EXIT: agent_pb2.Departure.EXIT,
}
"""The causes that a worker can tell in its goodbye."""


@final
@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended.

    cause: the kind of end.
    reason: the end in words that go on with "worker 'a' is lost:", such as "it has shut down". One line of bounded
        length, whatever is given.
    """

    cause: LossCause
    reason: str

    def __post_init__(self) -> None:
        words = self.reason[: 4 * MAX_REASON].split()  # a peer may send megabytes
        object.__setattr__(self, "reason", printable(" ".join(words), MAX_REASON))

    @property
    def orderly(self) -> bool:
        """Whether the worker left on purpose."""
        return self.cause is LossCause.SHUTDOWN

    def as_error(self, worker: str) -> WorkerLostError:
        """Returns the error of a call to the worker with this name."""
        return WorkerLostError(worker, self.reason, self.cause)

    @classmethod
    def by_error(cls, error: BaseException) -> Self:
        """Returns the end of a program by an exception that was not caught."""
        if isinstance(error, SystemExit):
            return cls._by_exit(error)
        text = text_of(error)
        return cls(LossCause.EXCEPTION, f"it ended by {type(error).__qualname__}{': ' * bool(text)}{text}")

    @classmethod
    def _by_exit(cls, error: SystemExit) -> Self:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        # Launchers catch what a function raises, report it, and exit with a status.
        cause = error.__cause__ or error.__context__
        if status and isinstance(cause, Exception):
            return cls.by_error(cause)
        return cls(LossCause.EXIT, f"it exited{f' with status {status}' * bool(status)} without calling shutdown")

    @classmethod
    def of_this_process(cls, stale: BaseException | None) -> Self:
        """Returns how this process ends; called while it ends.

        `stale` is the result of `last_uncaught_error` while the program still ran; that error did not end it.
        """
        # Until Python 3.12, children of multiprocessing end while their exception is handled; a script after that.
        error = sys.exception() or next(iter(_errors_of_child), None)
        last = last_uncaught_error()
        if error is None and last is not stale and not hasattr(sys, "ps1"):  # in a prompt, errors end nothing
            error = last
        return cls.by_error(error if error is not None else SystemExit())

    @classmethod
    def from_proto(cls, departure: agent_pb2.Departure) -> "WorkerEnd":
        """Returns the end that a goodbye tells."""
        cause = next((cause for cause, kind in _KINDS.items() if kind == departure.kind), LossCause.EXIT)
        if cause is LossCause.SHUTDOWN:
            return SHUT_DOWN
        return cls(cause, departure.reason.strip() or "it ended without calling shutdown")

    def to_proto(self) -> agent_pb2.Departure:
        """Returns the message of a goodbye."""
        return agent_pb2.Departure(kind=_KINDS[self.cause], reason=self.reason)


def last_uncaught_error() -> BaseException | None:
    """Returns the uncaught exception that Python printed last, which it does before the hooks of atexit run."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


@contextmanager
def noting_error_of_child() -> Iterator[None]:
    """Context manager: notes what the function of this process raises, if that is a child of multiprocessing.

    Its exit handlers run while the exception is handled, and find it by `sys.exception()`. From Python 3.13 on it
    is gone by then.
    """
    if sys.version_info >= (3, 13) and parent_process() is not None:
        run: CodeType | None = getattr(type(current_process()).run, "__code__", None)
        tool = next((number for number in TOOL_IDS if sys.monitoring.get_tool(number) is None), None)
        if run is not None and tool is not None:

            def on_unwind(code: CodeType, _offset: int, error: BaseException) -> None:
                if code is run:
                    _errors_of_child[:] = [error]

            sys.monitoring.use_tool_id(tool, "gradwire")
            sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, on_unwind)
            sys.monitoring.set_events(tool, sys.monitoring.events.PY_UNWIND)
            try:
                yield
            finally:
                sys.monitoring.set_events(tool, sys.monitoring.events.NO_EVENTS)
                sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, None)
                sys.monitoring.free_tool_id(tool)
            return
    yield


SHUT_DOWN = WorkerEnd(LossCause.SHUTDOWN, "it has shut down")
"""The end of a worker that leaves on purpose."""

PROCESS_ENDED = WorkerEnd(LossCause.DISCONNECTED, "its process has ended without a goodbye")
"""The end of a worker that was killed, or has crashed: nobody listens at its address any more."""
