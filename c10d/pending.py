"""Operations under way that are put together from others; see Pending in engines.base."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from .engines.base import PendingOperation

__all__ = ["All", "Done", "Finishing"]


@final
class All:
    """Several operations as one, which is over when all are."""

    def __init__(self, parts: "Sequence[PendingOperation]") -> None:
        self._parts = parts

    def wait(self, timeout: float | None) -> None:
        """Waits for each, at most so long; raises the first error."""
        for part in self._parts:
            part.wait(timeout)

    def done(self) -> bool:
        """Are all over, well or badly?"""
        return all(part.done() for part in self._parts)

    def source(self) -> int:
        """That of the last."""
        return self._parts[-1].source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when all are over."""
        lock = threading.Lock()
        left = len(self._parts)

        def one_less() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = not left
            if last:
                callback()

        for part in self._parts:
            part.on_done(one_less)


@final
class Done:
    """An operation that is over, and well; `source` is the rank from which it received."""

    __slots__ = ("_source",)

    def __init__(self, source: int | None) -> None:
        self._source = source

    def wait(self, timeout: float | None) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """It is."""
        return True

    def source(self) -> int:
        """Of a receive: the rank that sent."""
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls it at once."""
        callback()


@final
class Finishing:
    """A Pending after which something is to be done before anybody sees that it is over."""

    def __init__(self, pending: "PendingOperation", finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> None:
        """Waits for both."""
        self._pending.wait(timeout)
        self._finish_once()

    def done(self) -> bool:
        """Is it over, well or badly? What is to be done after it is done first."""
        over = self._pending.done()
        if over:
            with suppress(Exception):  # which `wait` raises
                self.wait(None)
        return over

    def source(self) -> int:
        """Of a receive that is done: the rank that sent."""
        return self._pending.source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""
        self._pending.on_done(callback)

    def _finish_once(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
