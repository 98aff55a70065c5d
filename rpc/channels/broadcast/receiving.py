"""Payloads that another worker broadcasts to this one and others."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from ....c10d.group_membership import GroupSpec
from ....proto.v1 import agent_pb2
from ...contracts.messages import Buffer
from ..base import Channel
from .group import BroadcastGroup

__all__ = ["ReceivingGroup", "by_chunks"]


@dataclass(slots=True)
class _Expected:
    """A broadcast that has been announced."""

    announced: agent_pb2.BroadcastPayload
    data: torch.Tensor
    arrived: "asyncio.Future[Buffer]"


@final
class ReceivingGroup:
    """This worker's part in a group in which another broadcasts. Lives on the event loop.

    When the group breaks, the sender is told from which broadcast on it has not come to here; it sends those, and
    all that it has announced since, by chunks.
    """

    def __init__(
        self,
        peer: int,
        loop: asyncio.AbstractEventLoop,
        spec: GroupSpec | None,
        chunked: Channel,
        tell_missed: Callable[[int], None],
        forget: Callable[[], None],
    ) -> None:
        """A group that comes together now; without a meeting, one that is broken from the beginning.

        Args:
            peer: the worker that broadcasts.
            loop: the event loop.
            spec: who and where.
            chunked: what receives payloads that were not broadcast.
            tell_missed: called once at most, with the number of the first broadcast that has not come.
            forget: called when nothing more comes, and all that came is handed over.
        """
        self._peer = peer
        self._loop = loop
        self._chunked = chunked
        self._tell_missed = tell_missed
        self._forget = forget
        self._expected: dict[int, _Expected] = {}
        self._next = 0
        self._broken = False
        self._finishing = False
        self._group = None if spec is None else BroadcastGroup(spec, self._over)
        if self._group is None:
            self.break_off()
        else:
            self._group.start()

    def receive(self, announced: agent_pb2.BroadcastPayload) -> "asyncio.Future[Buffer] | Buffer":
        """A future of the bytes. Raises if there is no memory for them, or they were announced before."""
        if self._broken or self._group is None:
            return self._chunked.receive(self._peer, by_chunks(announced))
        if announced.number < self._next or announced.number in self._expected:
            raise ValueError(f"broadcast {announced.number} was announced twice")
        data = torch.empty(announced.nbytes, dtype=torch.uint8)
        expected = _Expected(announced, data, self._loop.create_future())
        self._expected[announced.number] = expected
        self._group.put(announced.number, data, lambda: self._soon(self._got, announced.number))
        return expected.arrived

    def discard(self, announced: agent_pb2.BroadcastPayload) -> None:
        """A payload is not wanted. The others must not wait for this worker to take part, so it leaves them."""
        self.break_off()
        self._chunked.discard(self._peer, by_chunks(announced))

    def break_off(self) -> None:
        """Leaves the group; what has been announced and is not here will come by chunks."""
        if self._broken:
            return
        self._broken = True
        if self._group is not None:
            self._group.stop()
        self._tell_missed(self._next)
        for expected in self._take_expected():
            try:
                instead = self._chunked.receive(self._peer, by_chunks(expected.announced))
            except Exception as error:  # no memory, most likely
                expected.arrived.set_exception(ValueError(f"a payload cannot be received: {error}"))
            else:
                assert isinstance(instead, asyncio.Future)
                _hand_on(instead, expected.arrived)

    def finish(self) -> None:
        """The sender announces nothing more."""
        self._finishing = True
        if self._group is None or self._broken:
            self._forget()
        else:
            self._group.finish()

    def drop(self, reason: str) -> None:
        """The sender is gone, or this worker shuts down: nothing more comes."""
        self._broken = True
        if self._group is not None:
            self._group.stop()
        for expected in self._take_expected():
            expected.arrived.set_exception(ConnectionError(reason))

    def close(self) -> None:
        """Waits for the end of the thread. Called from any thread but the event loop's."""
        if self._group is not None:
            self._group.close()

    def _take_expected(self) -> list[_Expected]:
        expected = [each for _, each in sorted(self._expected.items()) if not each.arrived.done()]
        self._expected.clear()
        return expected

    def _got(self, number: int) -> None:
        if (expected := self._expected.pop(number, None)) is not None:
            self._next = number + 1
            expected.arrived.set_result(expected.data.numpy().data)

    def _over(self, _formed: bool, error: Exception | None) -> None:
        self._soon(self._ended, error is not None)

    def _ended(self, broken: bool) -> None:
        if broken or self._expected:
            self.break_off()
        if self._finishing:
            self._forget()

    def _soon(self, function: Callable[[Any], None], argument: int) -> None:
        """Calls a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function, argument)


def by_chunks(announced: agent_pb2.BroadcastPayload) -> agent_pb2.Payload:
    """The payload that comes in place of a broadcast one."""
    chunked = agent_pb2.ChunkedPayload(transfer_id=announced.transfer_id, nbytes=announced.nbytes)
    return agent_pb2.Payload(chunked=chunked)


def _hand_on(source: "asyncio.Future[Buffer]", target: "asyncio.Future[Buffer]") -> None:
    def done(source: "asyncio.Future[Buffer]") -> None:
        if target.done():
            return
        if source.cancelled():
            target.cancel()
        elif (error := source.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(source.result())

    source.add_done_callback(done)
