"""Bounds what another worker announces and does not send: memory is allocated before a payload arrives."""

import threading
from typing import final

from ...errors import LimitReachedError

__all__ = ["MAX_ANNOUNCED", "AnnouncedPayloads"]

MAX_ANNOUNCED = 1 << 20
"""Payloads that another worker may have announced and not sent."""

MAX_SUM_FACTOR = 4
"""Their bytes are those of the largest payload at most, times this."""


@final
class AnnouncedPayloads:
    """Counts the payloads of one other worker that are to arrive. Safe to use from any thread."""

    def __init__(self, max_payload_bytes: int) -> None:
        self._max_bytes = MAX_SUM_FACTOR * max_payload_bytes
        self._lock = threading.Lock()
        self.count = 0
        """Those that have not arrived."""
        self.nbytes = 0
        """Their bytes."""

    def begin(self, count: int, nbytes: int) -> None:
        """Counts the payloads that an envelope announces. Raises LimitReachedError if that would be too much."""
        with self._lock:
            limit = ""
            if self.nbytes + nbytes > self._max_bytes:
                limit = f"max_payload_bytes*{MAX_SUM_FACTOR}={self._max_bytes}"
            elif self.count + count > MAX_ANNOUNCED:
                limit = f"MAX_ANNOUNCED={MAX_ANNOUNCED}"
            if limit:
                raise LimitReachedError(
                    f"payloads of {nbytes} bytes are refused: {self.count} of {self.nbytes} bytes are announced "
                    f"and have not arrived, of {MAX_ANNOUNCED} and {self._max_bytes} bytes ({MAX_SUM_FACTOR} "
                    "times max_payload_bytes) at most",
                    limit,
                )
            self.count += count
            self.nbytes += nbytes

    def end(self, count: int, nbytes: int) -> None:
        """Counts payloads that have arrived, or that will not."""
        with self._lock:
            self.count -= count
            self.nbytes -= nbytes
