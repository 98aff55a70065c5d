"""References in messages that are lost with a connection are released, and those that have arrived are kept."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from gradwire import autograd, rpc
from gradwire.autograd import contexts
from gradwire.errors import LimitReachedError, LossCause, RpcTimeoutError, RRefError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.contracts.worker import WorkerEnd
from gradwire.rpc.transports.base import Transport
from gradwire.rref.forks import References

from tests.remote_functions import add, wait_until
from tests.rref.test_senders import tell
from tests.simulated_peers import bring_back, suspect

kept: list[rpc.RRef] = []

BROKEN = WorkerEnd(LossCause.DISCONNECTED, "its connection broke")


def keep(rref: rpc.RRef) -> None:
    kept.append(rref)


@pytest.fixture(autouse=True)
def drop_kept():
    yield
    kept.clear()


class CallsOnTheWay:
    """Keeps back the calls that an agent sends, as a connection does that breaks while they are on their way."""

    def __init__(self, agent: GrpcAgent, kind: int = MessageType.CALL) -> None:
        self._kind = kind
        self._kept: list[tuple[Transport, bytes]] = []
        for peer in agent.peers.all():
            peer.transport = _KeepingTransport(self, peer.transport)  # type: ignore[assignment]

    def keeps(self, transport: Transport, envelope: bytes) -> bool:
        """Returns whether an envelope is kept back."""
        if agent_pb2.Envelope.FromString(envelope).type != self._kind:
            return False
        self._kept.append((transport, envelope))
        return True

    def arrive(self) -> None:
        for transport, envelope in self._kept:
            transport.send(envelope)


class _KeepingTransport:
    def __init__(self, calls: CallsOnTheWay, transport: Transport) -> None:
        self._calls, self._transport = calls, transport

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        if attached or not self._calls.keeps(self._transport, envelope):
            self._transport.send(envelope, attached)


def interrupt(sender: GrpcAgent, receiver: GrpcAgent) -> None:
    """Does to an agent's references what a broken connection and its return do."""
    references = sender.extension(References)
    references.on_worker_suspect(receiver.info, "its connection broke")
    references.on_worker_back(receiver.info)


def send_in_vain(sender: GrpcAgent, receiver: GrpcAgent, rref: rpc.RRef) -> None:
    with holder.using(sender), pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(receiver.info, keep, (rref,), timeout=0.1)


def count(agent: GrpcAgent, name: str) -> int:
    return int(agent.debug_info()[name])


def test_an_owner_releases_what_was_lost(agents):
    owner, user = agents(2)
    CallsOnTheWay(owner)
    with holder.using(owner):
        rref = rpc.RRef([1])
    send_in_vain(owner, user, rref)
    assert count(owner, "num_forks") == 1
    interrupt(owner, user)
    wait_until(lambda: count(owner, "num_forks") == 0)


def test_a_user_releases_what_was_lost(agents):
    owner, user, third = agents(3)
    CallsOnTheWay(user)
    with holder.using(user):
        rref = rpc.RRef([1])
    with holder.using(owner):
        rref = rpc.remote(user.info, add, (1, 2))
        assert rref.to_here() == 3
    CallsOnTheWay(owner)
    send_in_vain(owner, third, rref)
    assert count(owner, "num_pending_children") == 1
    interrupt(owner, third)
    wait_until(lambda: count(owner, "num_pending_children") == 0)
    with holder.using(owner):
        assert rref.to_here() == 3
    del rref
    wait_until(lambda: count(user, "num_forks") == 0)


def test_what_has_arrived_is_kept(agents):
    owner, user, third = agents(3)
    with holder.using(owner):
        mine = rpc.RRef([1])
        rpc.rpc_sync(user.info, keep, (mine,))
        theirs = rpc.remote(user.info, add, (1, 2))
        rpc.rpc_sync(third.info, keep, (theirs,))
    for sender in (owner, user, third):
        for receiver in (owner, user, third):
            if sender is not receiver:
                interrupt(sender, receiver)
    wait_until(lambda: all(agent.control.pending() == 0 for agent in (owner, user, third)))
    del mine, theirs
    with holder.using(user):
        assert kept[0].to_here() == [1]
    with holder.using(third):
        assert kept[1].to_here() == 3


@pytest.mark.parametrize("is_gone", [False, True], ids=["kept", "gone"])
def test_what_arrives_late_is_counted_anew(agents, is_gone):
    owner, user = agents(2)
    network = CallsOnTheWay(owner)
    with holder.using(owner):
        rref = rpc.RRef([1])
    send_in_vain(owner, user, rref)
    interrupt(owner, user)
    wait_until(lambda: count(owner, "num_forks") == 0)
    if is_gone:
        del rref
    network.arrive()
    wait_until(lambda: kept)
    with holder.using(user):
        if is_gone:
            with pytest.raises(RRefError, match="is gone: its owner has deleted the value"):
                kept[0].to_here()
        else:
            assert kept[0].to_here() == [1]
            wait_until(lambda: count(owner, "num_forks") == 1)
    kept.clear()
    wait_until(lambda: count(owner, "num_forks") == 0)
    wait_until(lambda: count(user, "num_user_rrefs") == 0)


def test_a_value_whose_creating_message_is_lost_is_not_awaited_for_ever(agents):
    owner, user, third = agents(3)
    CallsOnTheWay(user, MessageType.RREF_CREATE)
    with holder.using(user):
        rref = rpc.remote(owner.info, add, (1, 2))
        rpc.rpc_sync(third.info, keep, (rref,))
    wait_until(lambda: count(owner, "num_awaited_rrefs") == 1)
    suspect(user.peers.of(owner.info), BROKEN, waits=False)
    bring_back(user.peers.of(owner.info))
    del rref
    wait_until(lambda: count(owner, "num_awaited_rrefs") == 0)
    with holder.using(third), pytest.raises(RRefError, match="is gone"):
        kept[0].to_here()
    kept.clear()
    wait_until(lambda: count(owner, "num_forks") == 0)
    wait_until(lambda: count(third, "num_user_rrefs") == 0)


def test_an_owner_asks_again_for_what_has_changed_since_it_asked(agents, monkeypatch):
    owner, user, third = agents(3)
    CallsOnTheWay(user, MessageType.RREF_CREATE)
    answers: list[Callable[[], None]] = []
    send = owner.control.send

    def hold_first_answer_back(worker, kind, payload, done, expected):
        first = kind == "rref.await" and not answers
        send(
            worker,
            kind,
            payload,
            (lambda error: answers.append(partial(done, error))) if first else done,
            expected,
        )

    monkeypatch.setattr(owner.control, "send", hold_first_answer_back)
    with holder.using(user):
        rref = rpc.remote(owner.info, add, (1, 2))
        rpc.rpc_sync(third.info, keep, (rref,))
    wait_until(lambda: answers)
    monkeypatch.undo()
    suspect(user.peers.of(owner.info), BROKEN, waits=False)
    bring_back(user.peers.of(owner.info))
    wait_until(lambda: count(owner, "num_forks") == 2)
    assert count(owner, "num_awaited_rrefs") == 1
    owner.control.run(answers[0])
    wait_until(lambda: count(owner, "num_awaited_rrefs") == 0)


def test_others_cannot_be_asked_about(agents):
    owner, user, third = agents(3)
    with holder.using(owner):
        rref = rpc.RRef([1])
        rpc.rpc_sync(user.info, keep, (rref,))
    (value,) = [entry.id for entry in owner.extension(References).table._forked.values()]
    (fork,) = owner.extension(References).table.forks_made_here(user.info.wire_id)
    pair = (*value, *fork[1])
    assert isinstance(tell(third, owner, "rref.missing", [pair]), RRefError)
    assert isinstance(tell(third, user, "rref.check", [pair]), RRefError)
    for payload in (None, 3, (), [1], [(1, 2)], [pair] * 2000):
        for kind in ("rref.missing", "rref.check"):
            assert isinstance(tell(third, owner, kind, payload), Exception), (kind, payload)
    with holder.using(user):
        assert kept[0].to_here() == [1]


def test_a_value_fails_whose_creating_message_is_refused(agents, monkeypatch):
    """Whoever waits for it is told, not only its creator."""
    monkeypatch.setattr(contexts, "MAX_JOINED_CONTEXTS", 0)
    creator, owner = agents(2)
    with holder.using(creator):
        with autograd.context():
            rref = rpc.remote(owner.info, add, (1, 2))
            # A message of an ended context is not refused.
            wait_until(lambda: "limit" in owner.debug_info()["audit"].get("messages", {}))
        with pytest.raises(LimitReachedError, match="autograd contexts of worker 0"):
            rref.to_here(timeout=5)
