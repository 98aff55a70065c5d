"""How a worker ended: what it says in its goodbye, or what others conclude from the end of its connection."""

import sys
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self, final

from ...proto.v1 import agent_pb2
from ..execution.kept_errors import text_of

__all__ = ["SHUT_DOWN", "EndKind", "WorkerEnd", "last_uncaught_error"]

MAX_REASON = 500
"""Characters of a reason; a longer one is cut. It may come from another worker, and goes into logs."""


class EndKind(Enum):
    """What kinds of ends there are."""

    SHUTDOWN = auto()
    """It called `shutdown`."""
    EXCEPTION = auto()
    """An exception that nobody caught ended its program."""
    EXIT = auto()
    """Its program ended without `shutdown`."""
    DISCONNECTED = auto()
    """Its connection ended without a goodbye, or cannot be used: it was killed, say, or cut off."""
    UNREACHABLE = auto()
    """It accepts no connection, and there was none before: it may have ended in any way."""


_KINDS = {
    EndKind.SHUTDOWN: agent_pb2.Departure.SHUTDOWN,
    EndKind.EXCEPTION: agent_pb2.Departure.EXCEPTION,
    EndKind.EXIT: agent_pb2.Departure.EXIT,
}
"""What can be said in a goodbye."""


@final
@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended.

    kind: in one word.
    reason: in a sentence that goes on from the worker's name: "worker 'a' is lost: it has shut down".
    """

    kind: EndKind
    reason: str

    @property
    def orderly(self) -> bool:
        """Whether it left on purpose."""
        return self.kind is EndKind.SHUTDOWN

    @classmethod
    def by_error(cls, error: BaseException) -> Self:
        """The end of a program that nobody kept from ending by this exception."""
        if isinstance(error, SystemExit):
            return cls._by_exit(error)
        text = text_of(error)
        return cls(EndKind.EXCEPTION, _clean(f"it ended by {type(error).__qualname__}{': ' * bool(text)}{text}"))

    @classmethod
    def _by_exit(cls, error: SystemExit) -> Self:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        # Launchers catch what a function raises, report it, and exit with a status.
        cause = error.__cause__ or error.__context__
        if status and isinstance(cause, Exception):
            return cls.by_error(cause)
        return cls(EndKind.EXIT, f"it exited{f' with status {status}' * bool(status)} without calling shutdown")

    @classmethod
    def of_this_process(cls, stale: BaseException | None) -> Self:
        """How this process ends, asked while it does.

        Args:
            stale: what `last_uncaught_error` told while the program still ran; such an error did not end it.
        """
        # The children of multiprocessing end while their exception is being handled; a script after that.
        error = sys.exception()
        last = last_uncaught_error()
        if error is None and last is not stale and not hasattr(sys, "ps1"):  # in a prompt, errors end nothing
            error = last
        return cls.by_error(error if error is not None else SystemExit())

    @classmethod
    def from_proto(cls, departure: agent_pb2.Departure) -> Self:
        """What a goodbye says."""
        kind = next((kind for kind, value in _KINDS.items() if value == departure.kind), EndKind.EXIT)
        if kind is EndKind.SHUTDOWN:
            return cls(kind, SHUT_DOWN.reason)
        return cls(kind, _clean(departure.reason) or "it ended without calling shutdown")

    def to_proto(self) -> agent_pb2.Departure:
        """What to say in a goodbye."""
        return agent_pb2.Departure(kind=_KINDS[self.kind], reason=self.reason)


def last_uncaught_error() -> BaseException | None:
    """The exception that Python printed last because nobody caught it, which is before the hooks of atexit run."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _clean(text: str) -> str:
    """One printable line of bounded length."""
    text = text[: 4 * MAX_REASON]  # a peer may send megabytes
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


SHUT_DOWN = WorkerEnd(EndKind.SHUTDOWN, "it has shut down")
"""Of a worker that leaves on purpose."""
