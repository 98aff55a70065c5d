"""What a worker may have announced, answered and asked for without end is bounded, and concerns nobody else."""

import asyncio
import concurrent.futures
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import LimitReachedError, LossCause, RpcError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.channels import base, chunked
from gradwire.rpc.channels.base import AnnouncedPayloads, ChannelDependencies
from gradwire.rpc.channels.cuda import channel as cuda_channel
from gradwire.rpc.channels.payloads import EnvelopePayloads
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import CALL, ERROR, RESULT
from gradwire.rpc.contracts.options import FlowControlOptions
from gradwire.rpc.contracts.worker import WorkerEnd
from gradwire.rpc.execution import executor
from gradwire.rpc.peers.flow_control import Backlog, Backlogs
from gradwire.rpc.peers.peer import ReceivedQueue
from gradwire.rpc.transports import outbox

from tests.event_loop import run_on_loop
from tests.remote_functions import add, identity, wait_until

MIB = 1 << 20


def test_payloads_that_have_not_arrived_are_bounded(monkeypatch):
    monkeypatch.setattr(base, "MAX_ANNOUNCED", 5)
    payloads = AnnouncedPayloads(100)
    payloads.begin(2, 400)
    with pytest.raises(LimitReachedError, match="payloads of 1 bytes are refused: 2 of 400 bytes"):
        payloads.begin(1, 1)
    payloads.end(2, 400)
    payloads.begin(5, 5)
    with pytest.raises(LimitReachedError):
        payloads.begin(1, 1)
    payloads.end(5, 5)
    payloads.begin(1, 400)
    assert (payloads.count, payloads.nbytes) == (1, 400)


def announcement(number: int, nbytes: int) -> agent_pb2.Envelope:
    """An envelope of a call whose body is to come by chunks."""
    envelope = agent_pb2.Envelope(id=number, type=CALL, has_payloads=True)
    envelope.body.chunked.transfer_id, envelope.body.chunked.nbytes = number, nbytes
    return envelope


def test_a_worker_that_announces_too_much_is_refused(agents):
    """Without a bound, each of the envelopes had memory allocated for as much as the options allow."""
    a, b, c = agents(3, channels=rpc.ChannelOptions(max_payload_bytes=MIB))
    of_b = a.peers.of(b.info).channels.announced
    for number in range(1, 10):
        a.peers.of(b.info).on_envelope(announcement(number, MIB), 100)
    wait_until(lambda: (of_b.count, of_b.nbytes) == (4, 4 * MIB))
    wait_until(lambda: not a.peers.of(b.info).received.figures()["received_requests"])
    wait_until(lambda: len(a._server.waiting) == 4)  # those that are refused are forgotten a moment later
    with holder.using(c):
        tensor = torch.ones(MIB // 4, requires_grad=True)
        assert torch.equal(rpc.rpc_sync(a.info, identity, (tensor,)), tensor)
    b.shutdown(graceful=False, timeout=0)
    with holder.using(c):
        assert rpc.rpc_sync(a.info, add, (1, 2)) == 3
    wait_until(lambda: (of_b.count, of_b.nbytes) == (0, 0))


@pytest.mark.parametrize("transports", [("grpc",), ("tcp", "grpc"), ("unix", "tcp", "grpc")])
def test_payloads_that_have_arrived_are_not_counted(agents, transports):
    a, b = agents(2, transports=transports)
    with holder.using(a):
        tensor = torch.ones(MIB, requires_grad=True)
        for _ in range(5):  # by chunks first, then by bulk connections
            assert torch.equal(rpc.rpc_sync(b.info, identity, (tensor,)), tensor)
    wait_until(lambda: not b.peers.of(a.info).channels.announced.count)
    wait_until(lambda: not a.peers.of(b.info).channels.announced.count)


def test_who_announces_refused_payloads_without_end_is_lost(monkeypatch):
    monkeypatch.setattr(chunked, "MAX_ANNOUNCED", 5)
    broken: list[str] = []

    async def run() -> None:
        peer: Any = SimpleNamespace(abort=broken.append)
        nothing: Any = None
        loop, options = asyncio.get_running_loop(), rpc.RpcBackendOptions()
        dependencies = ChannelDependencies(loop, nothing, options, nothing, nothing, str)
        channel = chunked.ChunkedChannel(peer, dependencies)
        for number in range(11):
            channel.discard(announcement(number, 10).body)

    asyncio.run(run())
    assert broken == ["it announces payloads that it does not send"]


def test_a_payload_that_cannot_be_discarded_keeps_no_others_from_it():
    """The chunks of those after it would never be read, nor what follows these in their stream."""
    discarded: list[int] = []

    def refuse(_payload: agent_pb2.Payload) -> None:
        raise ValueError("this worker takes part in no groups")

    broadcast = SimpleNamespace(receive=refuse, discard=refuse)
    by_chunks = SimpleNamespace(
        receive=lambda _: concurrent.futures.Future(),
        discard=lambda payload: discarded.append(payload.chunked.transfer_id),
    )
    channels: Any = SimpleNamespace(
        find={"broadcast": broadcast, "chunked": by_chunks}.get, announced=AnnouncedPayloads(MIB)
    )
    envelope = announcement(1, 10)
    for payload in (
        agent_pb2.Payload(broadcast=agent_pb2.BroadcastPayload(nbytes=10)),
        agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=2, nbytes=10)),
    ):
        envelope.tensors.add(dtype=agent_pb2.UINT8, sizes=[10], data=payload)
    with pytest.raises(ValueError, match="takes part in no groups"):
        EnvelopePayloads(channels, envelope).collect()
    assert sorted(discarded) == [1, 2]
    assert channels.announced.count == 0


def answer(identifier: int) -> agent_pb2.Envelope:
    return agent_pb2.Envelope(id=identifier, type=RESULT, body=agent_pb2.Payload(inline=b"\x80\x05N."))


def test_what_a_lost_worker_still_sends_is_dropped(agents):
    """It may not know that it is lost. Nothing waits for the announcement of its payloads, which are not read."""
    a, b = agents(2, transports=("grpc",))
    payload = torch.zeros(8 * MIB, dtype=torch.uint8)
    with holder.using(b):
        assert rpc.rpc_sync(a.info, torch.numel, (payload,)) == 8 * MIB  # by a stream that stays open
        end = WorkerEnd(LossCause.DISCONNECTED, "it was silent")
        a._network.call_soon(a.peers.of(b.info).on_closed, end)
        wait_until(lambda: a.end_of(1) is not None)
        for _ in range(3):
            rpc.rpc_async(a.info, torch.numel, (payload,), timeout=0)
    run_on_loop(asyncio.sleep(0))  # now they are queued
    wait_until(lambda: not b.peers.of(a.info).channels.chunked.queued_bytes)
    assert not a.peers.of(b.info).channels.announced.count


def test_answers_to_no_request_are_dropped(agents):
    a, b, c = agents(3)
    with holder.using(a):
        assert rpc.rpc_sync(b.info, add, (1, 2)) == 3
    hold = threading.Event()
    _release.clear()
    a._executor.submit_urgent(hold.wait, 20)  # one thread is busy, others are not
    served: list[int] = []
    original = a._executor.submit_urgent
    a._executor.submit_urgent = lambda task, *args: (served.append(1), original(task, *args))
    for kind in (RESULT, ERROR):
        for identifier in range(1000, 1050):
            envelope = answer(identifier)
            envelope.type = kind
            a.peers.of(b.info).on_envelope(envelope, 20)
    assert not served
    with holder.using(a):
        future = rpc.rpc_async(b.info, wait_for_release)
        identifier = max(a._caller.in_flight)
        for _ in range(50):
            a.peers.of(c.info).on_envelope(answer(identifier), 20)  # it was not asked
        assert not served
        assert not future.done()
        _release.set()
        assert future.wait() == "released"
    assert len(served) <= 1
    assert not a._caller._arrived
    hold.set()


def test_an_answer_is_taken_once(agents):
    a, b = agents(2)
    _release.clear()
    with holder.using(a):
        future = rpc.rpc_async(b.info, wait_for_release)
        identifier = max(a._caller.in_flight)
        taken: list[int] = []
        original = a._executor.submit_urgent
        a._executor.submit_urgent = lambda _task, *args: taken.append(args[1].id)
        for _ in range(50):
            a.peers.of(b.info).on_envelope(answer(identifier), 20)
        assert taken == [identifier]
        a._executor.submit_urgent = original
        a._caller.complete(a.peers.of(b.info), answer(identifier), lambda payload: payload.inline)
        assert future.wait() is None
    _release.set()


_release = threading.Event()


def wait_for_release() -> str:
    assert _release.wait(20)
    return "released"


def test_an_answer_after_the_timeout_is_still_read(agents):
    """References in it must be counted."""
    a, b = agents(2)
    _release.clear()
    with holder.using(a), pytest.raises(RpcError, match="timeout"):
        rpc.rpc_async(b.info, reference_when_released, timeout=0.05).wait()
    _release.set()

    def clean() -> bool:
        gc.collect()
        return not any(b.debug_info()[name] for name in ("num_owner_rrefs", "num_forks"))

    wait_until(clean)


def reference_when_released() -> rpc.RRef:
    assert _release.wait(20)
    return rpc.RRef(1)


def test_rejected_messages_count_as_received():
    queue = ReceivedQueue(FlowControlOptions(max_received=4))
    pauses = [queue.add(0) for _ in range(6)]
    assert pauses[:4] == [None] * 4
    assert isinstance(pauses[5], concurrent.futures.Future)


def test_a_flood_of_malformed_messages_pauses_reading(agents, monkeypatch):
    for name in ("STALL_TIMEOUT_S", "MAX_STALL_TIMEOUT_S"):
        monkeypatch.setattr(executor, name, 3600.0)  # else another thread handles them, if this one is slow
    a, b = agents(2, flow_control=rpc.FlowControlOptions(max_received=4), num_worker_threads=1)
    hold = threading.Event()
    a._executor.submit(hold.wait, 20)
    malformed = agent_pb2.Envelope(id=5, type=CALL)
    malformed.body.segment.number, malformed.body.segment.nbytes = 77, 5
    pauses = [a.peers.of(b.info).on_envelope(malformed, 20) for _ in range(10)]
    assert pauses[-1] is not None
    hold.set()
    pauses[-1].result(20)
    with holder.using(b):
        assert rpc.rpc_sync(a.info, add, (1, 2)) == 3


def test_calls_of_a_worker_that_does_not_read_are_bounded():
    backlog = Backlog(rpc.WorkerInfo("a", 1), lambda: 1 << 40)
    backlogs = Backlogs(FlowControlOptions(max_in_flight=2, max_received=1), lambda _task: None)
    backlogs.on_answer(backlog, 1 << 30)
    for _ in range(4):
        assert backlogs.add(backlog, lambda: None)
    with pytest.raises(RpcError, match="worker 'a' does not read its answers, for which 4 of its calls wait"):
        backlogs.add(backlog, lambda: None)
    assert not backlogs.add(Backlog(rpc.WorkerInfo("b", 2), lambda: 0), lambda: None)


def connected(agents) -> tuple[GrpcAgent, GrpcAgent]:
    a, b = agents(2)
    with holder.using(b):
        assert rpc.rpc_sync(a.info, add, (1, 2)) == 3
    return a, b


def test_a_worker_that_announces_device_memory_without_end_is_lost(agents, monkeypatch):
    monkeypatch.setattr(cuda_channel, "MAX_MAPPED", 4)
    a, b = connected(agents)
    a._network.channels.devices.executor = SimpleNamespace(submit_urgent=lambda *_: None)  # too busy to map it
    for count in (4, 1):
        assert not a.debug_info()["lost_workers"]
        segments = [agent_pb2.DeviceSegment(number=number) for number in range(count)]
        frame = agent_pb2.Frame(devices=agent_pb2.DeviceFrame(segments=segments))
        b._network.call_soon(b.peers.of(a.info).send_frame, frame)
        wait_until(lambda: a.peers.of(b.info).channels.cuda_ipc._announced == 4)
    wait_until(lambda: a.debug_info()["lost_workers"])
    assert "more than 4 segments of device memory at a time" in a.debug_info()["lost_workers"]["agent1"]


def test_a_worker_that_does_not_read_what_it_asks_for_is_lost(agents, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_FRAMES", 4)
    a, b = connected(agents)

    async def ask(times: int) -> None:
        for _ in range(times):  # while nothing is sent
            request = agent_pb2.BulkRequest(bundle=1)
            a.peers.of(b.info).on_frame(agent_pb2.Frame(bulk_request=request))

    run_on_loop(ask(4))
    with holder.using(b):
        assert rpc.rpc_sync(a.info, add, (1, 2)) == 3
    run_on_loop(ask(5))
    wait_until(lambda: a.debug_info()["lost_workers"])
    assert "does not read the answers to what it asks for" in a.debug_info()["lost_workers"]["agent1"]
