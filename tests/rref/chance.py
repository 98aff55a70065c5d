"""Random choices that depend on bytes only."""

__all__ = ["Chance"]


class Chance:
    """Decisions that are read from bytes. After the last byte every decision is the harmless one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._data)

    def pick(self, count: int) -> int:
        """Returns a number from 0, the most harmless, to count - 1."""
        if not self:
            return 0
        self._next += 1
        return self._data[self._next - 1] % count

    def happens(self, in_hundred: int) -> bool:
        """Returns whether something harmful happens, which it does `in_hundred` times in a hundred."""
        return self.pick(100) >= 100 - in_hundred
