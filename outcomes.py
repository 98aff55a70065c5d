"""What became of a call that has failed."""

from enum import Enum, auto

__all__ = ["Outcome"]


class Outcome(Enum):
    """What became of a call that has failed: whether its function has run."""

    NOT_SENT = auto()
    """It has not run and will not: nothing of it has left this process, or the other worker says that it never
    began. Calling again is safe."""
    UNKNOWN = auto()
    """It may have run, may be running, or may still run."""
    RAN = auto()
    """It has begun to run. What it did before the failure is done."""

    @property
    def text(self) -> str:
        """The same in words, for the texts of errors."""
        return _TEXTS[self]


_TEXTS = {
    Outcome.NOT_SENT: "not sent: it has not run",
    Outcome.UNKNOWN: "outcome unknown: it may have run",
    Outcome.RAN: "it has run",
}
