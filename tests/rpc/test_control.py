"""Control messages arrive once each, whatever happens to them on the way."""

import threading

import pytest
from gradwire.errors import WorkerLostError
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
    for _ in expected:
        assert acknowledged.acquire(timeout=60)
    assert not any(errors)
    assert sorted(got) == sorted(expected)
    assert sum(network.lost for network in bad) > 10
    assert all(agent.control.pending() == 0 for agent in (a, b, c))


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
