"""The receiving end of chunks: the payloads that one peer has announced, and not completely sent."""

import asyncio
from typing import final

import torch

from ..base import Arriving

__all__ = ["ChunkReceiver"]


@final
class ChunkReceiver:
    """The payloads that one peer has announced and not completely sent. Used on the event loop only."""

    def __init__(self) -> None:
        self._transfers: dict[int, _Payload] = {}
        """By transfer id."""
        self._has_changed = asyncio.Event()
        """Set when a transfer is announced, and at the end."""
        self._has_failed = False

    @property
    def expected(self) -> int:
        """The number of payloads that have not been sent completely, those included that are not wanted."""
        return len(self._transfers)

    def expect(self, number: int, nbytes: int) -> Arriving:
        """Allocates memory for a payload, and returns a future of it."""
        if number in self._transfers:
            raise ValueError(f"transfer {number} was announced twice")
        payload = _Payload(nbytes, torch.empty(nbytes, dtype=torch.uint8).numpy().data)
        self._announce(number, payload)
        return payload.done

    def discard(self, number: int, nbytes: int) -> None:
        """Drops a payload, before or after `expect`: its chunks are read and forgotten."""
        known = self._transfers.get(number)
        if known is not None:
            known.discard()
        else:
            self._announce(number, _Payload(nbytes, None))

    async def add_chunk(self, number: int, data: bytes) -> None:
        """Adds the next chunk to a payload; waits until the payload is announced."""
        while number not in self._transfers and not self._has_failed:
            self._has_changed.clear()
            await self._has_changed.wait()
        payload = self._transfers.get(number)
        if payload is not None and payload.add(data):
            del self._transfers[number]

    def fail(self, error: Exception) -> None:
        """Fails all payloads, because the peer is lost or suspect."""
        self._has_failed = True
        for payload in self._transfers.values():
            payload.fail(error)
        self._transfers.clear()
        self._has_changed.set()

    def _announce(self, number: int, payload: "_Payload") -> None:
        self._transfers[number] = payload
        self._has_changed.set()


@final
class _Payload:
    """A payload whose chunks are copied into its memory, or dropped if it is not wanted."""

    def __init__(self, nbytes: int, memory: memoryview | None) -> None:
        self.done = Arriving()
        self._nbytes = nbytes
        self._memory = memory
        self._received = 0

    def add(self, data: bytes) -> bool:
        """Adds the next chunk; returns whether the payload is complete or has failed."""
        begin, self._received = self._received, self._received + len(data)
        if self._received > self._nbytes:
            self.fail(ValueError(f"more than the announced {self._nbytes} bytes were sent"))
            return True
        is_complete = self._received == self._nbytes
        if self._memory is not None:
            self._memory[begin : self._received] = data
            if is_complete and not self.done.done():
                self.done.set_result(self._memory)
        return is_complete

    def discard(self) -> None:
        self._memory = None
        self.done.cancel()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
