"""The way up of a message: from its peer to the caller or the server."""

from typing import final

from ...proto.v1 import agent_pb2
from ..channels.payloads import PayloadReader
from ..contracts.messages import CANCEL, CONTROL, ERROR, RESULT
from ..execution.executor import Executor
from ..peers.control import ControlStreams
from ..peers.peer import Pause, Peer
from ..requests.caller import Caller
from ..requests.codec import Extensions
from ..requests.server import Server

__all__ = ["Dispatcher"]

ANSWERS = frozenset({RESULT, ERROR})


@final
class Dispatcher:
    """Hands answers to the calls that wait for them, and requests to the server: a MessageListener."""

    def __init__(
        self,
        caller: Caller,
        server: Server,
        control: ControlStreams,
        extensions: Extensions,
        executor: Executor,
    ) -> None:
        """Makes the dispatcher of one agent."""
        self._caller = caller
        self._server = server
        self._control = control
        self._extensions = extensions
        self._executor = executor

    def on_announced(self, peer: Peer, envelope: agent_pb2.Envelope) -> Pause:
        """Handles an envelope whose payloads have not arrived yet."""
        self._take_control(peer, envelope)
        self._server.arrive(peer, envelope)
        return peer.received.pause

    def on_dropped(self, peer: Peer, envelope: agent_pb2.Envelope) -> None:
        """Handles a message whose payloads will not arrive."""
        self._server.calls.cancel((peer.id, envelope.id))

    def on_message(
        self, peer: Peer, envelope: agent_pb2.Envelope, payloads: PayloadReader, nbytes: int, *, announced: bool
    ) -> Pause:
        """Handles a message that has arrived."""
        kind = envelope.type
        if not announced and envelope.HasField("control") and self._control.receive(peer.control, envelope):
            if kind == CONTROL:
                self._executor.submit(self._control.process, peer.control)
            elif kind in ANSWERS or kind == CANCEL:
                self._control.process_later(peer.control)
            # else whoever serves the request does it first
        if kind == CONTROL:
            pass  # it has nothing else
        elif kind == CANCEL:
            self._server.cancel(peer, envelope.id)
        elif kind in ANSWERS:
            self._caller.receive(peer, envelope, payloads)
        else:
            call = self._server.find(peer, envelope) if announced else self._server.arrive(peer, envelope)
            call.payloads = payloads
            pause = peer.received.add(nbytes)
            self._executor.submit(self._server.serve, call)
            return pause
        return None

    def on_rejected(self, peer: Peer, envelope: agent_pb2.Envelope, error: Exception) -> Pause:
        """Handles a message that cannot be read."""
        self._take_control(peer, envelope)
        pause = peer.received.add(0)
        self._executor.submit(self._reject, peer, envelope, error)
        return pause

    def _take_control(self, peer: Peer, envelope: agent_pb2.Envelope) -> None:
        """Takes the control messages of an envelope whose message is not served now."""
        if envelope.HasField("control") and self._control.receive(peer.control, envelope):
            self._control.process_later(peer.control)

    def _reject(self, peer: Peer, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Runs on a thread of the executor."""
        peer.received.begin()
        self._extensions.on_decode_error(peer.info, envelope, error)
        if envelope.type in ANSWERS:
            self._caller.on_rejected(peer, envelope, error)
        else:
            self._server.reject(peer, envelope, error)
