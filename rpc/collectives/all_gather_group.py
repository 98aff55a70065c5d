"""One worker's part in a process group through which workers run all_gather.

A round is one exchange of blocks of fixed size, which hold header and value. Only if some value does not fit into
its block, a second exchange carries those values, whose sizes all members know from the headers.
"""

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
"""Bytes that every member sends in the first exchange: its header, and its value if that fits."""

HEADER = struct.Struct("<qq")
"""The number of the round and the bytes of the value, as signed 64-bit little-endian integers."""

NO_VALUE = -1
"""In place of the bytes of the value: the value can only travel in a message."""

INLINE_CAPACITY_BYTES = HEADER_BLOCK_BYTES - HEADER.size
"""Bytes of a value that fits into the block of the first exchange."""

FlatValue = bytes | bytearray
"""A value as `ValueCodec.flatten` encodes it."""

_EMPTY = torch.empty(0, dtype=torch.uint8)


@final
class AllGatherGroup:
    """A process group that forms on a thread of its own and runs on those of its callers, one round at a time.

    The first error ends the group on this worker, and thereby on all.
    """

    def __init__(
        self,
        generation: int,
        spec: GroupSpec,
        max_value_bytes: int,
        on_unformable: Callable[["AllGatherGroup", Exception], None],
    ) -> None:
        """Makes a group that does not form before `start`.

        Args:
            generation: the number of the round after which the group forms.
            spec: the members, and where they rendezvous.
            max_value_bytes: the largest value that is accepted from a member.
            on_unformable: called on the group's thread, with the group and the error, if it cannot be formed.
        """
        self.generation = generation
        self.members = tuple(spec.members)
        self._name = spec.name
        self._membership = GroupMembership(spec)
        self._max_value_bytes = max_value_bytes
        self._on_unformable = on_unformable
        self._engine: Engine | None = None
        self._using = threading.Lock()
        size = len(self.members)
        self._my_tensor = torch.zeros(HEADER_BLOCK_BYTES, dtype=torch.uint8)
        self._all_tensors = [torch.zeros(HEADER_BLOCK_BYTES, dtype=torch.uint8) for _ in range(size)]
        self._my_block: memoryview = self._my_tensor.numpy().data
        self._all_blocks: Sequence[memoryview] = [tensor.numpy().data for tensor in self._all_tensors]
        self._thread = threading.Thread(target=self._form, name=f"gradwire-{spec.name}", daemon=True)

    def start(self) -> None:
        """Begins to form the group."""
        self._thread.start()

    @property
    def is_formed(self) -> bool:
        """Whether this worker has joined the group and the group has not ended here."""
        return self._engine is not None and self._membership.error is None

    @property
    def is_busy(self) -> bool:
        """Whether a round is running."""
        return self._using.locked()

    def all_gather(self, number: int, value: memoryview | None, seconds: float) -> dict[int, FlatValue] | None:
        """Returns the values of all members by id; None on all members if the value of one must go by messages.

        Args:
            number: that of the round, which must be the same on all members.
            value: this worker's; None if it can only travel in a message.
            seconds: how long to wait for the other members.

        Raises:
            ProcessGroupError: the group has ended, or some member did not arrive in time. The round may have
                succeeded on other members.
        """
        try:
            with self._using:
                if self._engine is None or self._membership.error is not None:
                    raise self._membership.error or GroupAbortedError(f"{self._name} is not formed")
                return self._run_round(self._engine, number, value, time.monotonic() + seconds)
        except BaseException:
            self._membership.leave()
            raise
        finally:
            if self._membership.error is not None:
                self._release()

    def _run_round(
        self, engine: Engine, number: int, value: memoryview | None, deadline: float
    ) -> dict[int, FlatValue] | None:
        size = NO_VALUE if value is None else len(value)
        HEADER.pack_into(self._my_block, 0, number, size)
        if value is not None and size <= INLINE_CAPACITY_BYTES:
            self._my_block[HEADER.size : HEADER.size + size] = value
        _exchange(engine, self._all_tensors, self._my_tensor, deadline)
        sizes = self._check_headers(number)
        if NO_VALUE in sizes:
            return None
        values: list[FlatValue] = [
            bytearray(size) if size > INLINE_CAPACITY_BYTES else bytes(block[HEADER.size : HEADER.size + size])
            for block, size in zip(self._all_blocks, sizes, strict=True)
        ]
        if max(sizes) > INLINE_CAPACITY_BYTES:
            assert value is not None
            _exchange(engine, [_large_part(each) for each in values], _large_part(value), deadline)
        return dict(zip(self.members, values, strict=True))

    def _check_headers(self, number: int) -> list[int]:
        """Returns the bytes of the members' values, in their order.

        Raises ProcessGroupError if they do not fit.
        """
        sizes = []
        for member, block in zip(self.members, self._all_blocks, strict=True):
            their_number, size = HEADER.unpack_from(block)
            if their_number != number:
                raise ProcessGroupError(
                    f"{self._name}: worker {member} is in round {their_number}, this one in {number}"
                )
            sizes.append(size)
        if NO_VALUE not in sizes and max(sizes) > self._max_value_bytes:
            raise ProcessGroupError(
                f"{self._name}: a value of {max(sizes)} bytes is refused, max_payload_bytes is "
                f"{self._max_value_bytes}"
            )
        return sizes

    def end(self) -> None:
        """Ends the group now; a round that runs fails. Called from any thread, and does not wait."""
        self._membership.leave()
        self._membership.cancel_join()
        self._release()

    def close(self) -> None:
        """Ends the group now, and waits for its thread."""
        self.end()
        self._thread.join(LEAVE_TIMEOUT_S)

    def _form(self) -> None:
        try:
            engine = self._membership.join()
        except Exception as error:
            problem = self._membership.error or error.with_traceback(None)
            self._membership.release(problem)
            self._on_unformable(self, problem)
        else:
            self._engine = engine
            if self._membership.error is not None:
                self._release()

    def _release(self) -> None:
        """Releases the resources of a group that has ended.

        While a round runs, its thread does this afterwards.
        """
        if self._using.acquire(blocking=False):
            try:
                self._engine = None
                self._membership.release()
            finally:
                self._using.release()


def _large_part(value: FlatValue | memoryview) -> torch.Tensor:
    """Returns the bytes of a value that the second exchange carries: all of a large value, none of others."""
    return torch.frombuffer(value, dtype=torch.uint8) if len(value) > INLINE_CAPACITY_BYTES else _EMPTY


def _exchange(engine: Engine, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
    """Runs the engine's all_gather of `tensor` into `outputs`, in the order of the members."""
    pending = engine.all_gather(outputs, tensor, max(0.0, deadline - time.monotonic()))
    if pending is not None:
        pending.wait(None)
