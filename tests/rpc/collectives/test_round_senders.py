"""Workers take part in their own collectives, broadcasts and streams only, and leave a bounded number of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from gradwire import rpc
from gradwire.errors import RpcError, UnknownWorkerError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.calls.streams import Streams
from gradwire.rpc.channels import broadcast
from gradwire.rpc.collectives import rounds
from gradwire.rpc.collectives.rounds import ASK_RESULT, TELL_RESULT, RoundResult
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType, Request

from tests.remote_functions import wait_until
from tests.rpc.calls.generators import count_to


def tell(sender, receiver, kind: str, payload: object) -> Exception | None:
    """Sends a control message; returns what its receiver says."""
    answered = threading.Event()
    told: list[Exception | None] = []
    sender.control.send(receiver.info, kind, payload, lambda error: (told.append(error), answered.set()))
    assert answered.wait(20)
    return told[0]


def contribute(sender, receiver, key: object, *, was_tried: bool = False):
    body = (*key, "a value", was_tried)
    return sender.request(receiver.info, Request(MessageType.ALL_GATHER, body, timeout=0))


def leader_of(agent) -> rounds.RoundLeader:
    return agent._all_gather_service._leader


@pytest.mark.parametrize(
    "key",
    [
        ("t", 0, (0, 1)),  # without the sender
        ("t", 0, (1, 2)),  # without the receiver
        ("t", 0, (2, 0)),
        ("t", 0, (0, 0, 2)),
        ("t", 0, [0, 2]),
        ("t", 0, (0, "2")),
        ("t", -1, (0, 2)),
        ("t", "0", (0, 2)),
        (3, 0, (0, 2)),
        ("t" * 2000, 0, (0, 2)),
    ],
)
def test_rounds_of_others_are_refused(agents, key):
    a, _, c = agents(3)
    with pytest.raises(ValueError, match="malformed message"):
        contribute(c, a, key).wait()
    for kind, payload in ((ASK_RESULT, key), (TELL_RESULT, (key, RoundResult({0: 1})))):
        assert isinstance(tell(c, a, kind, payload), ValueError)
    with pytest.raises(ValueError, match="malformed message"):
        c.request(a.info, Request(MessageType.ALL_GATHER_STATUS, key)).wait()
    assert not leader_of(a)._open
    assert not leader_of(a)._askers
    assert not leader_of(a)._finished


def test_rounds_with_unknown_workers_are_refused(agents):
    a, c = agents(2)
    with pytest.raises(UnknownWorkerError, match="could not find destination 99"):
        contribute(c, a, ("t", 0, (0, 1, 99))).wait()


def test_a_round_waits_until_its_leader_knows_a_newcomer(agents, monkeypatch):
    a, b = agents(2)
    asked: list[int] = []

    def is_member(worker: int) -> bool:
        """At first it does not know the other one, as if that had just joined."""
        asked.append(worker)
        return worker == 0 or len(asked) > 3

    monkeypatch.setattr(a, "is_member", is_member)
    with ThreadPoolExecutor(2) as threads:
        gathered = threads.map(lambda agent: agent.all_gather("t", agent.info.name, [a.info, b.info], 20), (a, b))
        assert list(gathered) == [{0: "agent0", 1: "agent1"}] * 2
    assert asked.count(1) > 2


def test_open_rounds_of_one_worker_are_bounded(agents, monkeypatch):
    monkeypatch.setattr(rounds, "MAX_OPEN_ROUNDS", 4)
    a, b, c = agents(3)
    for number in range(2):
        contribute(c, a, ("t", number, (0, 2)))
        assert tell(c, a, ASK_RESULT, ("asked", number, (0, 2))) is None
    wait_until(lambda: len(leader_of(a)._open) == 2)
    with pytest.raises(ValueError, match="4 collectives of worker 2 wait for others here"):
        contribute(c, a, ("t", 9, (0, 2))).wait()
    assert isinstance(tell(c, a, ASK_RESULT, ("asked", 9, (0, 2))), ValueError)
    with pytest.raises(ValueError, match="sends its value for round 1 twice"):
        contribute(c, a, ("t", 1, (0, 2))).wait()
    contribute(b, a, ("t", 9, (0, 1)))
    wait_until(lambda: len(leader_of(a)._open) == 3)
    assert a.all_gather("t", "mine", [a.info, c.info], 20) == {0: "mine", 2: "a value"}


def test_results_are_taken_from_members_that_were_asked(agents):
    a, b, c = agents(3)
    key = ("t", 0, (0, 1, 2))
    forged = RoundResult({0: "forged", 1: "forged", 2: "forged"})
    assert tell(c, a, TELL_RESULT, (key, forged)) is None  # as if it came late
    assert not leader_of(a)._finished
    of_c = contribute(c, a, key)
    wait_until(lambda: leader_of(a)._open)
    assert isinstance(tell(c, a, TELL_RESULT, (key, forged)), ValueError)
    of_b = contribute(b, a, key, was_tried=True)  # asks a alone, whose value is missing
    wait_until(lambda: leader_of(a)._askers)
    for sender in (b, c):
        assert isinstance(tell(sender, a, TELL_RESULT, (key, forged)), ValueError)
    assert isinstance(tell(a, a, TELL_RESULT, (key, 3)), ValueError)
    assert a.all_gather("t", "mine", [each.info for each in (a, b, c)], 20) == {
        0: "mine",
        1: "a value",
        2: "a value",
    }
    assert of_b.wait().values == of_c.wait().values


def test_broadcasts_are_requested_again_by_their_receivers(agents):
    a, b, _ = agents(3)
    resent: list[tuple[int, int]] = []
    receivers = (a.peers.by_id[2].channels,)
    group = SimpleNamespace(receivers=receivers, resend=lambda receiver, first: resent.append((receiver, first)))
    group = _Weakly(**vars(group))
    a._network.channels.broadcasts._by_number[7] = group
    assert isinstance(tell(b, a, broadcast.RESEND, (7, 0)), ValueError)
    assert tell(b, a, broadcast.RESEND, (8, 0)) is None
    for payload in ((1,), 3, (7, False, 1), ("a", False), (7, 1)):
        assert isinstance(tell(b, a, broadcast.ENDED, payload), Exception)
    assert not resent


class _Weakly(SimpleNamespace):
    """A namespace that can be referred to weakly."""

    __hash__ = object.__hash__


def test_groups_of_one_sender_are_bounded(agents, monkeypatch):
    monkeypatch.setattr(broadcast, "MAX_RECEIVING_GROUPS", 0)
    monkeypatch.setattr(broadcast, "MAX_GROUPS", 3)
    a, _, c = agents(3)
    network, of_c = a._network, a.peers.of(c.info).channels.broadcast

    async def announce(group: int) -> None:
        payload = agent_pb2.BroadcastPayload(group=group, nbytes=8, members=[2, 0], transfer_id=group)
        of_c.receive(agent_pb2.Payload(broadcast=payload))

    async def discard(group: int) -> None:
        payload = agent_pb2.BroadcastPayload(group=group, nbytes=8, members=[2, 0], transfer_id=group)
        of_c.discard(agent_pb2.Payload(broadcast=payload))

    for group in (1, 2, 3):
        network._events.run(announce(group))
    with pytest.raises(ValueError, match="more than 3 groups"):
        network._events.run(announce(4))
    network._events.run(discard(4))
    assert network.channels.groups == 3


def send_item(sender, receiver, stream: int, index: int, value: object = 1) -> None:
    def fill(envelope: agent_pb2.Envelope) -> None:
        envelope.stream.stream_id, envelope.stream.items = stream, index

    sender.post(receiver.info, MessageType.STREAM_ITEM, value, header=fill)


def test_items_of_a_stream_come_from_its_producer(agents):
    a, b, c = agents(3)
    with holder.using(a):
        stream = rpc.rpc_stream(b.info, count_to, (3,))
        (consumer,) = a.extension(Streams)._consumers.values()
        for index in range(3):
            send_item(c, a, consumer.id, index, "forged")
        assert list(stream) == [0, 1, 2]


def wait_until_set() -> object:
    _go_on.wait(20)
    yield from ()


_go_on = threading.Event()


def test_a_producer_that_ignores_the_window_ends_the_stream(agents):
    a, b = agents(2)
    _go_on.clear()
    with holder.using(a):
        for flood in (
            lambda consumer: send_item(b, a, consumer.id, 10),
            lambda consumer: [send_item(b, a, consumer.id, index, bytes(3000)) for index in range(4)],
        ):
            stream = rpc.rpc_stream(b.info, wait_until_set, window_items=10, window=4096)
            (consumer,) = a.extension(Streams)._consumers.values()
            flood(consumer)
            wait_until(lambda consumer=consumer: consumer._is_broken)  # nothing is taken in between
            with pytest.raises(RpcError, match="worker 'agent1' sends more items than it was permitted to"):
                list(stream)
            assert consumer.buffered_bytes == 0
    _go_on.set()


def test_the_end_of_a_stream_does_not_hide_that_an_item_was_refused(agents):
    a, b = agents(2)
    _go_on.clear()
    with holder.using(a):
        stream = rpc.rpc_stream(b.info, wait_until_set, window_items=10)
        (consumer,) = a.extension(Streams)._consumers.values()
        send_item(b, a, consumer.id, 10)
        wait_until(lambda: consumer._is_broken)
        ended = threading.Event()
        consumer._answer.add_done_callback(lambda _: ended.set())
        _go_on.set()
        assert ended.wait(20)
        with pytest.raises(RpcError, match="worker 'agent1' sends more items than it was permitted to"):
            list(stream)
