"""The buffers of segments that are in use in this process."""

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import final

from ....net.inheritance import at_fork

__all__ = ["BuffersInUse", "Memory"]

Memory = ctypes.Array[ctypes.c_char]
"""A buffer of the bytes of a segment."""


@final
class BuffersInUse:
    """Which segments have bytes that something in this process refers to, by way of a buffer."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        """Has none yet. `on_end` takes the number of a segment that nothing refers to any more.

        Finalizers call it, on any thread: it must take no lock.
        """
        self._on_end = on_end
        self._buffers: dict[int, weakref.ref[Memory]] = {}
        """By the number of their segment."""
        self._pinned: set[int] = set()
        """The numbers of the segments that a forked child may still use."""
        _made_here.add(self)

    def __contains__(self, number: int) -> bool:
        return self.buffer(number) is not None

    def __len__(self) -> int:
        return len(self._buffers)

    def begin(self, number: int, buffer: Memory) -> None:
        """Has a segment in use until nothing refers to this buffer of its bytes any more."""
        self._buffers[number] = weakref.ref(buffer, partial(self._end, number))

    def buffer(self, number: int) -> Memory | None:
        """Returns the bytes of a segment that are in use; None if they are not."""
        found = self._buffers.get(number)
        return None if found is None else found()

    def is_pinned(self, number: int) -> bool:
        """Returns whether a forked child may use a segment: no other bytes may be put there."""
        return number in self._pinned

    def pin(self) -> None:
        """Has a child that is about to be forked have the segments that are in use, as they are."""
        for number, found in list(self._buffers.items()):
            if (buffer := found()) is not None:
                buffer.mapping.share_with_children()  # type: ignore[attr-defined]
                self._pinned.add(number)

    def discard(self, number: int) -> None:
        """Discards what is known of a segment that is not used again."""
        self._pinned.discard(number)

    def _end(self, number: int, buffer: "weakref.ref[Memory]") -> None:
        if self._buffers.get(number) is buffer:  # else the segment is in use again
            self._buffers.pop(number, None)
        self._on_end(number)


_made_here: "weakref.WeakSet[BuffersInUse]" = weakref.WeakSet()
"""Of all agents of this process, for a fork."""


def _pin_before_fork() -> None:
    for each in list(_made_here):
        each.pin()


at_fork(before=_pin_before_fork)
