"""The connections to a worker's page: how many there may be, and how long they may say nothing."""

import asyncio
import contextlib
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MAX_CONNECTIONS", "BoundedListener", "BoundedLoop", "BoundedProtocol"]

MAX_CONNECTIONS = 64
"""Connections that are open at the same time. A further one takes the place of the oldest one."""

HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that TLS may take to begin."""

REQUEST_TIMEOUT_S = 5.0
"""Seconds within which the line and the headers of a request, the next one too, must have arrived completely."""


@final
class BoundedListener(socket.socket):
    """A listening socket. Those who connect and say nothing keep nobody out, and take few file descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        """Args: listener: the socket that this one takes the place of."""
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self._accepted: deque[weakref.ref[socket.socket]] = deque()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection; ends the oldest one first if there are MAX_CONNECTIONS."""
        connection, address = super().accept()
        is_open = ((each, found) for each in self._accepted if (found := each()) is not None)
        self._accepted = deque(each for each, found in is_open if found.fileno() != -1)
        while len(self._accepted) >= MAX_CONNECTIONS:
            oldest = self._accepted.popleft()()
            with contextlib.suppress(OSError):  # the peer has ended it
                if oldest is not None:
                    oldest.shutdown(socket.SHUT_RDWR)
        self._accepted.append(weakref.ref(connection))
        return connection, address


@final
class BoundedLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers wait HANDSHAKE_TIMEOUT_S for TLS."""

    async def create_server(self, factory: Callable[[], Any], *args: Any, **options: Any) -> asyncio.Server:  # type: ignore[override]
        """Returns a server as `asyncio` does."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT_S
        return await super().create_server(factory, *args, **options)


@final
class BoundedProtocol(H11Protocol):
    """A connection that is closed if its next request does not arrive in time, whatever arrives instead."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Handles bytes, with which a request may be complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request, if it has not arrived already."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)
        elif not is_waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
