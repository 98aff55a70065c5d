"""Payloads that several workers are to get: one broadcast to all, and chunks for those whom it does not reach."""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch

from ....c10d.group_membership import GroupSpec
from ....proto.v1 import agent_pb2
from ..base import Channel, Start
from .group import BroadcastGroup

__all__ = ["Broadcast", "SendingGroup"]


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Shared:
    """A payload of a call to several workers. It lives until all of them have answered."""

    number: int
    data: memoryview
    by_chunks: dict[int, Start] = field(default_factory=dict)
    """What sends it by itself to a worker that has been told of it."""


@final
class SendingGroup:
    """This worker and several others, to whom it broadcasts. Safe to use from any thread."""

    def __init__(
        self,
        number: int,
        spec: GroupSpec,
        *,
        chunked: Channel,
        over: Callable[["SendingGroup", bool, Exception | None], None],
        tell_end: Callable[[int, int, bool], None],
        sent_again: Callable[[int], None],
    ) -> None:
        """A group that begins to come together now.

        Args:
            number: this worker's count of its groups.
            spec: who and where.
            chunked: what sends payloads that do not arrive.
            over: called with the group, whether it had come together, and what ended it.
            tell_end: called with a receiver, the group's number, and whether it broke.
            sent_again: called with the bytes of a payload that did not arrive.
        """
        self.number = number
        self.receivers = tuple(spec.members[1:])
        self._members = spec.members
        self._chunked = chunked
        self._tell_end = tell_end
        self._sent_again = sent_again
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._alive: weakref.WeakValueDictionary[int, _Shared] = weakref.WeakValueDictionary()
        self._missed: dict[int, int] = {}
        self._users = 0
        self._ended = False
        self._broken = False
        self._group = BroadcastGroup(spec, lambda formed, error: over(self, formed, error))
        self._group.start()

    def acquire(self) -> bool:
        """Somebody is about to send; False if the group has ended."""
        with self._lock:
            self._users += not self._ended
            return not self._ended

    def release(self) -> None:
        """They have sent all they wanted to."""
        with self._lock:
            self._users -= 1
            last = self._ended and not self._users
        if last:
            self._tell_receivers()

    def share(self, data: memoryview) -> _Shared | None:
        """Begins to broadcast these bytes; None if the group has ended."""
        with self._lock:
            if self._ended:
                return None
            shared = _Shared(next(self._numbers), data)
            self._alive[shared.number] = shared
            # Under the lock, so that the numbers come in order.
            self._group.put(shared.number, _as_tensor(data), _nothing)
        return shared

    def announce(self, receiver: int, shared: _Shared) -> tuple[agent_pb2.Payload, Start] | None:
        """What tells a receiver of a broadcast, and what to call once it is told; None if the group has ended."""
        if self._ended:
            return None
        instead, start = self._chunked.send(receiver, shared.data)
        announced = agent_pb2.BroadcastPayload(
            group=self.number,
            number=shared.number,
            nbytes=shared.data.nbytes,
            members=self._members,
            transfer_id=instead.chunked.transfer_id,
        )
        assert start is not None
        return agent_pb2.Payload(broadcast=announced), lambda: self._announced(receiver, shared, start)

    def _announced(self, receiver: int, shared: _Shared, start: Start) -> None:
        with self._lock:
            if shared.number < self._missed.get(receiver, shared.number + 1):
                shared.by_chunks[receiver] = start
                return
        self._sent_again(shared.data.nbytes)
        start()

    def missed(self, receiver: int, first: int) -> None:
        """A receiver has not got the broadcasts from this number on, and will not: sends it those by chunks."""
        with self._lock:
            self._missed.setdefault(receiver, first)
            lacking = [shared for number, shared in sorted(self._alive.items()) if number >= first]
            starts = [(s, start) for s in lacking if (start := s.by_chunks.pop(receiver, None)) is not None]
        self.break_off()
        for shared, start in starts:
            self._sent_again(shared.data.nbytes)
            start()

    def break_off(self) -> None:
        """Ends the group now. What has been announced goes to the receivers by chunks, once they ask for it."""
        with self._lock:
            self._broken = True
            last = not self._ended and not self._users
            self._ended = True
        self._group.stop()
        if last:
            self._tell_receivers()

    def finish(self) -> bool:
        """Ends the group when all is sent; False if it is in use."""
        with self._lock:
            if self._users:
                return False
            last = not self._ended
            self._ended = True
        self._group.finish()
        if last:
            self._tell_receivers()
        return True

    def close(self) -> None:
        """This worker shuts down."""
        self._ended = True
        self._group.close()

    def _tell_receivers(self) -> None:
        # Not before everybody has been told of the last broadcast: a receiver forgets a group that has ended.
        for receiver in self.receivers:
            self._tell_end(receiver, self.number, self._broken)


@final
class Broadcast:
    """What the messages of one call to several workers share: payloads of a threshold's size and more.

    It is kept until all of them have answered: until then any of them may want a payload by chunks.
    """

    def __init__(
        self,
        receivers: tuple[int, ...],
        threshold: int,
        acquire: Callable[[tuple[int, ...]], SendingGroup | None],
    ) -> None:
        """`acquire` is called when there is something to share; the receivers have no group if it returns None."""
        self._receivers = receivers
        self._threshold = threshold
        self._acquire = acquire
        self._group: SendingGroup | None = None
        self._acquired = False
        self._payloads: dict[int, _Shared] = {}

    def put(self, peer: int, position: int, data: memoryview) -> tuple[agent_pb2.Payload, Start, bool] | None:
        """Where a worker finds a payload, which its message has at this position.

        Returns:
            The payload, what to call when its envelope is on its way, and whether this is its first receiver; None
            if it is to be sent in another way: it is small, or not what the first message has there.
        """
        if data.nbytes < self._threshold or peer not in self._receivers:
            return None
        if not self._acquired:
            self._acquired, self._group = True, self._acquire(self._receivers)
        if self._group is None:
            return None
        shared = self._payloads.get(position)
        first = shared is None
        if shared is None:
            shared = self._group.share(data)
            if shared is None:
                return None
            self._payloads[position] = shared
        elif _place(shared.data) != _place(data):
            return None
        announced = self._group.announce(peer, shared)
        return None if announced is None else (*announced, first)

    def not_sent(self, peer: int) -> None:
        """A message was not sent, so its receiver may not know of all broadcasts."""
        if self._group is not None and peer in self._receivers:
            self._group.break_off()

    def sent(self) -> None:
        """All messages have been sent, or could not be."""
        if self._group is not None:
            self._group.release()


def _as_tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


def _place(data: memoryview) -> tuple[int, int]:
    """Where in memory it is; nothing else is there as long as the payload is kept."""
    return np.frombuffer(data, np.uint8).ctypes.data, data.nbytes


def _nothing() -> None:
    pass
