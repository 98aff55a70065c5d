"""`async_execution`, `wait_all`, and the collectives that users call."""

import logging
import threading
from unittest.mock import Mock, patch

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcTimeoutError, RRefError
from gradwire.rpc.collectives import all_gather
from gradwire.rpc.execution.futures import as_concurrent_future

from tests.remote_functions import add, assert_clean, event, identity, set_event, wait_for


@rpc.functions.async_execution
def add_later(to, x, y, z):
    return rpc.rpc_async(to, add, (x, y)).then(lambda future: future.wait() + z)


@rpc.functions.async_execution
def answer_when(name):
    """Returns a future that another call completes, so no thread waits."""
    future = torch.futures.Future()
    waiting[name] = future
    event(name).set()
    return future


@rpc.functions.async_execution
def no_future():
    return 3


@rpc.functions.async_execution
def fail_later(to):
    def fail(future):
        raise KeyError("too late")

    return rpc.rpc_async(to, identity, (1,)).then(fail)


@rpc.functions.async_execution
def fail_now():
    raise KeyError("at once")


waiting: dict[str, torch.futures.Future] = {}


def complete(name, value):
    assert event(name).wait(30)
    waiting.pop(name).set_result(value)


class Adder:
    size = 7

    @staticmethod
    @rpc.functions.async_execution
    def static(to, x, y, z):
        return add_later(to, x, y, z)

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to, x, y, z):
        assert cls is Adder
        return add_later(to, x, y, z)

    @rpc.functions.async_execution
    def bound(self, to, x, y, z):
        assert isinstance(self, Adder)
        return add_later(to, x, y, z)


CALLS = ["rpc_sync", "rpc_async", "remote"]


def result_of(how, answer):
    return {"rpc_sync": lambda: answer, "rpc_async": lambda: answer.wait(), "remote": lambda: answer.to_here()}[
        how
    ]()


@pytest.mark.parametrize("how", CALLS)
def test_the_value_of_the_future_is_the_answer(three_workers, how):
    def check():
        call = getattr(rpc, how)
        args = ("worker2", torch.ones(2), 1, 2)
        for function in (add_later, Adder.static, Adder.of_class, Adder().bound):
            assert torch.equal(result_of(how, call("worker1", function, args)), torch.full((2,), 4.0))
        rref = rpc.remote("worker1", Adder)
        for name in ("static", "of_class", "bound"):
            answer = getattr(getattr(rref, how)(), name)(*args)
            assert torch.equal(result_of(how, answer), torch.full((2,), 4.0))

    three_workers[0].run(check)
    for worker in three_workers:
        worker.run(assert_clean)


@pytest.mark.parametrize("how", CALLS)
def test_errors(three_workers, how):
    def check():
        def run(function, *args):
            return result_of(how, getattr(rpc, how)("worker1", function, args))

        with pytest.raises(
            RuntimeError, match=r"must return a torch\.futures\.Future object, but no_future .* int"
        ):
            run(no_future)
        with pytest.raises(KeyError, match="at once"):
            run(fail_now)
        with pytest.raises(Exception, match="too late"):
            run(fail_later, "worker2")

    three_workers[0].run(check)
    for worker in three_workers:
        worker.run(assert_clean)


def test_no_thread_waits(workers):
    a, _ = workers.rpc(2, num_worker_threads=1)

    def check():
        futures = [rpc.rpc_async("worker1", answer_when, (str(i),)) for i in range(50)]
        for i in range(50):
            rpc.rpc_sync("worker1", complete, (str(i), i))
        assert torch.futures.wait_all(futures) == list(range(50))
        assert rpc.rpc_sync("worker1", rpc.debug_info)["executor_threads"] < 8

    a.run(check)


def test_wait_all(three_workers):
    def check():
        with rpc.wait_all():
            futures = [rpc.rpc_async("worker1", add, (i, 1)) for i in range(5)]
            assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        assert [future.done() for future in futures] == [True] * 5
        with pytest.raises(KeyError, match="at once"), rpc.wait_all():
            rpc.rpc_async("worker1", fail_now)
        with pytest.raises(ValueError, match="mine"), rpc.wait_all():
            raise ValueError("mine")

    three_workers[0].run(check)


def test_wait_all_inside_wait_all(three_workers):
    def check():
        with rpc.wait_all():
            before = rpc.rpc_async("worker1", wait_for, ("outer",))
            with rpc.wait_all():
                inner = rpc.rpc_async("worker1", add, (1, 1))
            assert inner.done()
            assert not before.done()
            after = rpc.rpc_async("worker1", add, (1, 1))
            rpc.rpc_sync("worker1", set_event, ("outer",))
        assert before.done()
        assert after.done()

    three_workers[0].run(check)


def test_all_gather_and_barrier(three_workers, workers):
    def check():
        me = rpc.get_worker_info()
        everybody = rpc.all_gather({"id": me.id})
        rpc.barrier()
        rpc.barrier([f"worker{i}" for i in range(3)])
        return everybody

    assert workers.each(three_workers, check) == [{f"worker{i}": {"id": i} for i in range(3)}] * 3

    def gather_two():
        return rpc.all_gather(rpc.get_worker_info().id, ["worker2", "worker0"])

    assert workers.each([three_workers[0], three_workers[2]], gather_two) == [{"worker0": 0, "worker2": 2}] * 2
    with pytest.raises(ValueError, match=r"'worker1' is not among the workers \['worker0', 'worker2'\]"):
        three_workers[1].run(gather_two)


def test_a_timeout_names_the_missing_workers(three_workers):
    def gather():
        with pytest.raises(RpcTimeoutError, match="all_gather waits for 'worker1, worker2'"):
            rpc.all_gather(1, timeout=0.5)

    three_workers[0].run(gather)


def test_a_timeout_of_a_barrier_names_the_barrier(three_workers):
    def wait():
        rpc.set_rpc_timeout(0.5)
        with pytest.raises(RpcTimeoutError, match="barrier waits for 'worker1'") as caught:
            rpc.barrier(["worker0", "worker1"])
        assert (caught.value.worker, caught.value.seconds) == ("worker1", 0.5)

    three_workers[0].run(wait)


def test_a_long_wait_in_a_collective_is_logged(three_workers):
    def wait():
        all_gather.WARN_INTERVAL_S = 0.1
        logging.basicConfig(level=logging.INFO)
        logged = threading.Event()

        def note(record):
            # It may wait for its own value first, which has yet to reach the thread that collects them.
            if record.getMessage().endswith("waits for worker2"):
                logged.set()
            return True

        logging.getLogger("gradwire.rpc.collectives.all_gather").addFilter(note)
        waiting = threading.Thread(target=rpc.barrier, args=(["worker0", "worker2"],))
        waiting.start()
        assert logged.wait(30)
        rpc.rpc_sync("worker2", rpc.barrier, (["worker0", "worker2"],))
        waiting.join()

    three_workers[0].run(wait)
    assert "barrier of worker worker0 waits for worker2" in three_workers[0].log.read_text()


def test_a_timeout_of_shutdown_names_the_missing_workers(three_workers):
    def leave():
        with pytest.raises(RpcTimeoutError, match="shutdown waits for others to shut down: 'worker0'"):
            rpc.shutdown(timeout=3)

    pending = [worker.start(leave) for worker in three_workers[1:]]
    for each in pending:
        each.result()


def test_a_timeout_of_shutdown_names_the_calls_in_flight(three_workers):
    def leave():
        rpc.rpc_async("worker1", wait_for, ("end",))
        with pytest.raises(RpcTimeoutError, match="shutdown waits for 1 calls to 'worker1' on worker 'worker0'"):
            rpc.shutdown(timeout=0.5)

    three_workers[0].run(leave)
    three_workers[1].run(set_event, "end")


def test_timeouts_can_be_changed(three_workers):
    def check():
        assert rpc.get_rpc_timeout() == 60
        rpc.set_rpc_timeout(0.05)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", wait_for, ("end",))
        rpc.set_rpc_timeout(0)
        future = rpc.rpc_async("worker1", wait_for, ("end",))
        rpc.set_rpc_timeout(0.05)  # that of calls from now on
        rpc.rpc_sync("worker1", set_event, ("end",), timeout=60)
        assert future.wait() == "end"
        with pytest.raises(ValueError, match="rpc_timeout is -1"):
            rpc.set_rpc_timeout(-1)

    three_workers[0].run(check)


def test_attributes_through_a_reference(three_workers):
    def check():
        rref = rpc.remote("worker1", Adder)
        assert rref._get_type() is Adder
        assert rref.rpc_sync().size() == 7
        assert rref.rpc_async().size().wait() == 7
        assert rref.remote().size().to_here() == 7
        with pytest.raises(AttributeError, match="has no attribute 'missing'"):
            rref.remote().missing()
        with pytest.raises(AttributeError, match="has no attribute 'missing'"):
            rref.rpc_async().missing().wait()

    three_workers[0].run(check)


def test_a_creation_that_takes_too_long(three_workers):
    def check():
        rref = rpc.remote("worker1", wait_for, ("end",), timeout=0.1)
        with pytest.raises(RpcTimeoutError, match="RRef creation"):
            rref._get_future().wait()
        with pytest.raises(RpcTimeoutError, match="RRef creation"):
            rref.to_here()
        with pytest.raises(RRefError, match="cannot be passed on: .*RRef creation"):
            rpc.rpc_sync("worker2", identity, (rref,))
        rpc.rpc_sync("worker1", set_event, ("end",))

    three_workers[0].run(check)
    for worker in three_workers:
        worker.run(assert_clean)


def test_rref_backward(three_workers):
    from gradwire import autograd

    def check():
        t = torch.rand(10, requires_grad=True)
        with autograd.context() as context_id:
            rref = rpc.remote("worker1", torch.sum, (t,))
            rref.backward(context_id, retain_graph=True)
            rref.backward(context_id)
            assert torch.equal(autograd.get_gradients(context_id)[t], torch.full((10,), 2.0))
            with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id'"):
                rref.backward()
            with pytest.raises(RuntimeError, match="RRef should contain a tensor"):
                rpc.remote("worker1", identity, ("no tensor",)).backward(context_id)
        mine = rpc.RRef((t * t).sum())
        mine.backward()
        assert torch.equal(t.grad, 2 * t)
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
            rpc.RRef((t * t).sum()).backward(100)

    three_workers[0].run(check)
    for worker in three_workers:
        worker.run(assert_clean)


def test_functions_that_cannot_be_decorated():
    with pytest.raises(TypeError, match="built-in function len> cannot be marked"):
        rpc.functions.async_execution(len)


def test_default_streams_wait_for_the_value_of_a_future():
    # Without a GPU: the agent's threads read a value on default streams, torch completes it on others.
    side, default = Mock(), Mock()
    cuda = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_stream": lambda device: side if device else default,
        "default_stream": lambda _device: default,
    }
    future = torch.futures.Future()
    outcome = as_concurrent_future(future)
    with patch.multiple(torch.cuda, **cuda):
        future.set_result(3)
    assert outcome.result(timeout=20) == 3
    default.wait_stream.assert_called_once_with(side)
