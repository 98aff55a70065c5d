"""The sequence of control messages between two workers, whatever happens to the envelopes that carry them."""

import pytest
from gradwire.errors import LimitReachedError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.peers.control import ControlStream, Unacknowledged
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

WINDOW = 1 << 14
MAX_ARRIVED_BYTES = 64 << 20


class Worker:
    """One end of the sequences."""

    def __init__(self, name: str) -> None:
        self.stream = ControlStream(WorkerInfo(name, 0))
        self.sent = 0
        self.processed: list[int] = []
        self.failed: set[int] = set()
        """The numbers of the messages of the other worker whose handlers raise here."""
        self.acknowledged: list[tuple[int, bytes]] = []

    def send(self) -> None:
        message = agent_pb2.ControlMessage(kind="note", numbers=[self.sent])
        self.stream.append(Unacknowledged(message, 0, lambda _error: None, ()))
        self.sent += 1

    def process(self) -> None:
        self.stream.process(self._run)

    def _run(self, message: agent_pb2.ControlMessage) -> bytes | None:
        (number,) = message.numbers
        self.processed.append(number)
        return b"failed" if number in self.failed else None

    def receive(self, envelope: agent_pb2.Envelope) -> None:
        for sent, failure in self.stream.acknowledge(envelope.control):
            self.acknowledged.append((sent.message.numbers[0], failure))
        self.stream.receive(envelope.control)


class Streams(RuleBasedStateMachine):
    """Envelopes are lost, arrive in any order, or not before later ones are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = Worker("a"), Worker("b")
        self.flights: list[tuple[int, agent_pb2.Envelope]] = []
        """The index of the receiver of each envelope, and the envelope."""

    @rule(sender=st.integers(0, 1), count=st.integers(1, 100), fails=st.booleans())
    def send(self, sender, count, fails):
        for _ in range(count):
            if fails:
                self.workers[1 - sender].failed.add(self.workers[sender].sent)
            self.workers[sender].send()

    @rule(sender=st.integers(0, 1), alone=st.booleans())
    def take_along(self, sender, alone):
        self._take_along(sender, alone)

    def _take_along(self, sender: int, alone: bool) -> bool:
        envelope = agent_pb2.Envelope()
        waits = self.workers[sender].stream.waits
        taken = self.workers[sender].stream.take_along(envelope, alone=alone)
        assert taken == waits
        assert envelope.HasField("control") == taken
        if taken:
            self.flights.append((1 - sender, envelope))
        return taken

    def _flush(self, sender: int) -> None:
        """Sends until nothing is left to be sent now, as the control thread does."""
        for _ in range(1000):
            if not self._take_along(sender, alone=True):
                return
        raise AssertionError("there is no end of it, although nothing arrives")

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def arrive(self, data):
        receiver, envelope = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.workers[receiver].receive(envelope)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def is_not_sent(self, data):
        receiver, _ = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.workers[1 - receiver].stream.send_again()

    @rule()
    def connection_breaks(self):
        self.flights.clear()
        for worker in self.workers:
            worker.stream.send_again()

    @rule(receiver=st.integers(0, 1))
    def process(self, receiver):
        self.workers[receiver].process()

    @invariant()
    def each_is_processed_once_and_in_order(self):
        for worker, other in (self.workers, reversed(self.workers)):
            assert worker.processed == list(range(len(worker.processed)))
            assert [number for number, _ in other.acknowledged] == list(range(len(other.acknowledged)))
            assert len(other.acknowledged) <= len(worker.processed)
            assert {number for number, failure in other.acknowledged if failure} == {
                number for number, _ in other.acknowledged if number in worker.failed
            }

    def teardown(self) -> None:
        """Lets everything arrive."""
        for _ in range(1000):
            for worker in self.workers:
                worker.process()
            for sender in (0, 1):
                self._flush(sender)
            if not self.flights:
                break
            while self.flights:
                receiver, envelope = self.flights.pop(0)
                self.workers[receiver].receive(envelope)
        for worker, other in (self.workers, reversed(self.workers)):
            assert len(worker.stream) == 0
            assert not worker.stream.waits
            assert len(worker.acknowledged) == worker.sent == len(other.processed)


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def header(first: int, count: int = 1, payload: bytes = b"x") -> agent_pb2.ControlHeader:
    messages = [agent_pb2.ControlMessage(kind="note", pickled=payload) for _ in range(count)]
    return agent_pb2.ControlHeader(first=first, messages=messages)


@pytest.mark.parametrize("first", [WINDOW, 1 << 63])
def test_messages_far_ahead_are_refused(first):
    stream = ControlStream(WorkerInfo("peer", 0))
    with pytest.raises(LimitReachedError, match=f"control message {first} is refused"):
        stream.receive(header(first))
    assert not stream.has_arrived


def test_what_is_refused_takes_nothing_with_it():
    stream = ControlStream(WorkerInfo("peer", 0))
    with pytest.raises(LimitReachedError, match=f"control message {WINDOW} is refused"):
        stream.receive(header(0, WINDOW + 1))
    processed = []
    stream.process(processed.append)
    assert len(processed) == WINDOW


def test_the_bytes_that_wait_to_be_processed_are_bounded():
    stream = ControlStream(WorkerInfo("peer", 0))
    count, large = 0, b"x" * (1 << 20)
    with pytest.raises(LimitReachedError):
        for count in range(1000):
            stream.receive(header(count, payload=large))
    assert MAX_ARRIVED_BYTES <= count << 20 <= MAX_ARRIVED_BYTES + 2 * (1 << 20)
    stream.process(lambda _message: None)
    stream.receive(header(count, payload=large))
    assert stream.has_arrived


def test_the_errors_that_a_peer_never_takes_are_bounded():
    stream = ControlStream(WorkerInfo("peer", 0))
    processed = 0

    def refuse(_message: agent_pb2.ControlMessage) -> bytes:
        nonlocal processed
        processed += 1
        return b"refused"

    for first in range(0, 4000, 100):
        stream.receive(header(first, 100))
        stream.process(refuse)
    assert processed == 1024
    envelope = agent_pb2.Envelope()
    assert stream.take_along(envelope)
    told = envelope.control.processed_below
    assert told == len(envelope.control.failed) == 8
    assert not stream.waits  # before the peer knows these, it is told of no others
    stream.receive(agent_pb2.ControlHeader(acknowledged_below=told))
    assert stream.waits
    stream.process(refuse)
    assert processed == 1024 + told


def test_what_a_peer_acknowledges_was_sent():
    stream = ControlStream(WorkerInfo("peer", 0))
    for _ in range(3):
        stream.append(Unacknowledged(agent_pb2.ControlMessage(kind="note"), 0, None, ()))
    assert stream.acknowledge(agent_pb2.ControlHeader(processed_below=1 << 63)) == []
    assert len(stream) == 3
