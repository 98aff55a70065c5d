"""The shared-memory engine: CPU collectives through slots, and messages through channels, of ranks on one host.

Data moves as bytes, so all dtypes are supported; torch reduces, in the order of ranks. The shared segment
(segment.py) does not grow with the tensors: large ones go through it in pieces.

Collectives consist of rounds. Each rank has two slots, for even and odd rounds. In a round some ranks fill slots
and post the number of the round; others wait for that number and read the slots; all mark the round as done when
they do not read its slots any more. A slot is filled again two rounds later, once all ranks are done with the
earlier round, so a rank is at most one round ahead of the slowest. All ranks go through the same rounds.

With the number of the round a rank posts the fingerprint of its call (fingerprint.py), which readers compare with
their own.
"""

import time
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from ....errors import CollectiveTimeoutError, UnsupportedOperationError
from ..base import Engine, Setup, Tensors
from ..fingerprint import encode, encode_parts, mismatch, operation_of
from ..reductions import Reduction, combine, finish, prepare
from ..staging import flat, memmove
from .p2p_channel import P2PChannels, PendingReceive
from .peers import Peers, exchange_processes
from .segment import CACHE_LINE_BYTES, LINE_WORDS, SLOT_BYTES, Segment, check_platform

__all__ = ["ShmEngine"]

MAX_RANKS = 128

MAX_DIRECT_REDUCE_BYTES = 32 * 1024
"""Up to this size every one of more than two ranks reduces the whole tensor.

Beyond it each rank reduces a part, which saves work but costs another wait.
"""

_FINGERPRINT_WORD = 2
"""In the line of a `filled` doorbell, the first of two words with fingerprints, for even and odd rounds."""

_MAX_CACHED_VIEWS = 128


@final
class ShmEngine(Engine):
    """Connects ranks of one user on one host by shared memory.

    Timeouts and dead ranks are noticed up to `segment.MAX_SLEEP_S` seconds late.

    Raises:
        UnsupportedOperationError: this is not Linux on x86-64, or there are more than `MAX_RANKS` ranks.
        ProcessGroupError: the ranks are not on one host, or cannot share memory.
        CollectiveTimeoutError: some rank did not take part within the timeout of the setup.
    """

    name: ClassVar[str] = "shm"
    posts_receives: ClassVar[bool] = True
    detects_departures: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        check_platform()
        if setup.size > MAX_RANKS:
            raise UnsupportedOperationError(
                self.name, f"connect {setup.size} ranks", f"its limit is {MAX_RANKS}; use gradwire_gloo"
            )
        self._ranks = range(self.size)
        # Each rank starts with the next one, so that they do not all read the same slot at once.
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._size_table_bytes = -(-8 * self.size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        self._part_bytes = (
            (SLOT_BYTES - self._size_table_bytes) // self.size // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        )
        processes = exchange_processes(setup)
        segment = Segment(setup, processes[0].pid)
        self._peers = Peers(setup, processes, segment)
        self._slots = _SlotExchange(segment, self._peers)
        self._channels = P2PChannels(segment, self._peers, setup.on_failure)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        """Broadcasts through the root's slot, which all other ranks read."""
        slots, address, size = self._slots, tensor.data_ptr(), tensor.nbytes
        slots.start_operation(timeout, encode("broadcast", size, root=root))
        for start, count in _pieces(size, SLOT_BYTES):
            slots.start_round()
            if self.rank == root:
                memmove(slots.slot_address(root), address + start, count)
                slots.post_filled()
            else:
                slots.wait_and_check([root])
                memmove(address + start, slots.slot_address(root), count)
            slots.end_round()

    def barrier(self, timeout: float) -> None:
        """Goes through a round without data."""
        slots = self._slots
        slots.start_operation(timeout, encode("barrier"))
        slots.start_round()
        slots.post_filled()
        slots.wait_and_check(self._others)
        slots.end_round()

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> None:
        """Reduces small tensors on every rank, and a part of larger tensors on each rank."""
        call = encode("all_reduce", tensor.nbytes, reduction=reduction, dtype=tensor.dtype)
        self._reduce(tensor, reduction, timeout, call, needs_result=True)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> None:
        """Reduces as all_reduce does, but only the root copies the result."""
        call = encode("reduce", tensor.nbytes, root=root, reduction=reduction, dtype=tensor.dtype)
        self._reduce(tensor, reduction, timeout, call, needs_result=self.rank == root)

    def _reduce(
        self, tensor: Tensor, reduction: Reduction, timeout: float, call: int, *, needs_result: bool
    ) -> None:
        """Reduces the ranks' tensors, in pieces of a slot; writes the result to `tensor` if it is needed."""
        self._slots.start_operation(timeout, call)
        prepare(reduction, tensor)
        slots, item = self._slots, tensor.element_size()
        whole = flat(tensor)
        for start, count in _pieces(whole.numel(), SLOT_BYTES // item):
            piece = whole if count == whole.numel() else whole[start : start + count]
            slots.start_round()
            memmove(slots.slot_address(self.rank), piece.data_ptr(), count * item)
            slots.post_filled()
            if self.size > 2 and count * item > MAX_DIRECT_REDUCE_BYTES:
                self._reduce_in_parts(piece, reduction, needs_result)
            elif needs_result:
                slots.wait_and_check(self._others)
                if count:
                    self._combine(reduction, slots.slot_views(tensor.dtype, 0, count), piece, piece)
            slots.end_round()

    def _reduce_in_parts(self, piece: Tensor, reduction: Reduction, needs_result: bool) -> None:
        """Reduces one part of all slots into this rank's slot, then copies the other ranks' parts from theirs."""
        slots, count, item = self._slots, piece.numel(), piece.element_size()
        part = -(-count // (self.size * CACHE_LINE_BYTES)) * CACHE_LINE_BYTES
        bounds = [(min(rank * part, count), min((rank + 1) * part, count)) for rank in self._ranks]
        slots.wait_and_check(self._others)
        low, high = bounds[self.rank]
        if low < high:
            views = slots.slot_views(piece.dtype, low, high)
            # Only this rank reads this part of its own slot, and it has done so before it writes there.
            self._combine(reduction, views, piece[low:high], views[self.rank])
        slots.post_reduced()
        if needs_result:
            slots.wait_reduced()
            for rank, (low, high) in enumerate(bounds):
                source = slots.slot_address(rank) + low * item
                memmove(piece.data_ptr() + low * item, source, (high - low) * item)

    def _combine(self, reduction: Reduction, parts: Tensors, scratch: Tensor, out: Tensor) -> None:
        """Writes the reduction of the parts to `out`, which may be one of them if `scratch` is not."""
        if self.size == 1:
            out.copy_(parts[0])
        else:
            total = parts[0]
            for part in parts[1:-1]:
                combine(reduction, total, part, scratch)
                total = scratch
            combine(reduction, total, parts[-1], out)
        finish(reduction, out, self.size)

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        """Gathers through every rank's slot, which all other ranks read."""
        self._slots.start_operation(timeout, encode("all_gather", tensor.nbytes))
        self._gather("all_gather", outputs, tensor, max(output.nbytes for output in outputs), 0)

    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> None:
        """Gathers as all_gather does, but only the root reads the slots."""
        self._slots.start_operation(timeout, encode("gather", tensor.nbytes, root=root))
        self._gather("gather", outputs, tensor, tensor.nbytes, root)

    def _gather(self, operation: str, outputs: Tensors, tensor: Tensor, max_bytes: int, root: int) -> None:
        """Copies the ranks' tensors, of up to `max_bytes` bytes, to the outputs, if there are any."""
        slots, address = self._slots, tensor.data_ptr()
        fingerprints = [encode(operation, output.nbytes, root=root) for output in outputs]
        if outputs:
            memmove(outputs[self.rank].data_ptr(), address, tensor.nbytes)
        for start, count in _pieces(max_bytes, SLOT_BYTES):
            slots.start_round()
            memmove(slots.slot_address(self.rank), address + start, _bytes_from(tensor, start, count))
            slots.post_filled()
            if outputs:
                for other in self._others:
                    slots.wait_filled([other])
                    slots.check_fingerprint(other, fingerprints[other])
                    output = outputs[other]
                    source = slots.slot_address(other)
                    memmove(output.data_ptr() + start, source, _bytes_from(output, start, count))
            slots.end_round()

    def scatter(self, tensor: Tensor, inputs: Tensors, root: int, timeout: float) -> None:
        """Scatters through all ranks' slots, which the root fills."""
        slots, address, size = self._slots, tensor.data_ptr(), tensor.nbytes
        slots.start_operation(timeout, encode("scatter", size, root=root))
        if self.rank == root:
            memmove(address, inputs[root].data_ptr(), size)
        for start, count in _pieces(size, SLOT_BYTES):
            slots.start_round()
            if self.rank == root:
                for other in self._others:
                    memmove(slots.slot_address(other), inputs[other].data_ptr() + start, count)
                slots.post_filled()
            else:
                slots.wait_and_check([root])
                memmove(address + start, slots.slot_address(self.rank), count)
            slots.end_round()

    def reduce_scatter(self, tensor: Tensor, inputs: Tensors, reduction: Reduction, timeout: float) -> None:
        """Divides every slot into a part for each rank, which reduces its parts of all slots."""
        slots, dtype, item = self._slots, tensor.dtype, tensor.element_size()
        slots.start_operation(timeout, encode_parts(reduction, inputs))
        whole = flat(tensor)
        capacity = self._part_bytes // item
        for start, max_count in _pieces(max(each.numel() for each in inputs), capacity):
            slots.start_round()
            for rank, each in enumerate(inputs):
                count = max(0, min(each.numel() - start, max_count))
                target = slots.slot_address(self.rank) + rank * capacity * item
                memmove(target, each.data_ptr() + start * item, count * item)
                if reduction.factor is not None and count:
                    views = slots.slot_views(dtype, rank * capacity, rank * capacity + count)
                    prepare(reduction, views[self.rank])
            slots.post_filled()
            slots.wait_and_check(self._others)
            count = max(0, min(whole.numel() - start, max_count))
            if count:
                out = whole[start : start + count]
                views = slots.slot_views(dtype, self.rank * capacity, self.rank * capacity + count)
                self._combine(reduction, views, out, out)
            slots.end_round()

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> None:
        """Divides every slot into a table of sizes and a part for each rank."""
        slots, part = self._slots, self._part_bytes
        slots.start_operation(timeout, encode("all_to_all"))
        memmove(outputs[self.rank].data_ptr(), inputs[self.rank].data_ptr(), inputs[self.rank].nbytes)
        start, largest = 0, 1
        while start < largest:
            slots.start_round()
            tables = slots.slot_views(torch.int64, 0, self.size)
            if start == 0:
                tables[self.rank].copy_(torch.tensor([each.nbytes for each in inputs]))
            own_parts = slots.slot_address(self.rank) + self._size_table_bytes
            for rank in self._others:
                source = inputs[rank]
                memmove(own_parts + rank * part, source.data_ptr() + start, _bytes_from(source, start, part))
            slots.post_filled()
            slots.wait_and_check(self._others)
            if start == 0:
                sizes = [table.tolist() for table in tables]
                largest = max(map(max, sizes))
                for rank in self._others:
                    sent = encode("all_to_all", sizes[rank][self.rank])
                    slots.check_fingerprint(rank, encode("all_to_all", outputs[rank].nbytes), sent)
            for rank in self._others:
                address = slots.slot_address(rank) + self._size_table_bytes + self.rank * part
                target = outputs[rank]
                memmove(target.data_ptr() + start, address, _bytes_from(target, start, part))
            slots.end_round()
            start += part

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        """Writes the tensor to the channel to `peer`; returns when the last block is written."""
        self._channels.send(tensor, peer, tag, timeout)

    def can_send(self, tensor: Tensor, peer: int) -> bool:
        """Returns whether the channel to `peer` has room for the whole tensor."""
        return self._channels.can_send(tensor.nbytes, peer)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingReceive:
        """Posts a receive from rank `peer`, or from any rank if None."""
        return self._channels.post_receive(tensor, peer, tag, timeout)

    def close(self) -> None:
        """Ends the progress thread. The segment is unmapped with the last reference to it."""
        self._channels.close()

    def fail(self, error: Exception) -> None:
        """Wakes all threads that wait here with `error`, and tells the other ranks that this one has left."""
        super().fail(error)
        self._peers.leave(error)


def _pieces(total: int, max_count: int) -> list[tuple[int, int]]:
    """Divides `total` into (start, count) pieces of at most `max_count`; there is at least one, possibly empty."""
    if total <= max_count:
        return [(0, total)]
    return [(start, min(total - start, max_count)) for start in range(0, total, max_count)]


def _bytes_from(tensor: Tensor, start: int, max_count: int) -> int:
    return max(0, min(tensor.nbytes - start, max_count))


@final
class _SlotExchange:
    """The slots of a group, used by one thread at a time."""

    def __init__(self, segment: Segment, peers: Peers) -> None:
        layout = self._layout = segment.layout
        self._doorbells = segment.doorbells
        self._words = segment.doorbells.words
        self._peers = peers
        self._rank = peers.rank
        self._ranks = range(peers.size)
        self._others = [other for other in self._ranks if other != self._rank]
        offsets = [[layout.slot_offset(each, parity) for each in self._ranks] for parity in (0, 1)]
        self._addresses = [[segment.address + offset for offset in row] for row in offsets]
        self._slots = [[segment.bytes[offset : offset + SLOT_BYTES] for offset in row] for row in offsets]
        self._views: dict[tuple[int, torch.dtype, int, int], list[Tensor]] = {}
        self._round = 0
        self._parity = 0
        self._round_done_by_all = 0  # as far as this rank has checked
        # The operation in flight:
        self._fingerprint = 0
        self._timeout = 0.0
        self._deadline = 0.0
        self._wait_target: tuple[Sequence[int], int, int] = ((), 0, 0)  # ranks, first doorbell, value

    def start_operation(self, timeout: float, fingerprint: int) -> None:
        """Sets the operation that the following rounds belong to, with the fingerprint of this rank's call."""
        self._peers.check()
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._fingerprint = fingerprint

    def start_round(self) -> None:
        """Starts a round: waits until all ranks are done with the last round that used the same slots."""
        number = self._round = self._round + 1
        self._parity = number & 1
        if self._round_done_by_all < number - 2:
            self._wait_for(self._layout.done_doorbell(0), self._others, number - 2)
            self._round_done_by_all = number - 2

    def slot_address(self, rank: int) -> int:
        return self._addresses[self._parity][rank]

    def slot_views(self, dtype: torch.dtype, start: int, stop: int) -> list[Tensor]:
        """Returns, for every rank's slot of this round, a view of its elements from `start` to `stop`."""
        key = (self._parity, dtype, start, stop)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _MAX_CACHED_VIEWS:
                self._views.clear()
            views = [slot.view(dtype)[start:stop] for slot in self._slots[self._parity]]
            self._views[key] = views
        return views

    def post_filled(self) -> None:
        doorbell = self._layout.filled_doorbell(self._rank)
        at = doorbell * LINE_WORDS + self._parity
        self._words[at + _FINGERPRINT_WORD] = self._fingerprint
        self._doorbells.ring(doorbell, self._round)

    def wait_and_check(self, ranks: Sequence[int]) -> None:
        """Waits until these ranks have filled their slots, and checks that they call the same."""
        self.wait_filled(ranks)
        for rank in ranks:
            self.check_fingerprint(rank, self._fingerprint)

    def wait_filled(self, ranks: Sequence[int]) -> None:
        self._wait_for(self._layout.filled_doorbell(0), ranks, self._round)

    def check_fingerprint(self, rank: int, expected: int, theirs: int | None = None) -> None:
        """Raises CollectiveMismatchError if a rank's fingerprint, or `theirs`, is not the expected one."""
        if theirs is None:
            at = self._layout.filled_doorbell(rank) * LINE_WORDS + _FINGERPRINT_WORD + self._parity
            theirs = self._words[at]
        if theirs != expected:
            ranks = self._peers.global_ranks
            raise mismatch(ranks[rank], theirs, ranks[self._rank], self._fingerprint, expected)

    def post_reduced(self) -> None:
        self._doorbells.ring(self._layout.reduced_doorbell(self._rank), self._round)

    def wait_reduced(self) -> None:
        self._wait_for(self._layout.reduced_doorbell(0), self._others, self._round)

    def end_round(self) -> None:
        """Tells the other ranks that this rank does not read its slots any more."""
        self._doorbells.ring(self._layout.done_doorbell(self._rank), self._round)

    def _wait_for(self, first: int, ranks: Sequence[int], value: int) -> None:
        """Waits until the doorbells of these ranks, which start at `first`, are at least `value`."""
        words = self._words
        for rank in ranks:
            if words[(first + rank) * LINE_WORDS] < value:
                self._wait_target = (ranks, first, value)
                self._doorbells.wait_for(first + rank, value, self._check_wait)

    def _check_wait(self) -> None:
        """Raises if this rank has left, a rank that is waited for is lost, or the operation has timed out."""
        self._peers.check()
        ranks, first, value = self._wait_target
        # A rank that left after it was done with this round is not needed in it.
        unfinished = [
            rank for rank in self._others if self._doorbells.value(self._layout.done_doorbell(rank)) < self._round
        ]
        lost = self._peers.find_lost(unfinished)
        late = [rank for rank in ranks if self._doorbells.value(first + rank) < value]
        if not late:
            return
        if lost is not None:
            raise lost
        if time.monotonic() > self._deadline:
            raise CollectiveTimeoutError(
                operation_of(self._fingerprint), self._timeout, self._peers.describe(late)
            )
