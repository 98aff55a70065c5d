"""Waiting for other processes, with a word about it in the log when it takes long."""

import logging
import time
from collections.abc import Callable

__all__ = ["FIRST_WARNING_SECONDS", "wait_with_warnings"]

FIRST_WARNING_SECONDS = 10.0
"""How long a wait may take until a warning says what it is for. Each further interval is twice as long."""

SHORTEST_SECONDS = 0.001
"""Stores of torch take less for no limit at all."""

log = logging.getLogger(__name__)


def wait_with_warnings(wait: Callable[[float], bool], seconds: float, describe: Callable[[], str]) -> bool:
    """Waits, and says so in the log, at level WARNING, after 10, 30, 70, 150 seconds and so on.

    Without any configuration of logging, Python prints warnings on stderr.

    Args:
        wait: waits for at most so many seconds; returns whether that which it waits for has come.
        seconds: how long to wait in all.
        describe: who waits for what, as in "rank 0 waits for rank 1". Called when a warning is due.

    Returns:
        Whether it has come in time.
    """
    began = time.monotonic()
    interval = FIRST_WARNING_SECONDS
    while True:
        left = began + seconds - time.monotonic()
        if wait(max(min(interval, left), SHORTEST_SECONDS)):
            return True
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if interval < left:
            interval *= 2
            log.warning(
                "%s; since %.0f s, and for %.0f s more at most (next word in %.0f s)",
                describe(),
                waited,
                seconds - waited,
                min(interval, seconds - waited),
            )
