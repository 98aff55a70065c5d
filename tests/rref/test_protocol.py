"""Random programs make, pass on and drop references over a network that loses and repeats control messages."""

import contextlib
import gc
import random

import pytest
from gradwire import rpc
from gradwire.errors import RRefError
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rref.forks import References
from gradwire.rref.owner_table import GlobalId, OwnedValue

from tests.remote_functions import add, wait_until
from tests.rpc.peers.bad_network import BadNetwork

kept: dict[int, list[rpc.RRef]] = {}
"""By the id of the agent's worker."""


def keep(rref: rpc.RRef) -> None:
    kept.setdefault(current_agent().info.id, []).append(rref)


def run_schedule(agents, seed: int, steps: int) -> None:
    """Runs a program; checks that every reference gives its value at any time."""
    chance = random.Random(seed)
    values: dict[tuple[int, int], int] = {}
    futures = []

    def key(rref: rpc.RRef) -> tuple[int, int]:
        handle = rref._handle
        return tuple(handle.fork.reference if not rref.is_owner() else handle.entry.id)

    for step in range(steps):
        agent = chance.choice(agents)
        mine = kept.setdefault(agent.info.id, [])
        with holder.using(agent):
            what = chance.random()
            if what < 0.25 or not mine:
                rref = rpc.remote(chance.choice(agents).info, add, (step, 0))
                values[key(rref)] = step
                mine.append(rref)
            elif what < 0.6:
                futures.append(rpc.rpc_async(chance.choice(agents).info, keep, (chance.choice(mine),)))
            elif what < 0.85:
                mine.pop(chance.randrange(len(mine)))
            else:
                rref = chance.choice(mine)
                assert rref.to_here() == values[key(rref)]
            del what
        if chance.random() < 0.2:
            for future in futures:
                future.wait()
            futures.clear()
    for future in futures:
        future.wait()
    for agent in agents:
        with holder.using(agent):
            for rref in kept.get(agent.info.id, []):
                assert rref.to_here() == values[key(rref)]


@pytest.mark.parametrize("seed", range(2))
def test_no_early_delete_and_no_leak(agents, seed):
    bad = [BadNetwork(seed * 10 + rank, (MessageType.CONTROL,)) for rank in range(3)]
    made = agents(3, lambda rank: bad[rank].factories())
    kept.clear()
    run_schedule(made, seed, 300)
    assert sum(network.failed for network in bad) > 0
    kept.clear()

    def clean() -> bool:
        gc.collect()
        return not any(any(agent.extension(References).live_objects().values()) for agent in made)

    wait_until(clean, 60, pause=0.1)  # often, it would keep the agents' threads from running


def test_asking_for_a_value_that_has_been_deleted_meanwhile_is_no_failure(agents, caplog):
    """The owner asks whether a value will be created that has been created and deleted meanwhile."""
    creator, owner = agents(2)
    identifier = GlobalId((creator.info.id, 1000))
    owner.extension(References).table.ask_creator(OwnedValue(identifier))
    wait_until(lambda: owner.control.pending() == 0)
    assert not caplog.records


def test_waiting_for_a_value_that_will_not_be_created_fails(agents, caplog):
    creator, owner = agents(2)
    entry = owner.extension(References).entry(GlobalId((creator.info.id, 1000)))
    with pytest.raises(RRefError, match="is gone: 'agent1' has deleted the value"):
        entry.wait(60)
    wait_until(lambda: "a message names a value that will not be created: reference" in caplog.text)


def test_a_thread_gives_way_to_another_one_only_for_a_value_that_is_not_there():
    given_way = []

    @contextlib.contextmanager
    def blocking():
        given_way.append(True)
        entry.resolve("value")
        yield

    entry = OwnedValue(GlobalId((1, 1)))
    assert entry.wait(60, blocking) == "value"
    assert entry.wait(60, blocking) == "value"
    assert len(given_way) == 1
