"""Backward passes in which a worker does not answer end with an error, and contexts outlive that."""

import threading
from typing import Any

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd import gradient_sender
from gradwire.autograd.extension import Autograd
from gradwire.errors import AutogradError, RpcTimeoutError, UnknownContextError, WorkerSuspectError
from gradwire.rpc.contracts.agent import current_agent

from tests.autograd.test_ends_of_passes import relay
from tests.remote_functions import assert_clean, multiply, set_event, wait_until
from tests.simulated_peers import SilentTransport

lost = threading.Event()


def lose_gradients_for(worker: str) -> None:
    """Has this worker send no gradients to another one, as if the connection broke on the way."""
    post = gradient_sender.post_gradients

    def post_to_others(agent, context_id, pass_id, send, gradients) -> None:
        if agent.worker(send[0]).name == worker:
            lost.set()
        else:
            post(agent, context_id, pass_id, send, gradients)

    gradient_sender.post_gradients = post_to_others


def interrupt_when_lost(worker: str) -> None:
    """Does to this worker's contexts what the broken connection does."""
    agent = current_agent()
    assert lost.wait(20)
    wait_until(lambda: not agent.extension(Autograd).contexts.running_count())  # its part has ended
    agent.extension(Autograd).on_worker_suspect(agent.worker(worker), "its connection broke")


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_pass_whose_gradients_are_lost_on_the_way_fails(workers, mode):
    """Between two workers, of which the first has done its part by then: the second would wait without end."""

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        rpc.rpc_sync("worker1", lose_gradients_for, ("worker2",))
        interrupted = rpc.rpc_async("worker1", interrupt_when_lost, ("worker2",))
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay_alone, (x, "worker2")).sum()
            with pytest.raises(
                WorkerSuspectError, match="gradients that worker 'worker1' has sent it may be lost"
            ):
                autograd.backward(context_id, [loss], mode=mode)
            interrupted.wait()
        assert_clean()

    started = workers.rpc(3, rpc_timeout=0)
    started[0].run(check)
    workers.each(started, assert_clean)


def relay_alone(_x: torch.Tensor, to: str) -> torch.Tensor:
    """Returns what another worker computes from a leaf of its own, so that this one awaits no gradients."""
    return rpc.rpc_sync(to, leaf) * 3


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def suspect(worker: str) -> None:
    agent = current_agent()
    agent.extension(Autograd).on_worker_suspect(agent.worker(worker), "its connection broke")


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_pass_that_needs_a_suspect_worker_fails_and_a_later_one_succeeds(workers, mode):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x, "worker2", "wait")).sum()
            pending = threading.Thread(target=suspect_when_running)
            pending.start()
            with pytest.raises(WorkerSuspectError, match="'worker2'"):
                autograd.backward(context_id, [loss], mode=mode, retain_graph=True)
            pending.join(20)
            autograd.backward(context_id, [loss], mode=mode)
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 12.0))
        assert_clean()

    def suspect_when_running() -> None:
        wait_until(lambda: rpc.rpc_sync("worker1", waits_for_gradients))
        rpc.rpc_sync("worker1", suspect, ("worker2",))
        rpc.rpc_sync("worker2", set_event, ("go on",))

    started = workers.rpc(3, rpc_timeout=0)
    started[0].run(check)
    workers.each(started, assert_clean)


def waits_for_gradients() -> bool:
    return any(context.passes.is_running for context in current_agent().extension(Autograd).contexts.all())


def end_all_contexts() -> None:
    contexts = current_agent().extension(Autograd).contexts
    for context in contexts.all():
        contexts.release(context.id)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_pass_through_a_context_that_a_worker_has_ended_fails(workers, mode):
    """As a worker does that takes the creator for lost. Without its part, gradients would be missing silently."""

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x, "worker2", "go on")).sum()
            rpc.rpc_sync("worker1", end_all_contexts)
            # worker1 has told worker2, whose error may come first.
            with pytest.raises(UnknownContextError, match="'worker[12]'"):
                autograd.backward(context_id, [loss], mode=mode)

    started = workers.rpc(3)
    started[0].run(check)


def ask_for_help(x: torch.Tensor, helper: str) -> torch.Tensor:
    """Asks another worker, which the question does not reach."""
    agent: Any = current_agent()
    peer = agent.peers.of(agent.worker(helper))
    transport, peer.transport = peer.transport, SilentTransport()
    try:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync(helper, multiply, (x, x), timeout=0.2)
    finally:
        peer.transport = transport
    return x * 2


def test_a_fast_pass_after_a_lost_message_fails(workers):
    """It would wait for gradients that do not come."""

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", ask_for_help, (x, "worker2")).sum()
            lost = "message 0 of worker 'worker1' to worker 'worker2' has not arrived there"
            with pytest.raises(AutogradError, match=lost):
                autograd.backward(context_id, [loss], mode="fast")
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
        assert_clean()

    started = workers.rpc(3, rpc_timeout=0)
    started[0].run(check)
    workers.each(started, assert_clean)
