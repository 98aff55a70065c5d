"""Unmaps segments where that holds up nobody."""

from typing import Any, final

from ...execution.executor import Executor

__all__ = ["Unmapper"]


@final
class Unmapper:
    """Unmaps segments on threads of the executor: a GiB takes 100 ms and more, in the kernel.

    Without it, this would be done by the event loop or by the thread that reads a socket.
    """

    def __init__(self, executor: Executor) -> None:
        """Args: executor: its threads unmap."""
        self._executor = executor

    def drop(self, dropped: list[Any]) -> None:
        """Unmaps segments, except those whose bytes are in use: they go with the last reference to their bytes.

        Args:
            dropped: segments and mappings, to which the caller has no other reference. The list is emptied.
        """
        if dropped:
            self._executor.submit(self._unmap, dropped)

    def _unmap(self, dropped: list[Any]) -> None:
        with self._executor.blocking():  # another thread takes the place of this one
            dropped.clear()
