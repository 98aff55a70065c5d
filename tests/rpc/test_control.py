"""Control messages arrive once each, whatever happens to them on the way."""

import threading
from functools import partial

import pytest
from gradwire.errors import SerializationError, WorkerLostError
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.peers import control, control_queue

from tests.bad_network import BadNetwork, hurry
from tests.remote_functions import wait_until


@pytest.mark.parametrize("seed", range(2))
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
    for i in range(40):
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
    wait_until(lambda: sorted(got) == list(range(101)))  # one batch may overtake another
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


def send_together(agent, receiver, payloads: list[str], done) -> None:
    hold, held = threading.Event(), threading.Event()
    agent.control.run(lambda: held.set() or hold.wait(20))
    assert held.wait(20)
    for payload in payloads:
        agent.control.send(receiver.info, "note", payload, partial(done, payload))
    hold.set()


def test_any_error_of_an_attempt_settles_the_message(agents, monkeypatch):
    a, b = agents(2)
    got: list[object] = []
    b.control.on("note", lambda sender, payload: got.append(payload))
    send = a.request

    def fail_for_some(worker, request):
        if request.kind == MessageType.CONTROL and "bad" in request.value:
            raise OSError("no descriptors are left")
        return send(worker, request)

    monkeypatch.setattr(a, "request", fail_for_some)
    told: dict[str, Exception | None] = {}
    send_together(a, b, ["before", "bad", "after"], told.__setitem__)
    wait_until(lambda: len(told) == 3)
    assert isinstance(told.pop("bad"), OSError)
    assert told == {"before": None, "after": None}
    assert sorted(got) == ["after", "before"]
    wait_until(lambda: a.control.pending() == 0)


def test_an_error_of_who_is_told_leaves_others_alone(agents):
    a, b = agents(2)
    b.control.on("note", lambda sender, payload: None)
    told: list[str] = []

    def note_and_fail(payload: str, error: Exception | None) -> None:
        told.append(payload)
        raise ZeroDivisionError

    send_together(a, b, ["first", "second", "third"], note_and_fail)
    wait_until(lambda: sorted(told) == ["first", "second", "third"])
    assert a.control.pending() == 0


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


def test_outcomes_are_forgotten_once_acknowledged(agents):
    a, b = agents(2)
    b.control.on("nothing", lambda sender, payload: None)
    done = threading.Semaphore(0)
    for _ in range(200):
        a.control.send(b.info, "nothing", None, lambda _: done.release())
        assert done.acquire(timeout=60)
    assert len(b.control._inbox.received[a.info.id].outcomes) <= 2


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


def test_what_is_kept_of_messages_is_bounded(agents, monkeypatch):
    """A sender does not run ahead of its acknowledgements, so a receiver need not keep more than a window."""
    monkeypatch.setattr(control_queue, "WINDOW", 600)
    monkeypatch.setattr(control, "MAX_BATCH", 50)
    a, b = agents(2)
    got: list[int] = []
    kept: list[int] = []

    def note(_sender, number):
        got.append(number)
        kept.append(len(b.control._inbox.received[a.info.id].outcomes))

    b.control.on("note", note)
    done = threading.Semaphore(0)
    for number in range(5000):
        a.control.send(b.info, "note", number, lambda _error: done.release(), urgent=bool(number % 3))
    for _ in range(5000):
        assert done.acquire(timeout=60)
    assert sorted(got) == list(range(5000))
    assert max(kept) <= 600
    assert a.control.pending() == 0


def test_messages_far_ahead_are_refused(agents):
    a, b = agents(2)
    got: list[int] = []
    b.control.on("note", lambda sender, payload: got.append(payload))

    def send(number: int, acknowledged_below: int = 0) -> None:
        def fill(envelope):
            envelope.control.acknowledged_below = acknowledged_below
            envelope.control.messages.add(number=number, kind="note")

        a.request(b.info, Request(MessageType.CONTROL, [number], header=fill)).wait()

    for number in (control_queue.WINDOW, 1 << 60):
        with pytest.raises(ValueError, match="control messages with numbers from .* on are refused"):
            send(number)
    send(control_queue.WINDOW - 1)
    send(1 << 60, acknowledged_below=(1 << 60) - 5)
    assert got == [control_queue.WINDOW - 1, 1 << 60]
    assert b.control._inbox.received[a.info.id].outcomes.keys() == {1 << 60}


def test_errors_that_are_kept_are_short(agents):
    a, b = agents(2)

    def fail(sender, payload):
        raise LookupError(payload)

    b.control.on("fail", fail)
    told: list[Exception] = []
    a.control.send(b.info, "fail", "x" * 1_000_000, told.append)
    wait_until(lambda: told)
    assert str(told[0]).startswith("LookupError: xxx")
    assert sum(map(len, b.control._inbox.received[a.info.id].outcomes.values())) < 20_000
