"""What the executor has to do so that what is queued gets a thread."""

from enum import Enum, auto

__all__ = ["Need"]


class Need(Enum):
    """What has to be started, or woken, for what is queued."""

    NOTHING = auto()
    WAKE_UP = auto()
    THREAD = auto()
    STALL_DETECTOR = auto()
