"""Bounds what other workers announce and do not send: memory is allocated before the bytes of a payload arrive."""

import threading
from collections import Counter
from typing import final

from ...errors import LimitReachedError

__all__ = ["MAX_ANNOUNCED", "AnnouncedPayloads", "TooMuchAnnouncedError"]

MAX_ANNOUNCED = 1 << 20
"""Payloads that one other worker may have announced and not sent."""

MAX_SUM_FACTOR = 4
"""Their bytes are those of the largest payload at most, times this."""


class TooMuchAnnouncedError(LimitReachedError):
    """A worker has announced too much that it has not sent. A ValueError, because the message is rejected."""


@final
class AnnouncedPayloads:
    """Counts the payloads that are to arrive, by sender. Safe to use from any thread."""

    def __init__(self, max_payload_bytes: int) -> None:
        """Args: max_payload_bytes: the size of the largest payload that is accepted."""
        self._max_bytes = MAX_SUM_FACTOR * max_payload_bytes
        self._lock = threading.Lock()
        self._counts: Counter[int] = Counter()
        self._nbytes: Counter[int] = Counter()

    def begin(self, peer: int, count: int, nbytes: int) -> None:
        """Counts the payloads that an envelope announces.

        Args:
            peer: the sender.
            count: how many there are.
            nbytes: of all of them.

        Raises:
            TooMuchAnnouncedError: that would be too much; nothing is counted.
        """
        if not count:
            return
        with self._lock:
            limit = ""
            if self._nbytes[peer] + nbytes > self._max_bytes:
                limit = f"max_payload_bytes*{MAX_SUM_FACTOR}={self._max_bytes}"
            elif self._counts[peer] + count > MAX_ANNOUNCED:
                limit = f"MAX_ANNOUNCED={MAX_ANNOUNCED}"
            if limit:
                raise TooMuchAnnouncedError(
                    f"payloads of {nbytes} bytes are refused: {self._counts[peer]} of {self._nbytes[peer]} bytes "
                    f"are announced and have not arrived, of {MAX_ANNOUNCED} and {self._max_bytes} bytes "
                    f"({MAX_SUM_FACTOR} times max_payload_bytes) at most",
                    limit,
                )
            self._counts[peer] += count
            self._nbytes[peer] += nbytes

    def end(self, peer: int, count: int, nbytes: int) -> None:
        """Counts payloads that have arrived, or that will not."""
        if not count:
            return
        with self._lock:
            self._counts[peer] -= count
            self._nbytes[peer] -= nbytes

    def pending(self, peer: int) -> tuple[int, int]:
        """Returns how many payloads of a worker have not arrived, and their bytes."""
        with self._lock:
            return self._counts[peer], self._nbytes[peer]
