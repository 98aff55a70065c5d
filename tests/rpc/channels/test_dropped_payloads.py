"""Payloads whose connection breaks before they arrive."""

import queue
import threading
from functools import partial

import pytest
import torch
from gradwire import rpc
from gradwire.errors import LossCause, RpcError, RpcTimeoutError, WorkerSuspectError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.channels.base import PayloadLostError
from gradwire.rpc.channels.broadcast import RESEND
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.contracts.worker import WorkerEnd, WorkerInfo
from gradwire.rpc.transports.socket_frames import HEADER, FrameKind

from tests.event_loop import run_on_loop
from tests.remote_functions import identity, wait_until


def test_a_message_is_dropped_whose_connection_breaks_before_it_is_collected(agents, monkeypatch):
    """Its payloads would be waited for, and their memory kept, for ever: nobody sends them again."""
    a, b = agents(2)
    dropped = threading.Event()
    monkeypatch.setattr(a._dispatcher, "on_dropped", lambda *_: dropped.set())
    envelope = agent_pb2.Envelope(id=9, type=MessageType.CALL, has_payloads=True)
    envelope.body.chunked.transfer_id, envelope.body.chunked.nbytes = 9, 1000

    async def read_and_break() -> None:
        a.peers.of(b.info).on_envelope(envelope, 0)
        a.peers.of(b.info).on_broken(WorkerEnd(LossCause.DISCONNECTED, "its connection broke"), ())

    run_on_loop(read_and_break())
    assert dropped.wait(20)
    assert a.peers.of(b.info).channels.announced.count == 0
    wait_until(lambda: a.peers.of(b.info).absence is None)  # it is back


def test_a_message_is_dropped_that_is_read_after_its_connection_broke(agents, monkeypatch):
    """Its payload is not sent by the next connection, on which it would be waited for."""
    a, b = agents(2, transports=("tcp", "grpc"))
    with holder.using(a):
        rpc.rpc_sync(b.info, identity, (1,))
    peer = a.peers.of(b.info)
    connection = peer.stream.outbox.socket
    dropped = threading.Event()
    monkeypatch.setattr(a._dispatcher, "on_dropped", lambda *_: dropped.set())

    async def break_off() -> None:
        peer.break_off("its connection broke")

    run_on_loop(break_off())
    wait_until(lambda: peer.absence is None)
    envelope = agent_pb2.Envelope(id=9, type=MessageType.CALL, has_payloads=True)
    envelope.body.chunked.transfer_id, envelope.body.chunked.nbytes = 9, 1000
    data = envelope.SerializeToString()
    connection._reader.take(HEADER.pack(len(data), FrameKind.ENVELOPE) + data)
    assert dropped.wait(20)
    assert peer.channels.announced.count == 0


def read_old_message(agent: GrpcAgent, source: WorkerInfo, payload: agent_pb2.Payload) -> None:
    """Has an agent read a message with this payload after the connection by which it came has broken."""
    peer = agent.peers.of(source)

    async def break_and_read() -> None:
        peer.break_off("its connection broke")
        peer.on_envelope(agent_pb2.Envelope(id=9, type=MessageType.CALL, body=payload, has_payloads=True), 0)

    run_on_loop(break_and_read())


def test_a_segment_of_a_connection_that_broke_is_lost_and_no_attack(agents, monkeypatch):
    """What a worker has not read by then is still in its socket."""
    a, b = agents(2, transports=("unix", "grpc"))
    data = torch.ones(1 << 16)
    with holder.using(b):
        assert torch.equal(rpc.rpc_sync(a.info, identity, (data,)), data)
    highest = a.peers.of(b.info).channels.shared_memory.segments.mapped.highest
    rejected: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    monkeypatch.setattr(a._server, "reject", lambda _source, _envelope, error: rejected.put(error))
    for number, is_lost in ((highest, True), (highest, True), (highest + 1, False)):
        segment = agent_pb2.SegmentPayload(number=number, nbytes=data.nbytes)
        read_old_message(a, b.info, agent_pb2.Payload(segment=segment))
        assert isinstance(rejected.get(timeout=20), PayloadLostError) == is_lost
        wait_until(lambda: a.peers.of(b.info).absence is None)  # it is back


@pytest.mark.parametrize("is_late", [False, True])
def test_a_payload_is_not_sent_whose_connection_breaks_before_it_is_queued(agents, is_late):
    """Its envelope went by that connection: on the next one, it would hold up all payloads behind it."""
    a, b = agents(2, transports=("grpc",))
    data = torch.ones(1 << 16)
    with holder.using(a):
        assert torch.equal(rpc.rpc_sync(b.info, identity, (data,)), data)
    peer = a.peers.of(b.info)

    async def start_and_break() -> None:
        _, start = peer.channels.chunked.send(memoryview(bytes(1000)))
        transport = peer.transport
        if is_late:  # its thread has queued the envelope, and was interrupted then
            peer.break_off("its connection broke")
        start(transport)  # queued when the loop gets to it
        assert peer.channels.chunked.queued_bytes == 1000
        if not is_late:
            peer.break_off("its connection broke")

    run_on_loop(start_and_break())
    wait_until(lambda: peer.absence is None)
    assert peer.channels.chunked.queued_bytes == 0
    with holder.using(a):
        assert torch.equal(rpc.rpc_sync(b.info, identity, (data,), timeout=20), data)


def test_chunks_of_a_broadcast_are_not_sent_whose_connection_broke_before_they_were_requested(agents):
    """The receiver expects them no more, and reads nothing behind them."""
    a, b, c = agents(3, transports=("grpc",))
    data = torch.ones(1 << 18)
    with holder.using(a):
        assert torch.equal(rpc.rpc_sync(b.info, identity, (data,)), data)
    peer = a.peers.of(b.info)
    shared = a._network.channels.broadcasts.broadcast([peer.channels, a.peers.of(c.info).channels])
    assert shared is not None
    sent = shared.put(peer.channels, 0, memoryview(data.numpy()).cast("B"))
    assert sent is not None
    payload, start, _ = sent
    assert start is not None
    start(peer.transport)

    async def break_off() -> None:
        peer.break_off("its connection broke")

    run_on_loop(break_off())
    wait_until(lambda: peer.absence is None)
    requested = threading.Event()
    b.control.send(a.info, RESEND, (payload.broadcast.group, 0), lambda _error: requested.set())
    assert requested.wait(20)
    shared.release()
    with holder.using(a):
        assert torch.equal(rpc.rpc_sync(b.info, identity, (data,), timeout=20), data)


def test_a_call_fails_whose_payload_went_by_a_stream_that_was_refused(agents):
    """As one of a connection of which only one of the two workers had noticed the end."""
    a, b = agents(2, transports=("grpc",))
    data = torch.ones(1 << 16)
    with holder.using(a):
        rpc.rpc_sync(b.info, identity, (1,))
        b.peers.of(a.info).channels.chunked.is_served = True
        with pytest.raises(WorkerSuspectError):
            rpc.rpc_sync(b.info, identity, (data,), timeout=20)
        wait_until(lambda: a.peers.of(b.info).absence is None)
        assert torch.equal(rpc.rpc_sync(b.info, identity, (data,), timeout=20), data)


def test_no_call_waits_for_what_a_connection_that_broke_has_not_carried(agents):
    """Large tensors are sent by other connections than that which breaks."""
    a, b = agents(2, transports=("grpc",))
    data = torch.ones(1 << 16)
    peer, back = a.peers.of(b.info), b.peers.of(a.info)
    begun, timed_out, has_ended = [], [], threading.Event()

    def call() -> None:
        with holder.using(a):
            while not has_ended.is_set():
                begun.append(None)
                try:
                    rpc.rpc_sync(b.info, identity, (data,), timeout=20)
                except RpcTimeoutError as error:
                    timed_out.append(error)
                except RpcError:
                    pass

    def has_begun(count: int) -> bool:
        return len(begun) >= count

    async def break_off() -> None:
        peer.break_off("its connection broke")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        wait_until(partial(has_begun, len(begun) + len(threads)))
        run_on_loop(break_off())
        wait_until(lambda: peer.absence is None)
    has_ended.set()
    for thread in threads:
        thread.join()
    assert not timed_out
    wait_until(lambda: peer.channels.announced.count == back.channels.announced.count == 0)
