"""The receiving end of chunks: the payloads that one peer has announced, and not completely sent."""

import asyncio
from typing import final

import torch

from ..base import Arriving

__all__ = ["ChunkReceiver"]


@final
class ChunkReceiver:
    """The payloads that one peer has announced and not completely sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transfers: dict[int, _IncomingPayload | _DiscardedPayload] = {}
        """By transfer id."""
        self._announced = asyncio.Condition()
        """Notified when a transfer is announced, and at the end."""
        self._has_failed = False

    @property
    def expected(self) -> int:
        """The number of payloads that have not been sent completely, those included that are not wanted."""
        return len(self._transfers)

    def expect(self, number: int, nbytes: int) -> Arriving:
        """Allocates memory for a payload, and returns a future of it."""
        if number in self._transfers:
            raise ValueError(f"transfer {number} was announced twice")
        payload = _IncomingPayload(nbytes)
        self._announce(number, payload)
        return payload.done

    def discard(self, number: int, nbytes: int) -> None:
        """Drops a payload, before or after `expect`: its chunks are read and forgotten."""
        known = self._transfers.get(number)
        if known is not None:
            known.discard()
        else:
            self._announce(number, _DiscardedPayload(nbytes))

    async def add_chunk(self, number: int, data: bytes) -> None:
        """Adds the next chunk to a payload; waits until the payload is announced."""
        async with self._announced:
            await self._announced.wait_for(lambda: number in self._transfers or self._has_failed)
        payload = self._transfers.get(number)
        if payload is not None and payload.add(data):
            del self._transfers[number]

    def fail(self, error: Exception) -> None:
        """Fails all payloads, because the peer is lost or suspect."""
        self._has_failed = True
        for payload in self._transfers.values():
            payload.fail(error)
        self._transfers.clear()
        self._loop.create_task(self._notify())

    def _announce(self, number: int, payload: "_IncomingPayload | _DiscardedPayload") -> None:
        self._transfers[number] = payload
        self._loop.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._announced:
            self._announced.notify_all()


@final
class _IncomingPayload:
    """A payload whose chunks are copied into its memory."""

    def __init__(self, nbytes: int) -> None:
        self.done = Arriving()
        self._bytes = torch.empty(nbytes, dtype=torch.uint8).numpy().data
        self._received = 0

    def add(self, data: bytes) -> bool:
        """Adds the next chunk; returns whether the payload is complete or has failed."""
        end = self._received + len(data)
        if end > len(self._bytes):
            self.fail(ValueError(f"more than the announced {len(self._bytes)} bytes were sent"))
            return True
        if not self.done.cancelled():
            self._bytes[self._received : end] = data
        self._received = end
        if end < len(self._bytes):
            return False
        if not self.done.done():
            self.done.set_result(self._bytes)
        return True

    def discard(self) -> None:
        self.done.cancel()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@final
class _DiscardedPayload:
    """A payload whose chunks are dropped."""

    def __init__(self, nbytes: int) -> None:
        self._bytes_left = nbytes

    def add(self, data: bytes) -> bool:
        """Counts the next chunk; returns whether it was the last one."""
        self._bytes_left -= len(data)
        return self._bytes_left <= 0

    def discard(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass
