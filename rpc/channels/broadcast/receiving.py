"""The receiving end of broadcasts: payloads that one worker sends to several others by one collective."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from ....c10d.groups.membership import GroupSpec
from ....proto.v1 import agent_pb2
from ..base import Arriving
from ..chunked.channel import ChunkedChannel
from .group import BroadcastGroup

__all__ = ["ReceivingGroup"]


@dataclass(slots=True)
class _ExpectedBroadcast:
    """A broadcast that an envelope has announced, and that is received into `data`, of uint8."""

    payload: agent_pb2.BroadcastPayload
    data: torch.Tensor
    done: Arriving


@final
class ReceivingGroup:
    """This worker's membership in a process group in which another worker, the sender, broadcasts payloads.

    If the group fails, this worker requests the first broadcast that it has not received, and all later ones, from
    the sender as chunks: bytes that the sender sends to this worker alone (chunked/).

    All methods but `close` are called on the agent's event loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: GroupSpec | None,
        chunked: ChunkedChannel,
        request_chunks: Callable[[int], None],
        on_removed: Callable[[], object],
    ) -> None:
        """Starts to form the group.

        Args:
            loop: the agent's event loop.
            spec: the members of the group; None to join no group, and to receive all payloads as chunks.
            chunked: the channel for payloads that are sent as chunks.
            request_chunks: asks the sender, once, for chunks of the broadcast with this number and all later ones.
            on_removed: called when the sender announces no more payloads and this worker has left the group. May
                be called twice.
        """
        self._loop = loop
        self._chunked = chunked
        self._request_chunks = request_chunks
        self._on_removed = on_removed
        self._expected: dict[int, _ExpectedBroadcast] = {}
        """By number of the broadcast in the group."""
        self._next_number = 0
        """The number of the first broadcast that has not been received."""
        self._aborted = False
        self._finishing = False
        """Whether `finish` has been called."""
        self._group = None if spec is None else BroadcastGroup(spec, self._on_group_end)
        if self._group is None:
            self.abort()
        else:
            self._group.start()

    def receive(self, payload: agent_pb2.BroadcastPayload) -> Arriving:
        """Returns a future of a payload's bytes, received as chunks if this worker has left the group."""
        if self._aborted or self._group is None:
            return self._chunked.receive(_as_chunked(payload))
        if payload.number < self._next_number or payload.number in self._expected:
            raise ValueError(f"broadcast {payload.number} was announced twice")
        data = torch.empty(payload.nbytes, dtype=torch.uint8)
        expected = _ExpectedBroadcast(payload, data, Arriving())
        self._expected[payload.number] = expected
        self._group.put(payload.number, data, lambda: self._call_soon(self._on_received, payload.number))
        return expected.done

    def discard(self, payload: agent_pb2.BroadcastPayload) -> None:
        """Drops a payload that is not wanted. Leaves the group, since all members must run its broadcasts."""
        self.abort()
        self._chunked.discard(_as_chunked(payload))

    def abort(self) -> None:
        """Leaves the group, and requests chunks of the broadcasts that have not been received."""
        if self._aborted:
            return
        self._aborted = True
        if self._group is not None:
            self._group.abort()
        self._request_chunks(self._next_number)
        for expected in self._take_expected():
            try:
                chunked = self._chunked.receive(_as_chunked(expected.payload))
            except Exception as error:  # most likely no memory; a ValueError rejects the message
                expected.done.set_exception(ValueError(f"a payload cannot be received: {error}"))
            else:
                _forward_outcome(chunked, expected.done)

    def finish(self) -> None:
        """Ends the group after the announced broadcasts. Called when the sender announces no more."""
        self._finishing = True
        if self._group is None or self._aborted:
            self._on_removed()
        else:
            self._group.finish()

    def fail(self, error: Exception) -> None:
        """Fails the announced broadcasts: the sender is lost or suspect, or this worker shuts down."""
        self._aborted = True
        if self._group is not None:
            self._group.abort()
        for expected in self._take_expected():
            expected.done.set_exception(error)

    def close(self) -> None:
        """Ends the group, and waits a while for its thread. Must not be called on the event loop."""
        if self._group is not None:
            self._group.close()

    def _take_expected(self) -> list[_ExpectedBroadcast]:
        """Removes the expected broadcasts, and returns those whose futures are pending, in order of numbers."""
        expected = [each for _, each in sorted(self._expected.items()) if not each.done.done()]
        self._expected.clear()
        return expected

    def _on_received(self, number: int) -> None:
        """Completes the future of a broadcast whose bytes have been received."""
        if (expected := self._expected.pop(number, None)) is not None:
            self._next_number = number + 1
            expected.done.set_result(expected.data.numpy().data)

    def _on_group_end(self, _has_formed: bool, error: Exception | None) -> None:
        """Handles the end of the group. Runs on the group's thread."""
        self._call_soon(self._handle_group_end, error is not None)

    def _handle_group_end(self, failed: bool) -> None:
        """Handles the end of the group on the event loop: requests chunks of what has not been received."""
        if failed or self._expected:
            self.abort()
        if self._finishing:
            self._on_removed()

    def _call_soon(self, function: Callable[[Any], None], argument: int) -> None:
        """Calls a function on the event loop, unless the loop has been closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, argument)


def _as_chunked(payload: agent_pb2.BroadcastPayload) -> agent_pb2.Payload:
    """Returns the description of the payload in chunks that replaces a broadcast."""
    chunked = agent_pb2.ChunkedPayload(transfer_id=payload.transfer_id, nbytes=payload.nbytes)
    return agent_pb2.Payload(chunked=chunked)


def _forward_outcome(source: Arriving, target: Arriving) -> None:
    """Completes the future `target` with the outcome of `source` once `source` is done."""

    def on_done(source: Arriving) -> None:
        if target.done():
            return
        if source.cancelled():
            target.cancel()
        elif (error := source.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(source.result())

    source.add_done_callback(on_done)
