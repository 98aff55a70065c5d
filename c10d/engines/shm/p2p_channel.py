"""Messages between two ranks: channels of blocks in shared memory, and what has arrived for whom.

A message is put on the channel to its receiver block by block; each block says how long the whole is and what its
tag is. Receives are posted, and get messages with their tag in the order in which both came. Who waits for one
takes what arrives off the channels of all that are posted: bytes go to where the receive that they are for wants
them, or are kept if there is none yet, so that they do not block the message behind them.

All that wait watch one signal, the bell of the rank. Every block that is sent rings it, and so does a thread that
has taken in what another waits for. A thread of the mailbox's own waits for what has been left alone for a while.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ....errors import CollectiveMismatchError, CollectiveTimeoutError
from ..memory import copy
from .layout import BLOCKS, Layout
from .peers import Peers
from .progress_thread import ProgressThread
from .receive import IncomingMessage, PendingReceive
from .segment import Segment
from .signals import LINE, Signals

__all__ = ["P2PChannels"]


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
class P2PChannels:
    """The channels of one rank. Its sends to one peer come one after another; all else may come at once.

    failed: called with the error of a receive.
    """

    def __init__(
        self,
        layout: Layout,
        segment: Segment,
        signals: Signals,
        peers: Peers,
        failed: Callable[[Exception], None],
    ) -> None:
        self._signals = signals
        self._peers = peers
        self._failed = failed
        self._address = segment.address
        self._rank = me = peers.rank
        self._size = peers.size
        self._others = [rank for rank in range(peers.size) if rank != me]
        self._block = layout.block_bytes
        ranks = range(peers.size)
        self._to = [_Channel.between(layout, me, peer) for peer in ranks]
        self._from = [_Channel.between(layout, peer, me) for peer in ranks]
        self._bells = [layout.doorbell(rank) for rank in ranks]
        self._sent = [0] * peers.size
        self._rings = itertools.count(1)
        # Of receives, guarded by the lock:
        self._lock = threading.Lock()
        self._taken = [0] * peers.size
        self._posted: list[PendingReceive] = []
        self._kept: deque[IncomingMessage] = deque()
        self._arriving: list[IncomingMessage | None] = [None] * peers.size
        self._calls: deque[Callable[[], None]] = deque()
        """What is to be called once the lock is free."""
        self._attendant = ProgressThread(self._left_alone)

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
            self._ring(peer)

    def _ring(self, rank: int) -> None:
        # A number that nobody has posted before, for all that send to this rank ring the one bell.
        self._signals.post(self._bells[rank], next(self._rings) * self._size + self._rank)

    def has_room(self, size: int, peer: int) -> bool:
        """Can a message of so many bytes be put on the channel to a peer at once?"""
        under_way = self._sent[peer] - self._signals.value(self._to[peer].taken)
        return max(-(-size // self._block), 1) <= BLOCKS - under_way

    def receive(self, tensor: Tensor, source: int | None, tag: int, seconds: float) -> PendingReceive:
        """Posts a receive of a message with this tag from a rank, or from any if it is None."""
        self._peers.check()
        receive = PendingReceive(self, tensor, source, tag, seconds)
        with self._lock:
            self._posted.append(receive)
            self._find_kept(receive)
        self._make_calls()
        self._attendant.attend()
        return receive

    def wait(self, receive: PendingReceive, timeout: float | None) -> None:
        """Returns once a receive is over. Raises TimeoutError if it is not after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        signals, doorbell = self._signals, self._bells[self._rank]
        with self._lock:
            receive.waiters += 1
        try:
            while True:
                with self._lock:
                    rung = signals.value(doorbell)  # before looking: what comes later rings again
                    self._take_in(receive)
                if self._calls:
                    self._make_calls()
                if receive.over:
                    return
                rang = signals.wait_for_change(doorbell, rung)
                now = time.monotonic()
                if not rang or now > receive.deadline:
                    self._look_around(receive)
                if end is not None and now > end and not receive.over:
                    raise TimeoutError
        finally:
            with self._lock:
                receive.waiters -= 1

    def poll(self, receive: PendingReceive) -> bool:
        """Is a receive over, with what has arrived by now?"""
        # A signal handler that writes down what is under way may ask on a thread that has the lock.
        if self._lock.acquire(blocking=False):
            try:
                self._take_in(receive)
            finally:
                self._lock.release()
            self._make_calls()
        return receive.over

    def call_back(self, receive: PendingReceive, callback: Callable[[], None]) -> bool:
        """Has `callback` called when a receive is over; False if it is already."""
        with self._lock:
            if receive.over:
                return False
            receive.callbacks.append(callback)
        self._attendant.hurry()
        return True

    def close(self) -> None:
        """Ends the mailbox's thread. All receives are over, or fail at their next look around."""
        self._attendant.close()

    def _left_alone(self) -> list[PendingReceive]:
        """The receives that nobody waits for."""
        with self._lock:
            return [receive for receive in self._posted if not receive.waiters]

    # The lock is held in all of these but _make_calls and _look_around.

    def _take_in(self, mine: PendingReceive) -> None:
        """Takes off the channels what has arrived, as long as `mine` is not over."""
        wanted = {receive.wanted for receive in self._posted}
        for source in range(self._size) if None in wanted else wanted:
            assert source is not None
            while not mine.over and self._has_more(source):
                self._take_block(source, mine)

    def _has_more(self, source: int) -> bool:
        return self._signals.value(self._from[source].sent) > self._taken[source]

    def _take_block(self, source: int, mine: PendingReceive) -> None:
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
            self._deliver(message, mine)

    def _begin(self, source: int, tag: int, size: int) -> IncomingMessage:
        """A message of which the first block is there."""
        message = IncomingMessage(source, tag, size)
        for receive in self._posted:
            if receive.sender < 0 and receive.tag == tag and receive.wanted in {None, source}:
                self._match(message, receive)
                break
        else:
            message.tensor = torch.empty(size, dtype=torch.uint8)
            self._kept.append(message)
        return message

    def _find_kept(self, receive: PendingReceive) -> None:
        for message in self._kept:
            if message.tag == receive.tag and receive.wanted in {None, message.source}:
                self._kept.remove(message)
                self._match(message, receive)
                if message.arrived == message.size:
                    self._deliver(message, receive)
                return

    def _match(self, message: IncomingMessage, receive: PendingReceive) -> None:
        assert receive.tensor is not None
        receive.sender = message.source
        if message.size == receive.tensor.nbytes:
            message.receive = receive
            if message.tensor is None:
                message.tensor = receive.tensor
            return
        message.tensor = None
        sender, me = self._peers.names([message.source]), self._peers.names([self._rank])
        error = CollectiveMismatchError(
            [self._peers.number(message.source)],
            f"{sender} sent {message.size} bytes with tag {message.tag}, but {me} receives "
            f"{receive.tensor.nbytes} bytes",
        )
        self._end(receive, error)

    def _deliver(self, message: IncomingMessage, mine: PendingReceive) -> None:
        """All of it has arrived."""
        receive = message.receive
        if receive is None:
            return
        if message.tensor is not None and message.tensor is not receive.tensor:
            assert receive.tensor is not None
            copy(receive.tensor.data_ptr(), message.tensor.data_ptr(), message.size)
        self._end(receive, None, ring=receive is not mine)

    def _end(self, receive: PendingReceive, error: Exception | None, *, ring: bool = True) -> None:
        """A receive is over. What still comes for it goes nowhere."""
        self._posted.remove(receive)
        if error is not None:
            receive.error = error.with_traceback(None)
            self._calls.append(lambda: self._failed(error))
            for message in self._arriving:
                if message is not None and message.receive is receive:
                    message.receive = message.tensor = None
        receive.tensor = None
        receive.over = True
        self._calls.extend(receive.callbacks)
        if ring and receive.waiters:
            self._ring(self._rank)

    def _make_calls(self) -> None:
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread was faster
                return
            call()

    def _look_around(self, receive: PendingReceive) -> None:
        """Ends a receive if there is no use in waiting any longer."""
        with self._lock:
            if not receive.over and (error := self._hopeless(receive)) is not None:
                self._end(receive, error)
        self._make_calls()

    def _hopeless(self, receive: PendingReceive) -> Exception | None:
        """Why there is no use in waiting any longer."""
        try:
            self._peers.check()
        except Exception as error:
            return error
        if receive.wanted is None:
            sources = self._others
            lost = self._peers.died(sources)
            if lost is None and sources and all(self._peers.lost([rank]) for rank in sources):
                lost = self._peers.lost(sources)
        else:
            sources = [receive.wanted]
            lost = self._peers.lost(sources)
        if any(self._has_more(source) for source in sources):
            return None
        if lost is not None:
            return lost
        if time.monotonic() > receive.deadline:
            names = "any rank" if receive.wanted is None else self._peers.names(sources)
            return CollectiveTimeoutError(f"recv with tag {receive.tag}", receive.seconds, names)
        return None
