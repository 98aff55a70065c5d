"""The agent that fails and delays messages."""

from collections.abc import Iterator

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import AnswerFailedError, RpcTimeoutError, RRefError, SendFailedError
from gradwire.rpc.backend_registry import BackendType, construct_rpc_backend_options
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.fault_injection import FaultyRpcBackendOptions, control_kinds, message_names

from tests import remote_functions
from tests.remote_functions import add, assert_clean, identity, keep, set_event, wait_for


def faulty(workers, count: int, **faults):
    """Workers that are called worker0, worker1, …, with the same faults on each."""
    started = workers(count)
    url = f"file://{workers.folder / 'rendezvous'}"

    def join(rank: int) -> None:
        rpc.init_rpc(
            f"worker{rank}",
            backend="FAULTY",
            rank=rank,
            world_size=count,
            rpc_backend_options=FaultyRpcBackendOptions(init_method=url, **faults),
        )

    for pending in [worker.start(join, rank) for rank, worker in enumerate(started)]:
        pending.result()
    return started


def fetch(rref: rpc.RRef) -> object:
    return rref.to_here()


def range_iterator(count: int) -> Iterator[int]:
    return iter(range(count))


def what_is_kept() -> list[object]:
    return list(remote_functions.kept)


def test_a_call_that_is_failed_is_not_sent_again(workers):
    a, b = faulty(workers, 2, messages_to_fail=["CALL"], num_fail_sends=2)

    def check() -> None:
        future = rpc.rpc_async("worker1", keep, (1,))
        with pytest.raises(SendFailedError, match="a call to worker 'worker1' could not be sent.*fault injection"):
            future.wait()
        with pytest.raises(SendFailedError):
            rpc.rpc_sync("worker0", keep, (2,))
        assert rpc.rpc_sync("worker1", keep, (3,)) == 1

    a.run(check)
    assert b.run(what_is_kept) == [3]
    workers.each([a, b], assert_clean)


def test_references_in_a_call_that_is_failed_are_not_lost(workers):
    a, b, c = faulty(workers, 3, messages_to_fail=["CALL"], num_fail_sends=1)

    def check() -> None:
        mine, theirs = rpc.RRef(1), rpc.remote("worker1", add, (1, 1))
        with pytest.raises(SendFailedError):
            rpc.rpc_sync("worker2", fetch, (mine, theirs))
        assert rpc.rpc_sync("worker2", fetch, (mine,)) == 1
        assert rpc.rpc_sync("worker2", fetch, (theirs,)) == 2

    a.run(check)
    workers.each([a, b, c], assert_clean)


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_a_creation_that_is_failed(workers, owner):
    a, b = faulty(workers, 2, messages_to_fail=["RREF_CREATE"], num_fail_sends=1)

    def check() -> None:
        rref = rpc.remote(owner, add, (1, 2))
        with pytest.raises(SendFailedError, match="RRef creation"):
            rref.to_here()
        if owner == "worker1":
            with pytest.raises(RRefError, match="RRef creation"):
                rpc.rpc_async("worker1", fetch, (rref,))
        assert rpc.remote(owner, add, (1, 2)).to_here() == 3

    a.run(check)
    workers.each([a, b], assert_clean)


def test_control_messages_are_sent_until_they_arrive(workers):
    a, b, c = faulty(workers, 3, messages_to_fail=control_kinds(), num_fail_sends=3)

    def check() -> None:
        rref = rpc.remote("worker1", torch.ones, (2,))
        assert rpc.rpc_sync("worker2", fetch, (rref,)).equal(torch.ones(2))
        weight = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", add, (weight, weight)).sum()
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[weight].equal(torch.full((2,), 2.0))

    a.run(check)
    workers.each([a, b, c], assert_clean)


def test_an_answer_that_is_failed(workers):
    a, b = faulty(workers, 2, messages_to_fail=["RESULT"], num_fail_sends=1)

    def check() -> None:
        with pytest.raises(AnswerFailedError, match="worker 'worker1' has run the call"):
            rpc.rpc_sync("worker1", keep, (1,))
        assert rpc.rpc_sync("worker1", keep, (2,)) == 2

    a.run(check)
    assert b.run(what_is_kept) == [1, 2]


def test_an_answer_of_failure_that_is_failed_leaves_the_timeout(workers):
    a, _ = faulty(workers, 2, messages_to_fail=["RESULT", "ERROR"], num_fail_sends=1)

    def check() -> None:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", identity, (1,), timeout=5)  # in which it must run
        assert rpc.rpc_sync("worker1", identity, (2,)) == 2

    a.run(check)


def test_a_delay_counts_against_the_timeout_and_holds_up_nothing(workers):
    a, _ = faulty(workers, 2, messages_to_delay={"CALL": 3600.0})

    def check() -> None:
        for to in ("worker0", "worker1"):
            with pytest.raises(RpcTimeoutError, match="ran for more than"):
                rpc.rpc_sync(to, identity, (1,), timeout=0.05)
        late = rpc.rpc_async("worker1", identity, (2,), timeout=0)
        assert rpc.remote("worker1", add, (1, 2)).to_here() == 3
        assert not late.done()

    a.run(check)


def test_what_is_delayed_arrives(workers):
    a, b = faulty(workers, 2, messages_to_delay={"CALL": 1.5})

    def check() -> None:
        for to in ("worker0", "worker1"):
            with pytest.raises(RpcTimeoutError):
                rpc.rpc_sync(to, identity, (1,), timeout=0.05)
        late = rpc.rpc_async("worker1", identity, (2,))
        assert rpc.rpc_sync("worker1", identity, (3,), timeout=0) == 3
        assert late.wait() == 2

    a.run(check)
    workers.each([a, b], assert_clean)


def test_a_fetch_that_comes_after_its_reference_is_gone(workers):
    a, b = faulty(workers, 2, messages_to_delay={"RREF_FETCH": 0.3})

    def check() -> None:
        rref = rpc.remote("worker1", add, (1, 2))
        with pytest.raises(RpcTimeoutError):
            rref.to_here(timeout=0.01)
        del rref
        assert_clean()
        rpc.shutdown()

    pending = b.start(rpc.shutdown)
    a.run(check)
    pending.result()


def test_a_stream_ends_with_its_credit_that_is_failed(workers):
    a, b = faulty(workers, 2, messages_to_fail=["STREAM_CREDIT"], num_fail_sends=1)

    def check() -> None:
        stream = rpc.rpc_stream("worker1", range_iterator, (20,), window_items=4)
        with pytest.raises(SendFailedError, match="fault injection failed the STREAM_CREDIT message") as caught:
            list(stream)
        assert caught.value.outcome is rpc.Outcome.RAN
        assert next(stream, None) is None
        assert list(rpc.rpc_stream("worker1", range_iterator, (20,), window_items=4)) == list(range(20))

    a.run(check)
    workers.each([a, b], assert_clean)


def test_what_is_late_leaves_when_the_worker_does(workers):
    a, b = faulty(workers, 2, messages_to_delay={"CALL": 3600.0})

    def leave() -> None:
        assert rpc.remote("worker1", add, (1, 2)).to_here() == 3  # so that they are connected
        rpc.rpc_async("worker1", set_event, ("late",))
        rpc.shutdown(graceful=False)

    a.run(leave)
    assert b.run(wait_for, "late") == "late"


def test_names():
    assert set(message_names()) == {*MessageType.keys(), *control_kinds()} - {"MESSAGE_TYPE_UNSPECIFIED"}
    for options in (
        {"messages_to_fail": ["PYTHON_CALL"]},
        {"messages_to_delay": {"rref.frok": 1}},
    ):
        with pytest.raises(ValueError, match="messages are called ALL_GATHER.*rref.fork"):
            FaultyRpcBackendOptions(**options)


def test_every_control_kind_has_a_name(agents):
    (agent,) = agents(1)
    assert set(agent.control.kinds()) == set(control_kinds())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"messages_to_fail": "CALL"}, TypeError, "give a list"),
        ({"num_fail_sends": -1}, ValueError, "num_fail_sends is -1"),
        ({"num_fail_sends": 1.5}, ValueError, "num_fail_sends is 1.5"),
        ({"messages_to_delay": {"CALL": -1}}, ValueError, "'CALL'. is -1: give seconds"),
        ({"messages_to_delay": {"CALL": float("inf")}}, ValueError, "give seconds"),
        ({"rpc_timeout": -1}, ValueError, "rpc_timeout is -1"),
    ],
)
def test_options_are_checked(options, error, text):
    with pytest.raises(error, match=text):
        FaultyRpcBackendOptions(**options)


def test_the_backend_makes_its_options():
    options = construct_rpc_backend_options(
        BackendType.FAULTY,
        5,
        "env://",
        messages_to_fail=["CALL"],
        messages_to_delay={"rref.fork": 1},
        num_fail_sends=3,
    )
    assert isinstance(options, FaultyRpcBackendOptions)
    assert options.messages_to_fail == ["CALL"]
    assert options.messages_to_delay == {"rref.fork": 1.0}
    assert (options.num_fail_sends, options.rpc_timeout) == (3, 5.0)


def test_it_needs_its_own_options(workers):
    (a,) = workers(1)
    url = f"file://{workers.folder / 'rendezvous'}"

    def check() -> None:
        with pytest.raises(TypeError, match="give FaultyRpcBackendOptions"):
            rpc.init_rpc("a", "FAULTY", 0, 1, rpc.RpcBackendOptions(init_method=url))

    a.run(check)
