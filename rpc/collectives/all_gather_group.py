"""One worker's part in a process group through which workers gather."""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

import torch

from ...c10d.engines.base import Engine
from ...c10d.group_membership import LEAVE_TIMEOUT_S, GroupMembership, GroupSpec
from ...errors import GroupAbortedError, ProcessGroupError

__all__ = ["AllGatherGroup"]

HEADER_BLOCK_BYTES = 4096
"""Bytes that every member shows the others first: its header, and its value if that fits."""

HEADER = struct.Struct("<qq")
"""The number of the round, and the bytes of the value: NONE if there is none."""

NO_VALUE = -1

INLINE_CAPACITY_BYTES = HEADER_BLOCK_BYTES - HEADER.size

Flat = bytes | bytearray
"""A value as flat.py makes it."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


@final
class AllGatherGroup:
    """Comes together on a thread of its own; gathers on those of its callers, one at a time.

    The first error ends it, on this worker and thereby on all.
    """

    def __init__(
        self,
        generation: int,
        spec: GroupSpec,
        max_bytes: int,
        failed: Callable[["AllGatherGroup", Exception], None],
    ) -> None:
        """A group that has not begun to come together.

        Args:
            generation: which it is of its workers'.
            spec: who and where.
            max_bytes: of a value that is accepted.
            failed: called on the group's thread if it does not come together.
        """
        self.generation = generation
        self.members = tuple(spec.members)
        self._name = spec.name
        self._membership = GroupMembership(spec)
        self._most_bytes = max_bytes
        self._failed = failed
        self._engine: Engine | None = None
        self._using = threading.Lock()
        size = len(self.members)
        self._mine = torch.zeros(HEADER_BLOCK_BYTES, dtype=torch.uint8)
        self._all = [torch.zeros(HEADER_BLOCK_BYTES, dtype=torch.uint8) for _ in range(size)]
        self._mine_bytes: memoryview = self._mine.numpy().data
        self._all_bytes: Sequence[memoryview] = [tensor.numpy().data for tensor in self._all]
        self._thread = threading.Thread(target=self._form, name=f"gradwire-{spec.name}", daemon=True)

    def start(self) -> None:
        """Begins to meet the others."""
        self._thread.start()

    @property
    def formed(self) -> bool:
        """Has it come together?"""
        return self._engine is not None and self._membership.error is None

    @property
    def busy(self) -> bool:
        """Does it gather?"""
        return self._using.locked()

    def all_gather(self, number: int, value: memoryview | None, seconds: float) -> dict[int, Flat] | None:
        """The values of all members in this round, by id; None if some member has none, and so shall nobody.

        Raises:
            ProcessGroupError: the group has ended, or not everybody came within so many seconds. It may have gone
                well for others.
        """
        try:
            with self._using:
                if self._engine is None or self._membership.error is not None:
                    raise self._membership.error or GroupAbortedError(f"{self._name} has not come together")
                return self._gather(self._engine, number, value, time.monotonic() + seconds)
        except BaseException:
            self._membership.leave()
            raise
        finally:
            if self._membership.error is not None:
                self._release()

    def _gather(
        self, engine: Engine, number: int, value: memoryview | None, deadline: float
    ) -> dict[int, Flat] | None:
        size = NO_VALUE if value is None else len(value)
        HEADER.pack_into(self._mine_bytes, 0, number, size)
        if value is not None and size <= INLINE_CAPACITY_BYTES:
            self._mine_bytes[HEADER.size : HEADER.size + size] = value
        _exchange(engine, self._all, self._mine, deadline)
        sizes = []
        for member, shown in zip(self.members, self._all_bytes, strict=True):
            theirs, size = HEADER.unpack_from(shown)
            if theirs != number:
                raise ProcessGroupError(
                    f"{self._name}: worker {member} is in round {theirs}, this one in {number}"
                )
            sizes.append(size)
        if NO_VALUE in sizes:
            return None
        if max(sizes) > self._most_bytes:
            raise ProcessGroupError(f"{self._name}: a value of {max(sizes)} bytes is refused")
        values: list[Flat] = [
            bytearray(size) if size > INLINE_CAPACITY_BYTES else bytes(shown[HEADER.size : HEADER.size + size])
            for shown, size in zip(self._all_bytes, sizes, strict=True)
        ]
        if max(sizes) > INLINE_CAPACITY_BYTES:
            assert value is not None
            _exchange(engine, [_large(each) for each in values], _large(value), deadline)
        return dict(zip(self.members, values, strict=True))

    def end(self) -> None:
        """Ends it now; who gathers fails. Called from any thread, and does not wait."""
        self._membership.leave()
        self._membership.cancel_join()
        self._release()

    def close(self) -> None:
        """Ends it now, and waits for its thread."""
        self.end()
        self._thread.join(LEAVE_TIMEOUT_S)

    def _form(self) -> None:
        try:
            engine = self._membership.join()
        except Exception as error:
            problem = self._membership.error or error.with_traceback(None)
            self._membership.release(problem)
            self._failed(self, problem)
        else:
            self._engine = engine
            if self._membership.error is not None:
                self._release()

    def _release(self) -> None:
        """Gives back what the group that has ended holds, unless somebody uses it: who does so does this next."""
        if self._using.acquire(blocking=False):
            try:
                self._engine = None
                self._membership.release()
            finally:
                self._using.release()


def _large(value: Flat | memoryview) -> torch.Tensor:
    """What moves of a value after the first exchange."""
    return torch.frombuffer(value, dtype=torch.uint8) if len(value) > INLINE_CAPACITY_BYTES else _NOTHING


def _exchange(engine: Engine, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
    pending = engine.all_gather(outputs, tensor, max(0.0, deadline - time.monotonic()))
    if pending is not None:
        pending.wait(None)
