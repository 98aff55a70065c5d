"""Members change the references of nobody but themselves, and nothing is kept for workers that do not exist."""

import gc
import threading
from functools import partial

import pytest
from gradwire import rpc
from gradwire.errors import LimitReachedError, RRefError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rref import forks, owner_table
from gradwire.rref.forks import References
from gradwire.rref.owner_table import GlobalId, name_needed

from tests.remote_functions import add, identity, wait_until

kept: list[rpc.RRef] = []


def hold(rref: rpc.RRef) -> None:
    kept.append(rref)


@pytest.fixture(autouse=True)
def drop_kept():
    yield
    kept.clear()


def tell(sender, receiver, kind: str, payload: object) -> Exception | None:
    """Sends a control message; returns what its receiver says."""
    answered = threading.Event()
    told: list[Exception | None] = []
    sender.control.send(receiver.info, kind, payload, lambda error: (told.append(error), answered.set()))
    assert answered.wait(20)
    return told[0]


def references(agent) -> References:
    return agent.extension(References)


def table_of(agent) -> dict[str, int]:
    counts = references(agent).live_objects()
    return {name: counts[name] for name in ("num_owner_rrefs", "num_forks", "num_awaited_rrefs")}


def test_a_fork_is_deleted_by_its_holder_only(agents):
    owner, user, other = agents(3)
    with holder.using(user):
        rref = rpc.remote(owner.info, add, (1, 2))
        assert rref.to_here() == 3
        fork = rref._handle.fork
    payload = (*fork.reference, *fork.id)
    for kind in ("rref.delete", "rref.fork"):
        error = tell(other, owner, kind, payload)
        assert isinstance(error, RRefError)
        assert "belongs to another worker" in str(error)
    assert table_of(owner) == {"num_owner_rrefs": 1, "num_forks": 1, "num_awaited_rrefs": 0}
    with holder.using(user):
        assert rref.to_here() == 3


def test_a_fork_is_accepted_by_whom_it_was_made_for(agents):
    owner, user, third = agents(3)
    with holder.using(owner):
        rref = rpc.RRef(1)
    fork = GlobalId((user.info.id, 77))
    references(user)._passed_on.add(fork, rref._handle, owner.info.id)
    error = tell(third, user, "rref.accept", tuple(fork))
    assert isinstance(error, RRefError)
    assert len(references(user)._passed_on) == 1
    assert tell(owner, user, "rref.accept", tuple(fork)) is None
    assert len(references(user)._passed_on) == 0


@pytest.mark.parametrize("worker", [7, 1 << 40, -1])
def test_nothing_is_kept_of_values_of_unknown_creators(agents, worker):
    owner, user = agents(2)
    for number in range(50):
        error = tell(user, owner, "rref.fork", (worker, number, user.info.id, number))
        assert isinstance(error, RRefError)
        assert f"there is no worker {worker}" in str(error)
        if 0 <= worker < 1 << 32:  # else it is no id on the wire
            named = partial(name_needed, [GlobalId((worker, number))])
            with pytest.raises(RRefError, match="there is no worker"):
                user.request(owner.info, Request(MessageType.RREF_FETCH, None, header=named)).wait()
    assert not any(table_of(owner).values())


def test_values_that_are_named_before_their_creation_are_bounded(agents, monkeypatch):
    monkeypatch.setattr(owner_table, "MAX_AWAITED", 4)
    owner, user, creator = agents(3)
    table = references(owner).table
    for number in range(4):
        table.add_fork(GlobalId((creator.info.id, 1000 + number)), GlobalId((1, number)), user.info.id)
    with pytest.raises(RRefError, match="too many references of worker 2"):
        table.add_fork(GlobalId((creator.info.id, 2000)), GlobalId((1, 9)), user.info.id)
    table.add_fork(GlobalId((user.info.id, 2000)), GlobalId((1, 9)), user.info.id)
    assert len(table) == 5
    table.clear(RRefError("the test is over"))


def create(sender, receiver, **fields) -> None:
    """Sends a creation whose header says something else than the truth."""

    def fill(envelope: agent_pb2.Envelope) -> None:
        created = envelope.created
        created.worker_id = fields.get("creator", sender.info.id)
        created.number = fields.get("number", 1000)
        created.fork = 1001
        created.owner = fields.get("owner", receiver.info.id)

    sender.request(receiver.info, Request(MessageType.RREF_CREATE, (add, (1, 2), {}), header=fill)).wait()


def test_values_are_created_by_their_creator(agents):
    owner, user, _ = agents(3)
    for wrong in ({"creator": 2}, {"owner": 2}, {"owner": 9}, {"creator": 0}):
        with pytest.raises(ValueError, match="malformed creation"):
            create(user, owner, **wrong)
    assert not any(table_of(owner).values())
    create(user, owner)
    with pytest.raises(RRefError, match="is in use already"):
        create(user, owner)
    error = tell(user, owner, "rref.delete", (user.info.id, 1000, user.info.id, 1001))
    assert error is None
    assert not any(table_of(owner).values())


def test_the_owner_of_a_reference_is_not_known_yet(agents, monkeypatch):
    """Others know a worker that joins some moments earlier. The reference is refused, and nobody keeps it."""
    owner, user, third = agents(3)
    is_member = type(third).is_member

    def is_member_unless_new(agent, worker):
        return is_member(agent, worker) and not (agent is third and worker == owner.info.id)

    monkeypatch.setattr(type(third), "is_member", is_member_unless_new)
    with holder.using(user):
        rref, mine = rpc.remote(owner.info, add, (1, 2)), rpc.RRef(1)
        with pytest.raises(RRefError, match="'agent2' does not know the owner of"):
            rpc.rpc_sync(third.info, hold, ([mine, rref, mine],))
        assert rref.to_here() == 3
        del rref, mine

    def is_clean() -> bool:
        gc.collect()
        return not any(any(references(agent).live_objects().values()) for agent in (owner, user, third))

    wait_until(is_clean)


def test_references_whose_acceptance_is_not_acknowledged_are_bounded(agents, monkeypatch):
    """A worker that acknowledges nothing does not have others keep more and more messages for it."""
    monkeypatch.setattr(forks, "MAX_ACCEPTING", 4)
    owner, user, third = agents(3)

    def send(receiver, number: int, of: int) -> None:
        reference = agent_pb2.Reference(worker_id=user.info.id, number=5, fork=of + number, owner=owner.info.id)
        request = Request(MessageType.CALL, (identity, (1,), {}), header=lambda e: e.references.append(reference))
        user.request(receiver.info, request).wait()

    create(user, owner, number=5)
    for number in range(10):
        for receiver, of in ((owner, 1000), (third, 1500)):
            send(receiver, number, of)
            wait_until(lambda receiver=receiver: not any(references(receiver)._accepting.values()))
    for receiver, of in ((owner, 2000), (third, 3000)):
        monkeypatch.setattr(receiver.control, "send", lambda *_, **__: None)
        for number in range(4):
            send(receiver, number, of)
        for number in (3, 4):
            with pytest.raises(LimitReachedError, match="malformed reference .* is one too many"):
                send(receiver, number, of)


def test_malformed_control_messages_are_answered_with_an_error(agents):
    owner, user = agents(2)
    for kind in ("rref.fork", "rref.delete", "rref.accept", "rref.await"):
        for payload in (None, 3, (), (1,), ((1, 2),), "ab", ([], []), ((1, []), (1, 2)), (([], 1), (1, 2))):
            assert isinstance(tell(user, owner, kind, payload), Exception), (kind, payload)
    assert not any(table_of(owner).values())


def test_references_still_pass_through_several_workers(agents):
    made = agents(3)
    with holder.using(made[0]):
        rref = rpc.remote(made[1].info, add, (1, 2))
        rpc.rpc_sync(made[2].info, hold, (rref,))
        del rref
    with holder.using(made[2]):
        assert current_agent() is made[2]
        assert kept[0].to_here() == 3
    kept.clear()

    def clean() -> bool:
        gc.collect()
        return not any(any(references(agent).live_objects().values()) for agent in made)

    wait_until(clean)
