"""Payloads whose connection breaks before they arrive."""

import threading

from gradwire.errors import LossCause
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.contracts.worker_end import WorkerEnd

from tests.remote_functions import wait_until


def test_a_message_is_dropped_whose_connection_breaks_before_it_is_collected(agents, monkeypatch):
    """Its payloads would be waited for, and their memory kept, for ever: nobody sends them again."""
    a, b = agents(2)
    network = a._network
    dropped = threading.Event()
    monkeypatch.setattr(a._dispatcher, "on_dropped", lambda *_: dropped.set())
    envelope = agent_pb2.Envelope(id=9, type=MessageType.CALL)
    envelope.body.chunked.transfer_id, envelope.body.chunked.nbytes = 9, 1000

    async def read_and_break() -> None:
        network.incoming.on_envelope(b.info, envelope, 0)
        network.links.on_broken(b.info, WorkerEnd(LossCause.DISCONNECTED, "its connection broke"), ())

    network._events.run(read_and_break())
    assert dropped.wait(20)
    assert network._router.announced.pending(b.info.wire_id) == (0, 0)
    wait_until(lambda: not network.links.absent)  # it is back
