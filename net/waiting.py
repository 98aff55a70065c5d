"""Waiting for other processes, with warnings in the log while the wait takes long."""

import logging
import time
from collections.abc import Callable

__all__ = ["FIRST_WARNING_S", "wait_with_warnings"]

FIRST_WARNING_S = 10.0
"""Seconds of waiting after which the first warning is logged. Each further interval is twice as long."""

_MIN_WAIT_S = 0.001
"""torch's stores take a shorter timeout for none at all."""

log = logging.getLogger(__name__)


def wait_with_warnings(wait: Callable[[float], bool], seconds: float, describe: Callable[[], str]) -> bool:
    """Waits, and logs a warning after 10, 30, 70, 150 seconds and so on.

    Args:
        wait: waits for at most the given number of seconds; returns whether the wait succeeded.
        seconds: how long to wait in all.
        describe: returns who waits for what, as in "rank 0 waits for rank 1". Called when a warning is due.

    Returns:
        Whether the wait succeeded in time.
    """
    began = time.monotonic()
    interval = FIRST_WARNING_S
    while True:
        remaining = began + seconds - time.monotonic()
        if wait(max(min(interval, remaining), _MIN_WAIT_S)):
            return True
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if interval < remaining:
            interval *= 2
            log.warning(
                "%s; waited %.0f s, timeout in %.0f s (next warning in %.0f s)",
                describe(),
                waited,
                seconds - waited,
                min(interval, seconds - waited),
            )
