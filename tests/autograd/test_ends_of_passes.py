"""A pass that fails on one worker ends on all of them, and they can run the next one."""

import os
import threading

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd import backward_pass
from gradwire.autograd.contexts import Context
from gradwire.autograd.extension import Autograd
from gradwire.errors import AutogradError, RemoteError, RpcTimeoutError, SendFailedError, WorkerLostError
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import add, assert_clean, multiply, set_event, wait_for, wait_until
from tests.rpc.test_fault_injection import faulty


class Acts(torch.autograd.Function):
    """Runs a function of ACTS in its backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ACTS[ctx.act]()
        return gradient, None


def raise_an_error() -> None:
    raise LookupError("no gradient today")


def die() -> None:
    os._exit(3)


def wait_for_the_end() -> None:
    """Returns when this worker knows that the pass has failed."""
    running = Context.current().running_pass()
    wait_until(lambda: running.error is not None)
    set_event("ended")


def wait_until_released() -> None:
    wait_for("go on")


ACTS = {
    "raise": raise_an_error,
    "die": die,
    "wait for the end": wait_for_the_end,
    "wait": wait_until_released,
    "go on": lambda: None,
}


def acting(x: torch.Tensor, act: str) -> torch.Tensor:
    return Acts.apply(x * 2, act)


def relay(x: torch.Tensor, to: str, act: str) -> torch.Tensor:
    return rpc.rpc_sync(to, acting, (x * 2, act)) * 3


def running_passes() -> int:
    return rpc.debug_info()["num_current_backward_passes"]


def one_more(*workers: str) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = sum(rpc.rpc_sync(to, multiply, (x, x)).sum() for to in workers)
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0 * len(workers)))
    assert_clean()


def test_an_error_arrives_with_its_worker_and_traceback_and_ends_all_others(workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x, "worker2", "raise")).sum()
            other = rpc.rpc_sync("worker3", acting, (x, "wait for the end")).sum()
            with pytest.raises(LookupError, match="no gradient today") as caught:
                autograd.backward(context_id, [loss + other])
            cause = caught.value.__cause__
            assert isinstance(cause, RemoteError)
            assert cause.worker == "worker2"
            assert "in raise_an_error" in cause.remote_traceback
            # All have ended the pass when the caller gets the error.
            for worker in range(4):
                assert rpc.rpc_sync(f"worker{worker}", running_passes) == 0
        one_more("worker1", "worker2", "worker3")

    started = workers.rpc(4)
    started[0].run(check)
    started[3].run(wait_for, "ended")
    workers.each(started, assert_clean)


def test_a_worker_that_dies_in_its_backward(workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x, "worker2", "die")).sum()
            with pytest.raises(WorkerLostError, match="'worker2'"):
                autograd.backward(context_id, [loss])
        one_more("worker1", "worker3")

    started = workers.rpc(4, rpc_timeout=0)
    started[0].run(check)
    workers.each([started[1], started[3]], assert_clean)


def test_the_caller_dies_in_its_backward(workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            h = rpc.rpc_sync("worker1", relay, (x, "worker2", "raise"))
            autograd.backward(context_id, [Acts.apply(h.sum(), "die")])

    a, b, c = workers.rpc(3, rpc_timeout=0)
    a.start(check)
    a.process.join(30)
    assert a.process.exitcode is not None
    workers.each([b, c], assert_clean)
    b.run(one_more, "worker2")


def test_a_timeout_ends_the_pass_everywhere(workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x, "worker2", "wait for the end")).sum()
            with pytest.raises(RpcTimeoutError, match="waits for the gradients of its message") as caught:
                autograd.backward(context_id, [loss], timeout=0.2)
            assert caught.value.seconds == 0.2
        one_more("worker1", "worker2")

    started = workers.rpc(3)
    started[0].run(check)
    started[2].run(wait_for, "ended")
    workers.each(started, assert_clean)


def test_two_passes_of_one_context_at_once(workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            slow = rpc.rpc_sync("worker1", acting, (x, "wait")).sum()
            other = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            first = rpc.rpc_async("worker0", run_pass, (context_id, rpc.RRef(slow)))
            wait_until(lambda: rpc.rpc_sync("worker1", running_passes))
            with pytest.raises(AutogradError, match="two backward passes of context"):
                autograd.backward(context_id, [other])
            rpc.rpc_sync("worker1", set_event, ("go on",))
            first.wait()
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))

    started = workers.rpc(2)
    started[0].run(check)
    workers.each(started, assert_clean)


def run_pass(context_id: int, root: rpc.RRef) -> None:
    autograd.backward(context_id, [root.local_value()])


@pytest.mark.parametrize("name", ["GRADIENTS", "BACKWARD", "CALL", "autograd.abort", "autograd.release"])
def test_messages_that_fail_to_be_sent(workers, name):
    """A pass fails if one of its messages cannot be sent; messages that clean up are repeated."""

    def attempt() -> bool:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x, "worker2", "raise")) * rpc.rpc_sync("worker2", add, (x, x))
            with pytest.raises((LookupError, SendFailedError)) as caught:
                autograd.backward(context_id, [loss.sum()])
        return isinstance(caught.value, LookupError)

    def check() -> None:
        outcomes = []
        while not all(outcomes[-2:]) or len(outcomes) < 2:  # each worker fails once; then all succeed
            try:
                outcomes.append(attempt())
            except SendFailedError:
                outcomes.append(False)
            assert len(outcomes) < 10
        assert all(outcomes) is name.startswith("autograd.")

    started = faulty(workers, 3, messages_to_fail=[name], num_fail_sends=1)
    started[0].run(check)
    workers.each(started, assert_clean)


RELEASED_BY: list[str] = []
"""The names of the workers that have told this one that a context has ended."""


def note_releases() -> None:
    control = current_agent().control
    end = current_agent().extension(Autograd).contexts._on_release

    def note_and_end(sender: rpc.WorkerInfo, payload: object) -> None:
        end(sender, payload)
        RELEASED_BY.append(sender.name)

    control.on("autograd.release", note_and_end)


def released_by() -> list[str]:
    """Returns RELEASED_BY, once what this worker itself tells others has been acknowledged."""
    control = current_agent().control
    assert_clean()
    if current_agent().info.id != 0:
        wait_until(lambda: RELEASED_BY)
    told = threading.Event()
    control.run(told.set)
    assert told.wait(20)
    wait_until(lambda: not control.pending())
    return RELEASED_BY


def test_one_worker_tells_each_other_that_a_context_has_ended(workers):
    """No worker tells the one that told it, nor one that the creator of the context tells."""

    def run() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            there_and_on = rpc.rpc_sync("worker1", relay, (x, "worker2", "go on"))
            loss = there_and_on + rpc.rpc_sync("worker2", multiply, (x, x))
            there_only = rpc.rpc_sync("worker1", relay, (x, "worker3", "go on"))
            autograd.backward(context_id, [(loss + there_only).sum()])

    started = workers.rpc(4)
    workers.each(started, note_releases)
    started[0].run(run)
    workers.each(started, released_by)  # and their messages have arrived
    assert workers.each(started, released_by) == [[], ["worker0"], ["worker0"], ["worker1"]]


def exit_in_backward(_: torch.Tensor) -> None:
    raise SystemExit(3)


def test_an_exit_in_the_callers_backward_ends_the_pass_on_all_workers(workers):
    """As Ctrl-C does. worker2 would wait for gradients that worker1 never sends."""

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", relay, (x, "worker2", "go on"))
            handle = y.register_hook(exit_in_backward)
            with pytest.raises(SystemExit):
                autograd.backward(context_id, [y.sum()], retain_graph=True)
            handle.remove()
            wait_until(lambda: not rpc.rpc_sync("worker2", running_passes))
            autograd.backward(context_id, [y.sum()])
            assert x in autograd.get_gradients(context_id)

    a, *_ = workers.rpc(3)
    a.run(check)


def test_failed_passes_make_room_for_later_ones(workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch, autograd.context() as context_id:
            patch.setattr(backward_pass, "MAX_PASSES", 3)
            y = x * 2
            handle = y.register_hook(fail_in_hook)
            for _ in range(5):
                with pytest.raises(LookupError, match="no gradient"):
                    autograd.backward(context_id, [y.sum()], retain_graph=True)
            handle.remove()
            autograd.backward(context_id, [y.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))

    (a,) = workers.rpc(1)
    a.run(check)


def fail_in_hook(_: torch.Tensor) -> None:
    raise LookupError("no gradient")
