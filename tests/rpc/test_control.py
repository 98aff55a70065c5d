"""Control messages arrive once each, whatever happens to them on the way."""

import threading

import pytest
from gradwire.errors import SerializationError, WorkerLostError
from gradwire.rpc.contracts.messages import MessageType

from tests.bad_network import BadNetwork, hurry
from tests.remote_functions import wait_until


@pytest.mark.parametrize("seed", range(3))
def test_every_message_is_processed_once(agents, monkeypatch, seed):
    hurry(monkeypatch)
    a, b, c = agents(3)
    got: list[tuple[str, int]] = []
    for agent in (a, b, c):
        agent.control.on("count", lambda sender, payload: got.append((sender.name, payload)))
    bad = [
        BadNetwork(agent, seed + 10 * agent.info.id, (MessageType.CONTROL, MessageType.RESULT))
        for agent in (a, b, c)
    ]
    acknowledged = threading.Semaphore(0)
    errors = []

    def done(error):
        errors.append(error)
        acknowledged.release()

    expected = []
    for i in range(60):
        for sender, receiver in ((a, b), (b, a), (a, c), (c, c)):
            sender.control.send(receiver.info, "count", i, done)
            expected.append((sender.info.name, i))
        if i % 2:  # not all at once, or they would travel together
            for _ in range(8):
                assert acknowledged.acquire(timeout=60)
    assert not any(errors)
    assert sorted(got) == sorted(expected)
    assert sum(network.lost for network in bad) > 10
    assert all(agent.control.pending() == 0 for agent in (a, b, c))


def test_messages_travel_together(agents):
    a, b = agents(2)
    got: list[int] = []
    b.control.on("note", lambda sender, payload: got.append(payload))
    before = dict(a.debug_info())
    last = threading.Event()
    for i in range(100):
        a.control.send(b.info, "note", i, urgent=False)
    a.control.send(b.info, "note", 100, lambda _: last.set())
    assert last.wait(20)
    assert got == list(range(101))
    assert a.debug_info()["messages_sent"] - before["messages_sent"] < 20


def test_a_message_that_cannot_be_read_does_not_take_others_with_it(agents):
    a, b = agents(2)
    got: list[object] = []
    b.control.on("note", lambda sender, payload: got.append(payload))
    told: list[tuple[str, Exception | None]] = []
    hold, held = threading.Event(), threading.Event()
    a.control.run(lambda: held.set() or hold.wait(20))
    assert held.wait(20)
    a.control.send(b.info, "note", "before", lambda error: told.append(("before", error)))
    a.control.send(b.info, "note", Unreadable(), lambda error: told.append(("unreadable", error)))
    a.control.send(b.info, "note", threading.Lock(), lambda error: told.append(("unsendable", error)))
    a.control.send(b.info, "note", "after", lambda error: told.append(("after", error)))
    hold.set()  # now they travel together
    wait_until(lambda: len(told) == 4)
    outcomes = dict(told)
    assert [outcomes["before"], outcomes["after"]] == [None, None]
    assert isinstance(outcomes["unreadable"], ZeroDivisionError)
    assert isinstance(outcomes["unsendable"], SerializationError)
    assert sorted(got) == ["after", "before"]


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


def test_outcomes_are_forgotten_once_acknowledged(agents):
    a, b = agents(2)
    b.control.on("nothing", lambda sender, payload: None)
    done = threading.Semaphore(0)
    for _ in range(200):
        a.control.send(b.info, "nothing", None, lambda _: done.release())
        assert done.acquire(timeout=10)
    assert len(b.control._received[a.info.id].outcomes) <= 2


def test_errors_and_losses_are_told(agents):
    a, b = agents(2)

    def fail(sender, payload):
        raise LookupError("no such thing")

    b.control.on("fail", fail)
    told: list[Exception] = []
    a.control.send(b.info, "fail", None, told.append)
    wait_until(lambda: told)
    assert isinstance(told[0], LookupError)
    b.shutdown(graceful=False, timeout=0)
    a.control.send(b.info, "fail", None, told.append)
    wait_until(lambda: len(told) == 2)
    assert isinstance(told[1], WorkerLostError)
