"""Point-to-point messages: a channel of blocks in shared memory for each ordered pair of ranks.

A sender writes a message to the channel block by block; each block says how long the whole message is and which
tag it has. Receives are posted, and are matched with messages of their tag in the order of both. A thread that
waits for one receive reads the channels of all posted receives: bytes go straight to the tensor of the matching
receive. As in MPI, a message without a matching receive is *unexpected*: it is buffered, so that it does not block
the messages behind it.

All threads that wait watch one doorbell, the inbox of the rank. Every block that is sent rings it, and so does a
thread that has completed a receive that another thread waits for. Usually a thread of the program soon waits for a
receive that it has posted, and reads the message itself. A progress thread polls for receives that none waits for.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from ....errors import CollectiveMismatchError, CollectiveTimeoutError
from ..staging import memmove
from ..threads import PollingThread
from .peers import Peers
from .segment import BLOCKS_PER_CHANNEL, CACHE_LINE_BYTES, LINE_WORDS, Segment

__all__ = ["P2PChannels", "PendingReceive"]

POLL_INTERVAL_S = 0.005
"""Seconds between two polls for receives that no thread waits for."""


@final
class PendingReceive:
    """A receive in flight, a PendingOperation.

    The channels' lock guards its attributes. `from_rank` is None for any.
    """

    def __init__(
        self, channels: "P2PChannels", tensor: Tensor, from_rank: int | None, tag: int, timeout: float
    ) -> None:
        self._channels = channels
        self.tensor: Tensor | None = tensor  # until the receive is done
        self.from_rank: Final = from_rank
        self.tag: Final = tag
        self.timeout: Final = timeout
        self.deadline: Final = time.monotonic() + timeout
        self.sender = -1  # until a message is matched
        self.waiters = 0  # threads in `wait`
        self.is_done = False
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> None:
        """Receives blocks until the message is complete, see PendingOperation.wait."""
        if not self.is_done:
            self._channels.wait(self, timeout)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Returns whether the receive has finished, after receiving the blocks that are there."""
        return self.is_done or self._channels.poll(self)

    def source(self) -> int:
        """Returns the rank that sent the message."""
        return self.sender

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the receive is done, or immediately if it is done already."""
        self._channels.add_callback(self, callback)


@final
@dataclass(slots=True, eq=False)
class _IncomingMessage:
    """A message of which at least the first block has been read from its channel.

    received: bytes that have been read from the channel.
    tensor: where its bytes go, the tensor of its receive or a buffer; None if they are discarded.
    """

    source: int
    tag: int
    size: int
    received: int = 0
    receive: PendingReceive | None = None
    tensor: Tensor | None = None


@final
class P2PChannels:
    """Sends and receives over the channels of one rank. Used from any thread; sends to one peer follow each other.

    `on_failure` is called with the error of a receive that fails.
    """

    def __init__(self, segment: Segment, peers: Peers, on_failure: Callable[[Exception], None]) -> None:
        layout = segment.layout
        self._doorbells = segment.doorbells
        self._peers = peers
        self._on_failure = on_failure
        self._address = segment.address
        self._rank = me = peers.rank
        self._size = peers.size
        self._others = [rank for rank in range(peers.size) if rank != me]
        self._block_bytes = layout.block_bytes
        self._block_stride = CACHE_LINE_BYTES + layout.block_bytes
        ranks = range(peers.size)
        self._outgoing = [layout.channel(me, peer) for peer in ranks]
        self._incoming = [layout.channel(peer, me) for peer in ranks]
        self._inboxes = [layout.inbox_doorbell(rank) for rank in ranks]
        self._sent_blocks = [0] * peers.size
        self._ring_numbers = itertools.count(1)
        # Of receives, guarded by the lock:
        self._lock = threading.Lock()
        self._received_blocks = [0] * peers.size
        self._posted: list[PendingReceive] = []
        self._unexpected: deque[_IncomingMessage] = deque()
        self._partial: list[_IncomingMessage | None] = [None] * peers.size
        self._callbacks: deque[Callable[[], None]] = deque()
        """Callbacks to run once the lock is free."""
        self._without_waiter: list[PendingReceive] = []  # that the last poll found
        self._progress_thread = PollingThread("gradwire-receives", self._advance_unwaited, POLL_INTERVAL_S)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        """Writes a message to the channel to `peer`; returns when the last block is written."""
        self._peers.check()
        deadline = time.monotonic() + timeout
        doorbells, words, channel = self._doorbells, self._doorbells.words, self._outgoing[peer]
        address, size = tensor.data_ptr(), tensor.nbytes

        def check() -> None:
            self._peers.check()
            lost = self._peers.find_lost([peer])
            if lost is not None:
                raise lost
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"send with tag {tag}", timeout, self._peers.describe([peer]))

        for start in range(0, max(size, 1), self._block_bytes):
            number = self._sent_blocks[peer]
            doorbells.wait_for(channel.received, number + 1 - BLOCKS_PER_CHANNEL, check)
            block = channel.blocks + number % BLOCKS_PER_CHANNEL * self._block_stride
            words[block // 8] = tag
            words[block // 8 + 1] = size
            data = self._address + block + CACHE_LINE_BYTES
            memmove(data, address + start, min(size - start, self._block_bytes))
            self._sent_blocks[peer] = number + 1
            words[channel.sent * LINE_WORDS] = number + 1  # not rung: receivers wait on their inbox only
            self._ring_inbox(peer)

    def _ring_inbox(self, rank: int) -> None:
        # Several ranks ring this doorbell, each with values that no other uses.
        self._doorbells.ring(self._inboxes[rank], next(self._ring_numbers) * self._size + self._rank)

    def can_send(self, size: int, peer: int) -> bool:
        """Returns whether a message of `size` bytes fits into the free blocks of the channel to `peer`."""
        in_flight = self._sent_blocks[peer] - self._doorbells.value(self._outgoing[peer].received)
        return max(-(-size // self._block_bytes), 1) <= BLOCKS_PER_CHANNEL - in_flight

    def post_receive(self, tensor: Tensor, from_rank: int | None, tag: int, timeout: float) -> PendingReceive:
        """Posts a receive of a message with this tag from a rank, or from any rank if it is None."""
        self._peers.check()
        receive = PendingReceive(self, tensor, from_rank, tag, timeout)
        with self._lock:
            self._posted.append(receive)
            self._match_unexpected(receive)
        self._run_callbacks()
        self._progress_thread.start()
        return receive

    def wait(self, receive: PendingReceive, timeout: float | None) -> None:
        """Blocks until a receive is done. Raises TimeoutError if it is not after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        doorbells, inbox = self._doorbells, self._inboxes[self._rank]
        with self._lock:
            receive.waiters += 1
        try:
            while True:
                with self._lock:
                    seen = doorbells.value(inbox)  # before reading the channels: what is sent later rings again
                    self._read_channels(receive)
                if self._callbacks:
                    self._run_callbacks()
                if receive.is_done:
                    return
                has_rung = doorbells.wait_for_change(inbox, seen)
                now = time.monotonic()
                if not has_rung or now > receive.deadline:
                    self._fail_if_stalled(receive)
                if deadline is not None and now > deadline and not receive.is_done:
                    raise TimeoutError
        finally:
            with self._lock:
                receive.waiters -= 1
            if not receive.is_done:  # as after a timeout: nobody reads the channels now
                self._progress_thread.start()

    def poll(self, receive: PendingReceive) -> bool:
        """Reads what has arrived, and returns whether the receive is done."""
        # Does not block on the lock: a signal handler that writes the flight recorder may run on its holder.
        if self._lock.acquire(blocking=False):
            try:
                self._read_channels(receive)
            finally:
                self._lock.release()
            self._run_callbacks()
        return receive.is_done

    def add_callback(self, receive: PendingReceive, callback: Callable[[], None]) -> None:
        """Calls `callback` when a receive is done; at once if it is done already."""
        with self._lock:
            if not receive.is_done:
                receive.callbacks.append(callback)
                callback = self._progress_thread.wake
        callback()

    def close(self) -> None:
        """Ends the progress thread. Receives are done, or fail when a thread waits for them again."""
        self._progress_thread.close()
        self._without_waiter = []  # they refer to the channels

    def _advance_unwaited(self) -> float | None:
        """Polls for receives that no thread waits for: the progress thread waits for one found twice in a row.

        Once is enough for a receive with a callback.
        """
        with self._lock:
            found = [receive for receive in self._posted if not receive.waiters]
        previous, self._without_waiter = self._without_waiter, found
        due = next((receive for receive in found if receive in previous or receive.callbacks), None)
        if due is None:
            return POLL_INTERVAL_S if found else None
        with suppress(Exception):  # the receive stores it, and raises it when its user waits
            due.wait(None)  # which advances all other posted receives too
        return 0.0

    # The lock is held in all of the following but _run_callbacks and _fail_if_stalled.

    def _read_channels(self, receive: PendingReceive) -> None:
        """Reads the blocks that have arrived for any posted receive, until `receive` is done."""
        sources = {posted.from_rank for posted in self._posted}
        for source in range(self._size) if None in sources else sources:
            assert source is not None
            while not receive.is_done and self._has_block(source):
                self._read_block(source, receive)

    def _has_block(self, source: int) -> bool:
        return self._doorbells.value(self._incoming[source].sent) > self._received_blocks[source]

    def _read_block(self, source: int, caller: PendingReceive) -> None:
        """Reads one block; `caller` is the receive that the calling thread waits for."""
        number, channel = self._received_blocks[source], self._incoming[source]
        block = channel.blocks + number % BLOCKS_PER_CHANNEL * self._block_stride
        message = self._partial[source]
        if message is None:
            words = self._doorbells.words
            message = self._start_message(source, words[block // 8], words[block // 8 + 1])
            self._partial[source] = message
        count = min(message.size - message.received, self._block_bytes)
        if message.tensor is not None:
            data = self._address + block + CACHE_LINE_BYTES
            memmove(message.tensor.data_ptr() + message.received, data, count)
        message.received += count
        self._received_blocks[source] = number + 1
        self._doorbells.ring(channel.received, number + 1)
        if message.received == message.size:
            self._partial[source] = None
            self._complete(message, caller)

    def _start_message(self, source: int, tag: int, size: int) -> _IncomingMessage:
        """Matches a message with a posted receive, or buffers it as unexpected."""
        message = _IncomingMessage(source, tag, size)
        for receive in self._posted:
            if receive.sender < 0 and receive.tag == tag and receive.from_rank in {None, source}:
                self._match(message, receive)
                break
        else:
            message.tensor = torch.empty(size, dtype=torch.uint8)
            self._unexpected.append(message)
        return message

    def _match_unexpected(self, receive: PendingReceive) -> None:
        for message in self._unexpected:
            if message.tag == receive.tag and receive.from_rank in {None, message.source}:
                self._unexpected.remove(message)
                self._match(message, receive)
                if message.received == message.size:
                    self._complete(message, receive)
                return

    def _match(self, message: _IncomingMessage, receive: PendingReceive) -> None:
        """Gives a message to a receive, which fails if their sizes differ."""
        assert receive.tensor is not None
        receive.sender = message.source
        if message.size == receive.tensor.nbytes:
            message.receive = receive
            if message.tensor is None:
                message.tensor = receive.tensor
            return
        message.tensor = None
        sender, me = self._peers.describe([message.source]), self._peers.describe([self._rank])
        error = CollectiveMismatchError(
            [self._peers.global_ranks[message.source]],
            f"{sender} sent {message.size} bytes with tag {message.tag}, but {me} receives "
            f"{receive.tensor.nbytes} bytes",
        )
        self._finish(receive, error)

    def _complete(self, message: _IncomingMessage, caller: PendingReceive) -> None:
        receive = message.receive
        if receive is None:
            return
        if message.tensor is not None and message.tensor is not receive.tensor:
            assert receive.tensor is not None
            memmove(receive.tensor.data_ptr(), message.tensor.data_ptr(), message.size)
        self._finish(receive, None, wake_waiters=receive is not caller)

    def _finish(self, receive: PendingReceive, error: Exception | None, *, wake_waiters: bool = True) -> None:
        """Marks a receive as done. If it failed, what still arrives for it is discarded."""
        self._posted.remove(receive)
        if error is not None:
            receive.error = error.with_traceback(None)
            self._callbacks.append(lambda: self._on_failure(error))
            for message in self._partial:
                if message is not None and message.receive is receive:
                    message.receive = message.tensor = None
        receive.tensor = None
        receive.is_done = True
        self._callbacks.extend(receive.callbacks)
        if wake_waiters and receive.waiters:
            self._ring_inbox(self._rank)

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread took the last one
                return
            callback()

    def _fail_if_stalled(self, receive: PendingReceive) -> None:
        """Fails a receive that can no longer succeed, or has timed out."""
        with self._lock:
            if not receive.is_done and (error := self._failure_of(receive)) is not None:
                self._finish(receive, error)
        self._run_callbacks()

    def _failure_of(self, receive: PendingReceive) -> Exception | None:
        """Returns why a receive fails now; None if it may still succeed."""
        try:
            self._peers.check()
        except Exception as error:
            return error
        if receive.from_rank is None:
            sources = self._others
            lost = self._peers.find_dead(sources)
            if lost is None and sources and all(self._peers.find_lost([rank]) for rank in sources):
                lost = self._peers.find_lost(sources)
        else:
            sources = [receive.from_rank]
            lost = self._peers.find_lost(sources)
        if any(self._has_block(source) for source in sources):
            return None
        if lost is not None:
            return lost
        if time.monotonic() > receive.deadline:
            names = "any rank" if receive.from_rank is None else self._peers.describe(sources)
            return CollectiveTimeoutError(f"recv with tag {receive.tag}", receive.timeout, names)
        return None
