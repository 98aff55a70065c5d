"""Collectives through shared memory, for ranks on one host. All tensors are on the CPU.

Data moves as bytes, so that all dtypes can; what is reduced is reduced by torch, in the order of ranks. The memory
that the ranks share (shm_layout.py) does not grow with the tensors: large ones go through it in pieces.
"""

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from ....errors import UnsupportedOperationError
from ...reductions import Reduction, combine, finish, prepare
from ..base import Engine, Setup
from ..memory import copy, flat
from .calls import encode
from .layout import SLOT, Layout
from .members import meet
from .p2p_channel import P2PChannels
from .peers import Peers
from .receive import PendingReceive
from .segment import Segment
from .signals import LINE, Signals, check_platform
from .slot_exchange import SlotExchange

__all__ = ["ShmEngine"]

MOST_RANKS = 128

DIRECT = 32 * 1024
"""Up to so many bytes, each of more than two ranks reduces all: parts would cost a wait more than they save."""


@final
class ShmEngine(Engine):
    """Ranks of one user on one host that share memory.

    Time limits are noticed up to a tenth of a second late, and the death of a rank that others wait for as well.

    Raises:
        UnsupportedOperationError: this is not Linux on an x86-64 processor, or there are too many ranks.
        ProcessGroupError: the ranks are not on one host, or cannot share memory.
        CollectiveTimeoutError: some rank did not come.
    """

    name: ClassVar[str] = "shm"
    posts_receives: ClassVar[bool] = True
    notices_departures: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        check_platform(self.name)
        if setup.size > MOST_RANKS:
            raise UnsupportedOperationError(
                self.name, f"take {setup.size} ranks", f"it takes {MOST_RANKS}; use gradwire_gloo"
            )
        self._ranks = range(self.size)
        # Each rank begins with the next, so that they do not all read one.
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._sizes = -(-8 * self.size // LINE) * LINE
        self._part = (SLOT - self._sizes) // self.size // LINE * LINE
        layout = Layout(self.size)
        members = meet(setup, self.name)
        segment = Segment(setup, members, layout.total, self.name)
        signals = Signals(segment.words, segment.address)
        self._peers = Peers(setup, members, layout, segment, signals)
        self._board = SlotExchange(layout, segment, signals, self._peers)
        self._mailbox = P2PChannels(layout, segment, signals, self._peers, setup.failed)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        """The root's slot, read by all others."""
        board, place, size = self._board, tensor.data_ptr(), tensor.nbytes
        board.begin("broadcast", timeout, encode("broadcast", root=root, size=size))
        for start, count in _pieces(size, SLOT):
            board.open()
            if self.rank == root:
                copy(board.slot(root), place + start, count)
                board.post()
            else:
                board.read([root])
                copy(place + start, board.slot(root), count)
            board.close()

    def barrier(self, timeout: float) -> None:
        """A round without data."""
        board = self._board
        board.begin("barrier", timeout, encode("barrier"))
        board.open()
        board.post()
        board.read(self._others)
        board.close()

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> None:
        """Every rank reduces small tensors; of large ones, each a part."""
        call = encode("all_reduce", reduction=reduction, dtype=tensor.dtype, size=tensor.nbytes)
        self._board.begin("all_reduce", timeout, call)
        self._reduce(tensor, reduction, here=True)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> None:
        """As all_reduce, but only the root takes the result."""
        call = encode("reduce", reduction=reduction, dtype=tensor.dtype, root=root, size=tensor.nbytes)
        self._board.begin("reduce", timeout, call)
        self._reduce(tensor, reduction, here=self.rank == root)

    def _reduce(self, tensor: Tensor, reduction: Reduction, *, here: bool) -> None:
        """Reduces the ranks' tensors; `here` says whether this one takes the result."""
        prepare(reduction, tensor)
        board, item = self._board, tensor.element_size()
        whole = flat(tensor)
        for start, count in _pieces(whole.numel(), SLOT // item):
            piece = whole if count == whole.numel() else whole[start : start + count]
            board.open()
            copy(board.slot(self.rank), piece.data_ptr(), count * item)
            board.post()
            if self.size > 2 and count * item > DIRECT:
                self._reduce_in_parts(piece, reduction, here)
            elif here:
                board.read(self._others)
                if count:
                    self._combine(reduction, board.views(tensor.dtype, 0, count), piece, piece)
            board.close()

    def _reduce_in_parts(self, piece: Tensor, reduction: Reduction, here: bool) -> None:
        """Each rank reduces its part of all slots, to its own slot, from where all take it."""
        board, count, item = self._board, piece.numel(), piece.element_size()
        part = -(-count // (self.size * LINE)) * LINE
        bounds = [(min(rank * part, count), min((rank + 1) * part, count)) for rank in self._ranks]
        board.read(self._others)
        low, high = bounds[self.rank]
        if low < high:
            views = board.views(piece.dtype, low, high)
            # Of the rank's own slot, only this rank reads this part, and it does so no more once it writes there.
            self._combine(reduction, views, piece[low:high], views[self.rank])
        board.post_reduced()
        if here:
            board.read_reduced()
            for rank, (low, high) in enumerate(bounds):
                copy(piece.data_ptr() + low * item, board.slot(rank) + low * item, (high - low) * item)

    def _combine(self, reduction: Reduction, parts: Sequence[Tensor], scratch: Tensor, out: Tensor) -> None:
        """`out` becomes the reduction of the parts. It may be one of them, if `scratch` is none."""
        if self.size == 1:
            out.copy_(parts[0])
        else:
            total = parts[0]
            for part in parts[1:-1]:
                combine(reduction, total, part, scratch)
                total = scratch
            combine(reduction, total, parts[-1], out)
        finish(reduction, out, self.size)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> None:
        """Every rank's slot, read by all others."""
        call = encode("all_gather", size=tensor.nbytes)
        self._board.begin("all_gather", timeout, call)
        self._gather("all_gather", outputs, tensor, max(output.nbytes for output in outputs), 0)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float) -> None:
        """As all_gather, but only the root reads."""
        _check_one_size("gather", "outputs", outputs, tensor)
        call = encode("gather", root=root, size=tensor.nbytes)
        self._board.begin("gather", timeout, call)
        self._gather("gather", outputs, tensor, tensor.nbytes, root)

    def _gather(self, operation: str, outputs: Sequence[Tensor], tensor: Tensor, largest: int, root: int) -> None:
        """Has the others' tensors, the largest of so many bytes, put into the outputs, if there are any."""
        board, place = self._board, tensor.data_ptr()
        calls = [encode(operation, root=root, size=output.nbytes) for output in outputs]
        if outputs:
            copy(outputs[self.rank].data_ptr(), place, tensor.nbytes)
        for start, count in _pieces(largest, SLOT):
            board.open()
            copy(board.slot(self.rank), place + start, _count(tensor, start, count))
            board.post()
            if outputs:
                for other in self._others:
                    board.wait([other])
                    board.compare(other, calls[other])
                    output = outputs[other]
                    copy(output.data_ptr() + start, board.slot(other), _count(output, start, count))
            board.close()

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float) -> None:
        """The root fills every rank's slot, for nobody else does."""
        _check_one_size("scatter", "inputs", inputs, tensor)
        board, place, size = self._board, tensor.data_ptr(), tensor.nbytes
        board.begin("scatter", timeout, encode("scatter", root=root, size=size))
        if self.rank == root:
            copy(place, inputs[root].data_ptr(), size)
        for start, count in _pieces(size, SLOT):
            board.open()
            if self.rank == root:
                for other in self._others:
                    copy(board.slot(other), inputs[other].data_ptr() + start, count)
                board.post()
            else:
                board.read([root])
                copy(place + start, board.slot(self.rank), count)
            board.close()

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> None:
        """A part of every slot for each rank, which reduces those for it."""
        board, dtype, item = self._board, tensor.dtype, tensor.element_size()
        total = sum(each.nbytes for each in inputs)
        board.begin(
            "reduce_scatter", timeout, encode("reduce_scatter", reduction=reduction, dtype=dtype, size=total)
        )
        whole = flat(tensor)
        room = self._part // item
        for start, most in _pieces(max(each.numel() for each in inputs), room):
            board.open()
            for rank, each in enumerate(inputs):
                count = max(0, min(each.numel() - start, most))
                copy(board.slot(self.rank) + rank * room * item, each.data_ptr() + start * item, count * item)
                if reduction.factor is not None and count:
                    views = board.views(dtype, rank * room, rank * room + count)
                    prepare(reduction, views[self.rank])
            board.post()
            board.read(self._others)
            count = max(0, min(whole.numel() - start, most))
            if count:
                out = whole[start : start + count]
                self._combine(reduction, board.views(dtype, self.rank * room, self.rank * room + count), out, out)
            board.close()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float) -> None:
        """A part of every slot for each rank, after the sizes of what is for them."""
        board, part = self._board, self._part
        board.begin("all_to_all", timeout, encode("all_to_all"))
        copy(outputs[self.rank].data_ptr(), inputs[self.rank].data_ptr(), inputs[self.rank].nbytes)
        start, largest = 0, 1
        while start < largest:
            board.open()
            tables = board.views(torch.int64, 0, self.size)
            if start == 0:
                tables[self.rank].copy_(torch.tensor([each.nbytes for each in inputs]))
            mine = board.slot(self.rank) + self._sizes
            for rank in self._others:
                copy(mine + rank * part, inputs[rank].data_ptr() + start, _count(inputs[rank], start, part))
            board.post()
            board.read(self._others)
            if start == 0:
                sizes = [table.tolist() for table in tables]
                largest = max(map(max, sizes))
                for rank in self._others:
                    board.compare_sizes(rank, sizes[rank][self.rank], outputs[rank].nbytes)
            for rank in self._others:
                place = board.slot(rank) + self._sizes + self.rank * part
                copy(outputs[rank].data_ptr() + start, place, _count(outputs[rank], start, part))
            board.close()
            start += part

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        """Through the channel to the peer; returns when the last piece is there."""
        self._mailbox.send(tensor, peer, tag, timeout)

    def can_send(self, tensor: Tensor, peer: int) -> bool:
        """Is there room for all of it?"""
        return self._mailbox.has_room(tensor.nbytes, peer)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingReceive:
        """From the channel of the peer, or of any rank."""
        return self._mailbox.receive(tensor, peer, tag, timeout)

    def close(self) -> None:
        """The memory goes with the last reference to it."""
        self._mailbox.close()

    def fail(self, error: Exception) -> None:
        """Wakes all that wait here; the other ranks learn that this one is gone."""
        self._peers.leave(error)


def _pieces(whole: int, most: int) -> list[tuple[int, int]]:
    """Start and length of pieces that are not longer than `most`; one, if there is nothing."""
    if whole <= most:
        return [(0, whole)]
    return [(start, min(whole - start, most)) for start in range(0, whole, most)]


def _count(tensor: Tensor, start: int, most: int) -> int:
    """How many bytes a tensor has from `start` on, at most so many."""
    return max(0, min(tensor.nbytes - start, most))


def _check_one_size(operation: str, what: str, tensors: Sequence[Tensor], own: Tensor) -> None:
    """Those of the root are as large as its own."""
    for rank, tensor in enumerate(tensors):
        if tensor.nbytes != own.nbytes:
            raise ValueError(
                f"{operation} takes {what} of one size, but that of rank {rank} has {tensor.numel()} elements and "
                f"the root's own {own.numel()}: use all_to_all for others"
            )
