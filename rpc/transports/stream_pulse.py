"""What tells of a gRPC stream, or of the socket that carries its envelopes, whether the peer is alive."""

import contextlib
from collections.abc import Callable, Iterator
from typing import final

from .grpc_calls import HEARTBEAT
from .outbox import Outbox

__all__ = ["StreamPulse"]


@final
class StreamPulse:
    """Watches one stream: a Watched connection. Used on the event loop only."""

    def __init__(
        self,
        outbox: Outbox,
        wake: Callable[[], None],
        break_off: Callable[[str], None],
        sees_life: Callable[[float], bool],
    ) -> None:
        """Has heard something.

        Args:
            outbox: of the stream.
            wake: has the stream send frames.
            break_off: ends it, for a reason.
            sees_life: what a Watched connection has.
        """
        self.has_sent = True
        """Whether something has been sent by the stream since this was set to False."""
        self._has_heard = True
        self._is_busy = False
        """Whether something has been read that is not handled yet, and nothing more is read."""
        self._outbox = outbox
        self._wake = wake
        self._break_off = break_off
        self.sees_life = sees_life

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager in which a frame of the stream is handled."""
        self._has_heard = self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def take_heard(self) -> bool:
        """Returns whether something has come since the last call, or might have if this worker had read it."""
        if self._outbox.socket is not None:
            return self._outbox.socket.take_heard()
        heard, self._has_heard = self._has_heard, False
        return heard or self._is_busy

    def take_sent(self) -> bool:
        """Returns whether something has been sent since the last call, or waits for the peer to read."""
        if self._outbox.socket is not None:
            return self._outbox.socket.take_sent()
        sent, self.has_sent = self.has_sent, False
        return sent or not self._outbox.is_empty

    def send_heartbeat(self) -> None:
        """Tells the peer that this worker is alive, unless the peer sees that."""
        if self._outbox.socket is not None:
            self._outbox.socket.send_heartbeat()
        elif self._outbox.put_frame(HEARTBEAT):
            self._wake()

    def on_silent(self, seconds: float) -> None:
        """Ends the stream of a peer that has been silent for so long."""
        self._break_off(f"nothing has come from it for {seconds:.1f} s")
