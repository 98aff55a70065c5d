"""Which channel carries which payload."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from .base import Channel, Start
from .broadcast.sending import Broadcast

__all__ = ["ChannelRouter", "PayloadReader", "PayloadWriter"]

PayloadReader = Callable[[agent_pb2.Payload], Buffer]
"""Tells the bytes of a payload of an envelope that has been collected."""


@final
class PayloadWriter:
    """Finds channels for the payloads of one envelope."""

    def __init__(
        self,
        options: ChannelOptions,
        peer: int,
        small: Channel,
        large: Channel,
        broadcast: Broadcast | None = None,
    ) -> None:
        self._threshold = options.inline_threshold
        self._room = options.max_inline_bytes
        self._peer = peer
        self._small = small
        self._large = large
        self._broadcast = broadcast
        self._position = 0
        self._starts: list[Start] = []
        self.apart: list[agent_pb2.Payload] = []
        """The payloads that are not in the envelope."""
        self.nbytes = 0
        """Bytes of all payloads so far; one that is broadcast counts for its first receiver."""

    def put(self, data: memoryview) -> agent_pb2.Payload:
        """Where the peer will find these bytes."""
        position, self._position = self._position, self._position + 1
        if self._broadcast is not None and (found := self._broadcast.put(self._peer, position, data)) is not None:
            payload, start, first = found
            self._starts.append(start)
            self.apart.append(payload)
            self.nbytes += data.nbytes if first else 0
            return payload
        self.nbytes += data.nbytes
        channel = self._large
        if data.nbytes < self._threshold and data.nbytes <= self._room:
            self._room -= data.nbytes
            channel = self._small
        payload, begin = channel.send(self._peer, data)
        if begin is not None:
            self._starts.append(begin)
        if channel is self._large:
            self.apart.append(payload)
        return payload

    def start(self) -> None:
        """The envelope is on its way: sends the payloads that are not in it."""
        for start in self._starts:
            start()
        self._starts.clear()  # they know the bytes, which are not kept here any longer


@final
class ChannelRouter:
    """Sends small payloads by `small`, others by `large`, those of this worker to itself by `local`.

    Large ones that several workers are to get go by `broadcast`, as far as that can.
    """

    def __init__(
        self,
        options: ChannelOptions,
        self_id: int,
        *,
        small: Channel,
        large: Channel,
        local: Channel,
        broadcast: Channel,
    ) -> None:
        self._options = options
        self._self_id = self_id
        self._small = small
        self._large = large
        self._local = local
        self._by_name = {channel.name: channel for channel in (small, large, local, broadcast)}

    @property
    def channels(self) -> Sequence[Channel]:
        """All of them."""
        return tuple(self._by_name.values())

    def writer(self, peer: int, broadcast: Broadcast | None = None) -> "PayloadWriter":
        """For the payloads of one envelope."""
        beyond = self._local if peer == self._self_id else self._large
        return PayloadWriter(self._options, peer, self._small, beyond, broadcast)

    def _channel(self, peer: int, payload: agent_pb2.Payload) -> Channel:
        channel = self._by_name[payload.WhichOneof("location") or self._small.name]
        return self._large if channel is self._local and peer != self._self_id else channel

    def can_withdraw(self, peer: int, payloads: Sequence[agent_pb2.Payload]) -> bool:
        """Has nothing been sent of any of these payloads to a peer? Called on the loop."""
        return all(self._channel(peer, payload).can_withdraw(peer, payload) for payload in payloads)

    def withdraw(self, peer: int, payloads: Sequence[agent_pb2.Payload]) -> None:
        """Does not send them."""
        for payload in payloads:
            self._channel(peer, payload).withdraw(peer, payload)

    def collect(self, peer: int, envelope: agent_pb2.Envelope) -> "PayloadReader | asyncio.Future[PayloadReader]":
        """The payloads of an envelope: at once if all are here, else when they are. Called on the loop.

        Raises:
            Exception: a payload is refused, or there is no memory for it. None of the others is waited for.
        """
        here: dict[bytes, Buffer] = {}
        coming: dict[bytes, asyncio.Future[Buffer]] = {}
        elsewhere = [p for p in _payloads(envelope) if p.WhichOneof("location") not in (self._small.name, None)]
        try:
            for payload in elsewhere:
                key = payload.SerializeToString()
                data = self._channel(peer, payload).receive(peer, payload)
                if isinstance(data, asyncio.Future):
                    coming[key] = data
                else:
                    here[key] = data
        except Exception:
            for payload in elsewhere:
                self._channel(peer, payload).discard(peer, payload)
            raise

        def arrived(payload: agent_pb2.Payload) -> Buffer:
            if payload.WhichOneof("location") in ("inline", None):
                return payload.inline
            return here[payload.SerializeToString()]

        if not coming:
            return arrived

        async def gather() -> PayloadReader:
            for key, buffer in zip(coming, await asyncio.gather(*coming.values()), strict=True):
                here[key] = buffer
            return arrived

        return asyncio.ensure_future(gather())


def _payloads(envelope: agent_pb2.Envelope) -> Iterator[agent_pb2.Payload]:
    yield envelope.body
    tensors = list(envelope.tensors)
    while tensors:
        tensor = tensors.pop()
        yield tensor.data
        tensors.extend(tensor.parts)
