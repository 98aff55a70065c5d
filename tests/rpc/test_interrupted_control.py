"""A control message that a signal handler interrupts is settled once, wherever the handler raises."""

from collections import Counter
from functools import partial

import pytest
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.execution import scheduler
from gradwire.rpc.peers import control

from tests.bad_network import hurry
from tests.remote_functions import wait_until
from tests.rpc.interruption import UNINTERRUPTED, Interruption

PAYLOADS = ["first", "x" * 5000, "last"]
"""The second is too large to be attached."""


class Notes:
    """Control messages from one agent to another, and what has become of them."""

    def __init__(self, a: GrpcAgent, b: GrpcAgent) -> None:
        self.a, self.b = a, b
        self.begun = 0
        self.sent: set[int] = set()
        self.processed: Counter[int] = Counter()
        self.settled: Counter[int] = Counter()
        b.control.on("note", lambda _sender, payload: self.processed.update((payload[0],)))

    def send(self) -> None:
        """Sends one message of each kind."""
        for payload in PAYLOADS:
            self.begun += 1
            done = partial(self._note_end, self.begun)
            self.a.control.send(self.b.info, "note", (self.begun, payload), done, urgent=False)
            self.sent.add(self.begun)

    def _note_end(self, number: int, error: Exception | None) -> None:
        assert error is None
        self.settled[number] += 1

    def check(self) -> None:
        """Waits until all messages are settled without any other one, and then once each."""
        wait_until(lambda: self.sent <= self.settled.keys() and not self.a.control.pending())
        assert self.settled == self.processed
        assert set(self.settled.values()) == {1}


@pytest.fixture
def notes(agents, monkeypatch) -> Notes:
    hurry(monkeypatch)
    monkeypatch.setattr(scheduler, "LINGER_S", 0.002)
    monkeypatch.setattr(control, "ATTACH_AFTER_S", 0.0)
    return Notes(*agents(2))


def test_the_attachment_of_messages_may_be_interrupted_at_any_moment(notes, monkeypatch):
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        with monkeypatch.context() as patched:
            patched.setattr(scheduler, "LINGER_S", 0.05)  # so that this thread is the one that attaches
            notes.send()
        try:
            with Interruption(moment):
                notes.a.post(notes.b.info, MessageType.CONTROL, None)
            uninterrupted += 1
        except KeyboardInterrupt:
            uninterrupted = 0
        moment += 1
        notes.check()
    assert moment > 100


def test_the_sending_of_messages_may_be_interrupted_at_any_moment(notes):
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        try:
            with Interruption(moment):
                notes.send()
            uninterrupted += 1
        except KeyboardInterrupt:
            uninterrupted = 0
        moment += 1
        notes.send()  # a later message is sent, and takes an interrupted one along
        notes.check()
    assert moment > 20
