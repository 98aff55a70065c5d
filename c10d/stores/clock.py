"""Compares the clock of this host with that of a store's host."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ...net.security import Credentials
from .remote import RemoteServer

__all__ = ["ClockOffset", "clock_offset", "offset_by"]

ROUNDS = 5
"""Times that the clock is read: the quickest answer says most."""


@final
@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the clock of another host is ahead.

    seconds: by how much; negative if it is behind.
    error: seconds by which this may be wrong: half of the round trip.
    """

    seconds: float
    error: float


def clock_offset(host: str, port: int, timeout: float = 5.0) -> ClockOffset:
    """Returns how far the clock of the host of a gradwire store is ahead of this host's.

    The credentials are those in the environment. Each answer may take `timeout` seconds.

    Raises:
        StoreError: the store does not answer, refuses this process, or is of a release that has no clock.
        CredentialsError: the credentials in the environment are not valid.
    """
    credentials = Credentials.from_environment()
    server = RemoteServer(host, port, credentials.identity() if credentials is not None else None)
    try:
        server.clock(timeout)  # which also connects
        return offset_by(lambda: server.clock(timeout))
    finally:
        server.close()


def offset_by(
    read: Callable[[], float], now: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic
) -> ClockOffset:
    """Returns how far another clock is ahead, which `read` asks for its time, in seconds."""
    best = ClockOffset(0.0, math.inf)
    for _ in range(ROUNDS):
        began, before = ticks(), now()
        theirs = read()
        error = (ticks() - began) / 2
        if error < best.error:
            best = ClockOffset(theirs - (before + error), error)
    return best
