"""Free TCP ports for tests that have to know a port before anybody listens on it.

A port that the system chooses for a probe may be chosen again, for another test, as soon as the probe is closed.
These are outside the range from which the system chooses, and each process of a test run has its own.
"""

import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator

__all__ = ["free_port"]

FIRST_PORT = 20_000
PORTS_PER_PROCESS = 1_000


@functools.cache
def _offsets(_process_id: int) -> Iterator[int]:
    """Returns the offsets of a process. Its parent has others, also if that had loaded this module."""
    return itertools.count(random.SystemRandom().randrange(PORTS_PER_PROCESS))


def free_port() -> int:
    """Returns a TCP port on which nobody listens; no two calls in a process return the same port soon."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    while True:
        port = FIRST_PORT + PORTS_PER_PROCESS * process + next(_offsets(os.getpid())) % PORTS_PER_PROCESS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
