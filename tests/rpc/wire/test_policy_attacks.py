"""Pickles that would run code, in every message that a worker can send: none does, and the sender is told.

worker0 is the attacker. Its messages are restricted on worker1; it accepts anything itself.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import PolicyError, RemoteUnpicklableError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.calls.streams import Streams
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.wire import pickling

from tests.remote_functions import kept, wait_until
from tests.rpc.wire import policy_functions as functions
from tests.rpc.wire.policy_functions import Attack, AttackingError, echo

ONE_WAY = {MessageType.STREAM_CREDIT, MessageType.STREAM_ITEM, MessageType.GRADIENTS}


@pytest.fixture(params=["exposed", "plain"])
def attacked(workers, request):
    """An attacker and its victim, whose policy accepts this from it."""
    policy = rpc.Policy(callers={"worker0": rpc.Policy(accepts=request.param)})
    attacker, victim = workers.rpc(2, policy=policy)
    victim.run(functions.load)
    return attacker, victim


@pytest.fixture
def folder(tmp_path):
    """The folder that attacks make."""
    yield tmp_path / "made"
    assert not (tmp_path / "made").exists()


def refused() -> int:
    return rpc.debug_info()["refused_messages"].get("worker0", 0)


def send_attacks(folder: str) -> list[str]:
    """Sends an attack in each type of request; returns the types."""
    agent: Any = current_agent()
    to = agent.worker("worker1")
    names = []
    for kind in agent._extensions.handlers.keys() - ONE_WAY:
        for value in (Attack(folder), (echo, (Attack(folder),), {}), [{"key": Attack(folder)}]):
            with pytest.raises(
                PolicyError, match=r"'worker1' refuses a message of worker 'worker0': .*attack_others"
            ) as caught:
                agent.request(to, Request(kind, value)).wait()
            assert (caught.value.worker, caught.value.caller) == ("worker1", "worker0")
            assert caught.value.name in ("tests.rpc.wire.policy_functions.attack_others",)
        names.append(MessageType.Name(kind))
    for value in (Attack(folder), [Attack(folder)], {"key": Attack(folder)}):
        told: list[Exception | None] = []
        agent.control.send(to, "rref.await", value, told.append)
        wait_until(lambda told=told: told)
        assert isinstance(told[0], PolicyError)
    names.append("a control message")
    return names


def test_requests_of_every_type(attacked, folder):
    attacker, victim = attacked
    sent = attacker.run(send_attacks, str(folder))
    assert len(sent) >= 11
    assert "RREF_CREATE" in sent
    assert victim.run(refused) == 3 * len(sent)
    assert victim.run(Path(victim.log).read_text).count("event=deny listener=policy owner=worker1") == 20
    assert attacker.run(rpc.rpc_sync, "worker1", echo, (1,)) == 1


def open_stream() -> None:
    kept.append(rpc.rpc_stream("worker0", functions.count_up, (9,), window_items=1))
    assert next(kept[-1]) == 0


def read_stream() -> list[int]:
    return list(kept.pop())


def post_attacks(folder: str) -> None:
    """Posts attacks that belong to no stream, and as an item and the credit of streams."""
    agent = current_agent()
    streams = agent.extension(Streams)
    ((_, produced),) = streams._producers
    consumed = rpc.rpc_stream("worker1", functions.count_up, (9,), window_items=1)
    assert next(consumed) == 0
    for kind in ONE_WAY:
        agent.post(agent.worker("worker1"), kind, Attack(folder))
    for kind, stream in (
        (MessageType.STREAM_ITEM, produced),
        (MessageType.STREAM_CREDIT, consumed._consumer.id),
    ):
        header = agent_pb2.StreamHeader(stream_id=stream)
        agent.post(
            agent.worker("worker1"),
            kind,
            Attack(folder),
            header=lambda envelope, header=header: envelope.stream.CopyFrom(header),
        )
    kept.append(consumed)


def test_messages_without_an_answer(attacked, folder):
    """Those that belong to nothing are not even read."""
    attacker, victim = attacked
    victim.run(open_stream)

    attacker.run(post_attacks, str(folder))
    victim.run(wait_until, lambda: refused() == 2)  # while both streams have more to send
    assert attacker.run(read_stream) == list(range(1, 9))
    assert victim.run(read_stream) == list(range(1, 9))
    assert victim.run(refused) == 2


def test_all_ways_to_call(attacked, folder):
    attacker, _ = attacked

    def call(folder: str) -> None:
        attack = Attack(folder)
        for args in ((attack,), ([attack],), ({"x": attack},)):
            calls = [
                lambda args=args: rpc.rpc_sync("worker1", echo, args),
                lambda args=args: rpc.rpc_async("worker1", echo, args).wait(),
                lambda args=args: rpc.rpc_async("worker1", echo, (), {"x": args}).wait(),
                lambda args=args: rpc.remote("worker1", echo, args).to_here(),
                lambda args=args: list(rpc.rpc_stream("worker1", functions.count_up, args)),
                lambda args=args: rpc.broadcast_call(["worker1"], echo, args)[0].wait(),
            ]
            for each in calls:
                with pytest.raises(PolicyError, match="attack_others"):
                    each()
        for function in (os.mkdir, eval, pickling._import, functions.unlisted, torch.load):
            with pytest.raises(PolicyError, match="not exposed"):
                rpc.rpc_sync("worker1", function, (folder,))
            with pytest.raises(PolicyError, match="not exposed"):
                rpc.remote("worker1", function, (folder,)).to_here()
            with pytest.raises(PolicyError, match="not exposed"):
                next(rpc.rpc_stream("worker1", function, (folder,)))
        script_module = torch.jit.script(torch.nn.ReLU())
        with pytest.raises(PolicyError, match=r"load_script"):
            rpc.rpc_sync("worker1", echo, (script_module,))
        with pytest.raises(PolicyError, match="tripled"):
            rpc.rpc_sync("worker1", functions.tripled, (torch.ones(1),))

    attacker.run(call, str(folder))


def test_methods_of_values(attacked, folder):
    attacker, _ = attacked

    def call(folder: str) -> None:
        counter = rpc.remote("worker1", functions.Counter, (1,))
        names = ["__init__", "__reduce__", "__setattr__", "_reset", "__class__", "__getattribute__"]
        attempts = [(counter, name, ()) for name in names]
        values = rpc.remote("worker1", echo, ([1, 2],))
        attempts += [(values, "append", (3,)), (values, "__len__", ())]
        for rref, name, args in attempts:
            for proxy in (rref.rpc_sync(), rref.rpc_async(), rref.remote()):
                with pytest.raises(PolicyError, match="not exposed"):
                    outcome = (
                        getattr(proxy, name)(*args) if not name.startswith("__") else _call(proxy, name, args)
                    )
                    outcome = outcome.to_here() if isinstance(outcome, rpc.RRef) else outcome.wait()
        with pytest.raises(PolicyError, match="attack_others"):
            counter.rpc_sync().add(Attack(folder))
        assert counter.rpc_sync().add(2) == 3

    def _call(proxy, name, args):
        return type(proxy).__getattr__(proxy, name)(*args)

    attacker.run(call, str(folder))


def test_answers(attacked, folder):
    _, victim = attacked

    def call(folder: str) -> None:
        with pytest.raises(PolicyError, match=r"'worker1' refuses a message of worker 'worker0': .*attack_others"):
            rpc.rpc_sync("worker0", functions.make_attack, (folder,))
        with pytest.raises(PolicyError, match="attack_others"):
            rpc.remote("worker0", functions.make_attack, (folder,)).to_here()
        with pytest.raises(RemoteUnpicklableError, match="AttackingError.*\n.*attack_others"):
            rpc.rpc_sync("worker0", functions.raise_attack, (folder,))
        with pytest.raises(RemoteUnpicklableError, match="attack_others"):
            rpc.remote("worker0", functions.raise_attack, (folder,)).to_here()

    victim.run(call, str(folder))
    assert victim.run(refused) == 4


def test_streams(attacked, folder):
    _, victim = attacked

    def consume(folder: str) -> None:
        items = rpc.rpc_stream("worker0", functions.yield_attack, (folder,))
        assert next(items) == 1
        with pytest.raises(PolicyError, match="attack_others"):
            next(items)
        items = rpc.rpc_stream("worker0", functions.yield_then_raise_attack, (folder,))
        assert next(items) == 1
        with pytest.raises(RemoteUnpicklableError, match="attack_others"):
            next(items)

    victim.run(consume, str(folder))


def test_errors_of_control_messages(attacked, folder):
    attacker, victim = attacked

    def fail(_worker, payload) -> None:
        raise AttackingError(payload)

    def answer_with_an_attack() -> None:
        current_agent().control.on("attack", fail)

    def send(folder: str) -> None:
        agent, outcomes = current_agent(), []
        agent.control.send(agent.worker("worker0"), "attack", folder, outcomes.append)
        wait_until(lambda: outcomes)
        assert isinstance(outcomes[0], RemoteUnpicklableError)

    attacker.run(answer_with_an_attack)
    victim.run(send, str(folder))


def test_all_gather(workers, folder):
    """worker0 leads, so its value comes in its answer."""
    policy = rpc.Policy(callers={"worker0": rpc.Policy(accepts="plain")})
    attacker, victim = workers.rpc(2, policy=policy)

    def gather(value) -> dict:
        return rpc.all_gather(value)

    attack = attacker.start(lambda folder: gather(Attack(folder)) and None, str(folder))
    with pytest.raises(PolicyError, match="attack_others"):
        victim.run(gather, 1)
    attack.result()


def test_the_sender_learns_what_to_do(attacked):
    attacker, _ = attacked
    with pytest.raises(PolicyError) as caught:
        attacker.run(rpc.rpc_sync, "worker1", functions.unlisted, (1,))
    name = "tests.rpc.wire.policy_functions.unlisted"
    assert caught.value.name == name
    assert str(caught.value) == (
        f"worker 'worker1' refuses a message of worker 'worker0': it names '{name}', which is not exposed: "
        "decorate it with rpc.expose in a module that this worker imports, or "
        f"list '{name}' in `exposed` of the rpc.Policy in this worker's RpcBackendOptions "
        "(not sent: it has not run)"
    )
