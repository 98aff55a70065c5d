"""Messages between two ranks: channels of blocks in shared memory, and what has arrived for whom.

A message is put on the channel to its receiver block by block; each block says how long the whole is and what its
tag is. A receive takes messages off the channels it waits for. It copies those that another receive of this rank
waits for to where that wants them, and keeps those that nobody waits for yet, so that they do not block the one
behind them.

Of all threads that receive at once one, the driver, waits for what arrives and does this for all; when it has what
it wanted, another becomes the driver.
"""

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from ...errors import CollectiveMismatchError, CollectiveTimeoutError
from .memory import copy
from .shm_layout import BLOCKS, Layout
from .shm_peers import Peers
from .shm_segment import Segment
from .shm_signals import LINE, SLICE, Signals

__all__ = ["Mailbox"]


@final
class _Receive:
    """A receive that is under way."""

    __slots__ = ("deadline", "done", "error", "seconds", "source", "tag", "tensor", "wanted")

    def __init__(self, tensor: Tensor, wanted: int | None, tag: int, seconds: float) -> None:
        self.tensor: Final = tensor
        self.wanted: Final = wanted
        self.tag: Final = tag
        self.seconds: Final = seconds
        self.deadline: Final = time.monotonic() + seconds
        self.source = -1
        self.done = False
        self.error: Exception | None = None


@final
class _Message:
    """A message of which at least the first block has been taken off its channel."""

    __slots__ = ("arrived", "receive", "size", "source", "tag", "tensor")

    def __init__(self, source: int, tag: int, size: int) -> None:
        self.source: Final = source
        self.tag: Final = tag
        self.size: Final = size
        self.arrived = 0  # bytes
        self.receive: _Receive | None = None
        self.tensor: Tensor | None = None  # where the bytes go; None: nobody wants them


@final
@dataclass(frozen=True, slots=True)
class _Channel:
    """Where a channel is: its signals, and its first block."""

    sent: int
    taken: int
    blocks: int

    @staticmethod
    def between(layout: Layout, source: int, to: int) -> "_Channel":
        return _Channel(layout.sent(source, to), layout.taken(source, to), layout.blocks(source, to))


@final
class Mailbox:
    """The channels of one rank. Its sends to one peer come one after another; all else may come at once."""

    def __init__(self, layout: Layout, segment: Segment, signals: Signals, peers: Peers) -> None:
        self._signals = signals
        self._peers = peers
        self._address = segment.address
        self._rank = me = peers.rank
        self._size = peers.size
        self._others = [rank for rank in range(peers.size) if rank != me]
        self._block = layout.block_bytes
        ranks = range(peers.size)
        self._to = [_Channel.between(layout, me, peer) for peer in ranks]
        self._from = [_Channel.between(layout, peer, me) for peer in ranks]
        self._bells = [layout.bell(rank) for rank in ranks]
        self._sent = [0] * peers.size
        self._rings = itertools.count(1)
        # Of receives. The lock guards what follows; whoever waits for the condition is not the driver.
        self._changed = threading.Condition(threading.Lock())
        self._driver: _Receive | None = None
        self._taken = [0] * peers.size
        self._receives: list[_Receive] = []
        self._kept: deque[_Message] = deque()
        self._arriving: list[_Message | None] = [None] * peers.size

    def send(self, tensor: Tensor, peer: int, tag: int, seconds: float) -> None:
        """Puts a message on the channel to a peer; returns once the last block is there."""
        self._peers.check()
        deadline = time.monotonic() + seconds
        signals, words, channel = self._signals, self._signals.words, self._to[peer]
        place, size = tensor.data_ptr(), tensor.nbytes

        def check() -> None:
            self._peers.check()
            lost = self._peers.lost([peer])
            if lost is not None:
                raise lost
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"send with tag {tag}", seconds, self._peers.names([peer]))

        for start in range(0, max(size, 1), self._block):
            number = self._sent[peer]
            signals.wait(channel.taken, number + 1 - BLOCKS, check)
            block = channel.blocks + number % BLOCKS * (LINE + self._block)
            words[block // 8] = tag
            words[block // 8 + 1] = size
            copy(self._address + block + LINE, place + start, min(size - start, self._block))
            self._sent[peer] = number + 1
            words[channel.sent * (LINE // 8)] = number + 1  # nobody sleeps on this one
            # A number that nobody has posted before, for all that send to this peer ring the one bell.
            signals.post(self._bells[peer], next(self._rings) * self._size + self._rank)

    def has_room(self, size: int, peer: int) -> bool:
        """Can a message of so many bytes be put on the channel to a peer at once?"""
        under_way = self._sent[peer] - self._signals.value(self._to[peer].taken)
        return max(-(-size // self._block), 1) <= BLOCKS - under_way

    def receive(self, tensor: Tensor, source: int | None, tag: int, seconds: float) -> int:
        """Waits for a message with this tag from a rank, or from any if it is None; the rank that sent it."""
        self._peers.check()
        receive = _Receive(tensor, source, tag, seconds)
        with self._changed:
            self._receives.append(receive)
            try:
                self._find_kept(receive)
                while not receive.done:
                    if self._driver is not None:
                        self._changed.wait(SLICE)
                        self._check(receive)
                    else:
                        self._drive(receive)
            finally:
                self._forget(receive)
        if receive.error is not None:
            raise receive.error
        return receive.source

    def _drive(self, receive: _Receive) -> None:
        """Takes in what arrives until this receive is done. The lock is held, but not while it waits."""
        bell = self._bells[self._rank]
        self._driver = receive
        try:
            while True:
                rung = self._signals.value(bell)
                self._take_in(receive)
                if receive.done:
                    return
                self._changed.release()
                try:
                    rang = self._signals.wait_for_change(bell, rung)
                finally:
                    self._changed.acquire()
                if not rang or time.monotonic() > receive.deadline:
                    self._check(receive)
        finally:
            self._driver = None
            if len(self._receives) > 1:
                self._changed.notify_all()

    def _take_in(self, mine: _Receive) -> None:
        """Takes off the channels what has arrived, as long as `mine` is not done."""
        wanted = {receive.wanted for receive in self._receives}
        for source in range(self._size) if None in wanted else wanted:
            assert source is not None
            while not mine.done and self._has_more(source):
                self._take_block(source)

    def _has_more(self, source: int) -> bool:
        return self._signals.value(self._from[source].sent) > self._taken[source]

    def _take_block(self, source: int) -> None:
        number, channel = self._taken[source], self._from[source]
        block = channel.blocks + number % BLOCKS * (LINE + self._block)
        message = self._arriving[source]
        if message is None:
            words = self._signals.words
            message = self._arriving[source] = self._begin(source, words[block // 8], words[block // 8 + 1])
        count = min(message.size - message.arrived, self._block)
        if message.tensor is not None:
            copy(message.tensor.data_ptr() + message.arrived, self._address + block + LINE, count)
        message.arrived += count
        self._taken[source] = number + 1
        self._signals.post(channel.taken, number + 1)
        if message.arrived == message.size:
            self._arriving[source] = None
            self._deliver(message)

    def _begin(self, source: int, tag: int, size: int) -> _Message:
        """A message of which the first block is there."""
        message = _Message(source, tag, size)
        for receive in self._receives:
            if receive.source < 0 and receive.tag == tag and receive.wanted in {None, source}:
                self._match(message, receive)
                break
        else:
            message.tensor = torch.empty(size, dtype=torch.uint8)
            self._kept.append(message)
        return message

    def _find_kept(self, receive: _Receive) -> None:
        for message in self._kept:
            if message.tag == receive.tag and receive.wanted in {None, message.source}:
                self._kept.remove(message)
                self._match(message, receive)
                if message.arrived == message.size:
                    self._deliver(message)
                return

    def _match(self, message: _Message, receive: _Receive) -> None:
        receive.source = message.source
        if message.size == receive.tensor.nbytes:
            message.receive = receive
            if message.tensor is None:
                message.tensor = receive.tensor
            return
        message.tensor = None
        sender, me = self._peers.names([message.source]), self._peers.names([self._rank])
        receive.error = CollectiveMismatchError(
            [self._peers.number(message.source)],
            f"{sender} sent {message.size} bytes with tag {message.tag}, but {me} receives "
            f"{receive.tensor.nbytes} bytes",
        )
        self._end(receive)

    def _deliver(self, message: _Message) -> None:
        """All of it has arrived."""
        receive = message.receive
        if receive is None:
            return
        if message.tensor is not None and message.tensor is not receive.tensor:
            copy(receive.tensor.data_ptr(), message.tensor.data_ptr(), message.size)
        self._end(receive)

    def _end(self, receive: _Receive) -> None:
        receive.done = True
        if receive is not self._driver:
            self._changed.notify_all()

    def _check(self, receive: _Receive) -> None:
        """Raises if there is no use in waiting any longer."""
        if receive.done:
            return
        self._peers.check()
        if receive.wanted is None:
            others = self._others
            lost = self._peers.died(others)
            if lost is None and others and all(self._peers.lost([rank]) for rank in others):
                lost = self._peers.lost(others)
            sources = others
        else:
            sources = [receive.wanted]
            lost = self._peers.lost(sources)
        if any(self._has_more(source) for source in sources):
            return
        if lost is not None:
            raise lost
        if time.monotonic() > receive.deadline:
            names = "any rank" if receive.wanted is None else self._peers.names(sources)
            raise CollectiveTimeoutError(f"recv with tag {receive.tag}", receive.seconds, names)

    def _forget(self, receive: _Receive) -> None:
        """The receive is over; what still comes for it goes nowhere."""
        self._receives.remove(receive)
        if not receive.done:
            for message in self._arriving:
                if message is not None and message.receive is receive:
                    message.receive = message.tensor = None
