"""The error of a call says what has become of it: not sent, unknown, or that it has run."""

import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import gradwire
import pytest
import torch
from gradwire import rpc
from gradwire.errors import (
    AnswerFailedError,
    EvictedError,
    LimitReachedError,
    NotInitializedError,
    Outcome,
    PolicyError,
    RemoteError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    SendFailedError,
    SendQueueFullError,
    SerializationError,
    UnknownWorkerError,
    WorkerLostError,
    WorkerSuspectError,
    set_outcome,
)

from tests import remote_functions
from tests.remote_functions import add, assert_clean, identity, keep, set_event, wait_for, wait_until
from tests.stopped import has_stopped

NOT_SENT = r"\(not sent: it has not run\)$"
UNKNOWN = r"\(outcome unknown: it may have run\)$"


def outcome_of(call: Any, *expected: type[Exception], match: str = "") -> Outcome | None:
    """Returns the outcome that the error of a call, or of its future, has."""
    with pytest.raises(expected or RpcError, match=match) as caught:
        result = call()
        result.wait()
    error: Any = caught.value
    return error.outcome


def test_errors_keep_their_outcome_when_they_travel():
    assert gradwire.Outcome is rpc.Outcome is Outcome
    error = WorkerLostError("b", "it was killed")
    assert error.outcome is None
    assert str(error) == "worker 'b' is lost: it was killed"
    for outcome, text in (
        (Outcome.NOT_SENT, " (not sent: it has not run)"),
        (Outcome.UNKNOWN, " (outcome unknown: it may have run)"),
        (Outcome.RAN, ""),
    ):
        set_outcome(error, outcome)
        copied = pickle.loads(pickle.dumps(error))
        assert copied.outcome is error.outcome is outcome
        assert str(copied) == str(error) == f"worker 'b' is lost: it was killed{text}"


def test_what_errors_say_of_any_call():
    for error in (
        SendFailedError("b", "no reason"),
        SendQueueFullError("b", "max_in_flight", 1, "wait"),
        SerializationError("args[0]", "it is a lock"),
        UnknownWorkerError("c", ["a", "b"]),
        NotInitializedError("not yet"),
    ):
        assert error.outcome is Outcome.NOT_SENT
        assert "has not run" not in str(error)  # which the text says anyway
    assert AnswerFailedError("b", "no reason").outcome is Outcome.RAN
    assert RemoteError("b", "ValueError: no", "").outcome is Outcome.RAN


def test_errors_of_other_kinds_of_trouble_with_a_worker():
    suspect = WorkerSuspectError("b", "nothing has come from it for 5 s")
    assert (suspect.worker, suspect.reason) == ("b", "nothing has come from it for 5 s")
    assert "'b' does not answer, and may come back" in str(suspect)
    evicted = EvictedError("a", "its lease was over on b")
    assert (evicted.worker, evicted.reason) == ("a", "its lease was over on b")
    assert isinstance(suspect, RpcError)
    assert isinstance(evicted, RpcError)


def test_a_worker_that_is_lost(workers):
    a, b = workers.rpc(2, rpc_timeout=0)

    def start() -> None:
        rpc.rpc_sync("worker1", add, (1, 1))
        remote_functions.kept.append(rpc.rpc_async("worker1", wait_for, ("never",)))

    def check() -> None:
        call = remote_functions.kept.pop
        assert outcome_of(call, WorkerLostError, match=UNKNOWN) is Outcome.UNKNOWN
        call = lambda: rpc.rpc_async("worker1", add, (1, 1))  # noqa: E731
        assert outcome_of(call, WorkerLostError, match=NOT_SENT) is Outcome.NOT_SENT

    a.run(start)
    b.kill()
    a.run(check)


@pytest.mark.parametrize("transports", [("unix", "tcp", "grpc"), ("grpc",)])
def test_a_worker_that_was_never_reached(workers, transports):
    a, b = workers.rpc(2, rpc_timeout=0, transports=transports)
    b.kill()

    def check() -> None:
        futures = [rpc.rpc_async("worker1", add, (1, 1)) for _ in range(3)]
        for future in futures:
            with pytest.raises(WorkerLostError, match=NOT_SENT) as caught:
                future.wait()
            assert caught.value.outcome is Outcome.NOT_SENT

    a.run(check)


def fill_socket(pid: int) -> list[rpc.Future[Any]]:
    """Sends calls to worker1, which is stopped, until they are queued, and a few more."""
    rpc.rpc_sync("worker1", add, (1, 1))
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: has_stopped(pid))
    data = bytes(8 << 10)
    futures = []
    while rpc.debug_info()["flow_control"]["worker1"]["send_queue_bytes"] < 64 << 10:
        futures.append(rpc.rpc_async("worker1", identity, (data,), timeout=0))
    return futures


@pytest.mark.parametrize("transport", ["unix", "tcp"])  # gRPC has a queue of its own
def test_calls_that_wait_in_the_send_queue_of_a_lost_worker(workers, transport):
    a, b = workers.rpc(2, transports=(transport, "grpc"))

    def start(pid: int) -> None:
        remote_functions.kept[:] = fill_socket(pid)

    def check() -> None:
        outcomes = []
        for future in remote_functions.kept:
            with pytest.raises(WorkerLostError) as caught:
                future.wait()
            outcomes.append(caught.value.outcome)
        assert outcomes[0] is Outcome.UNKNOWN
        assert outcomes[-1] is Outcome.NOT_SENT
        first = outcomes.index(Outcome.NOT_SENT)
        assert set(outcomes[first:]) == {Outcome.NOT_SENT}  # they are sent in order

    a.run(start, b.pid)
    b.kill()
    a.run(check)


@pytest.mark.parametrize("transport", ["unix", "tcp"])  # gRPC has a queue of its own
def test_calls_that_time_out_in_the_send_queue_are_taken_back(workers, transport):
    a, b = workers.rpc(2, transports=(transport, "grpc"))

    def start(pid: int) -> None:
        futures = fill_socket(pid)
        queued = rpc.debug_info()["flow_control"]["worker1"]["send_queue_bytes"]
        timed_out = [rpc.rpc_async("worker1", keep, (f"late {i}",), timeout=0.1) for i in range(5)]
        kept = rpc.rpc_async("worker1", keep, ("in time",), timeout=0)
        for late in timed_out:
            with pytest.raises(RpcTimeoutError, match=NOT_SENT) as caught:
                late.wait()
            assert caught.value.outcome is Outcome.NOT_SENT
        assert rpc.debug_info()["flow_control"]["worker1"]["send_queue_bytes"] <= queued + 200
        remote_functions.kept[:] = [*futures, kept]

    def check() -> None:
        *futures, kept = remote_functions.kept
        assert {len(future.wait()) for future in futures} == {8 << 10}
        assert kept.wait() == 1
        remote_functions.kept.clear()

    a.run(start, b.pid)
    os.kill(b.pid, signal.SIGCONT)
    a.run(check)
    assert b.run(lambda: remote_functions.kept) == ["in time"]
    a.run(assert_clean)
    b.run(assert_clean)


def test_timeouts(two_workers):
    def check() -> None:
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2  # so that they are connected
        late = rpc.rpc_async("worker1", wait_for, ("late",), timeout=2)
        assert outcome_of(lambda: late, RpcTimeoutError, match=UNKNOWN) is Outcome.UNKNOWN
        rpc.rpc_sync("worker1", set_event, ("late",))

    two_workers[0].run(check)


def test_calls_that_wait_for_capacity(workers):
    a, _ = workers.rpc(2, flow_control=rpc.FlowControlOptions(max_in_flight=1))

    def check() -> None:
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        first = rpc.rpc_async("worker1", wait_for, ("first",), timeout=3)
        second = lambda: rpc.rpc_async("worker1", add, (1, 1), timeout=0.1)  # noqa: E731
        assert outcome_of(second, RpcTimeoutError, match=f"too much is in flight.*{NOT_SENT}") is Outcome.NOT_SENT
        assert outcome_of(lambda: first, RpcTimeoutError, match=UNKNOWN) is Outcome.UNKNOWN

    a.run(check)


def test_cancelled_calls(two_workers):
    def check() -> None:
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        future = rpc.rpc_async("worker1", wait_for, ("cancelled",))
        assert future.cancel()
        assert outcome_of(lambda: future, RpcCancelledError, match=UNKNOWN) is Outcome.UNKNOWN
        rpc.rpc_sync("worker1", set_event, ("cancelled",))

    two_workers[0].run(check)


def test_shutdown_fails_calls(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        futures = [rpc.rpc_async("worker1", wait_for, ("never",)) for _ in range(2)]
        rpc.shutdown(graceful=False)
        errors = []
        for future in futures:
            with pytest.raises(NotInitializedError, match=UNKNOWN) as caught:
                future.wait()
            errors.append(caught.value)
        assert [error.outcome for error in errors] == [Outcome.UNKNOWN] * 2
        assert outcome_of(lambda: rpc.rpc_async("worker1", add, (1, 1)), NotInitializedError) is Outcome.NOT_SENT

    a.run(check)


def raise_value_error() -> None:
    raise ValueError("no bread")


def call_a_third_worker() -> None:
    rpc.rpc_sync("worker2", add, (1, 1), timeout=0.1)


def return_a_lock() -> object:
    return threading.Lock()


def test_what_a_function_raises(workers):
    a, b, c = workers.rpc(3)

    def check() -> None:
        with pytest.raises(ValueError, match="no bread") as caught:
            rpc.rpc_sync("worker1", raise_value_error)
        assert caught.value.__cause__.outcome is Outcome.RAN
        with pytest.raises(SerializationError, match="the result") as unsendable:
            rpc.rpc_sync("worker1", return_a_lock)
        assert unsendable.value.outcome is Outcome.RAN

    def check_nested() -> None:
        """The error is that of the call that the function made, but the outcome is that of its own."""
        with pytest.raises(WorkerLostError, match="'worker2' is lost") as caught:
            rpc.rpc_sync("worker1", call_a_third_worker)
        assert caught.value.outcome is Outcome.RAN
        assert "it has not run" in caught.value.__cause__.text
        assert "it has not run" not in str(caught.value)

    a.run(check)
    c.kill()
    b.run(wait_until, lambda: is_lost("worker2"))
    a.run(check_nested)


def is_lost(name: str) -> bool:
    try:
        rpc.rpc_sync(name, add, (1, 1))
    except WorkerLostError:
        return True
    except WorkerSuspectError:  # while its process ends
        pass
    return False


def test_a_call_whose_arguments_cannot_be_read(two_workers):
    def check() -> None:
        module: Any = ModuleType("only_here")
        sys.modules["only_here"] = module
        module.function = type("function", (), {"__module__": "only_here", "__qualname__": "function"})
        with pytest.raises(SerializationError, match="only_here") as caught:
            rpc.rpc_sync("worker1", keep, (module.function,))
        assert caught.value.outcome is Outcome.NOT_SENT
        assert caught.value.__cause__.outcome is Outcome.NOT_SENT
        assert outcome_of(lambda: rpc.rpc_async("worker1", keep, (threading.Lock(),))) is Outcome.NOT_SENT
        assert outcome_of(lambda: rpc.rpc_async("nobody", keep, (1,)), UnknownWorkerError) is Outcome.NOT_SENT

    a, b = two_workers
    a.run(check)
    assert b.run(lambda: remote_functions.kept) == []


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def increase(self) -> int:
        self.count += 1
        return self.count

    def _decrease(self) -> None:
        self.count -= 1


def test_a_call_that_the_policy_refuses(workers):
    policy = rpc.Policy(accepts="exposed", exposed=["tests.remote_functions.add", f"{__name__}.Counter"])
    a, b = workers(2)
    url = f"file://{workers.folder / 'policy'}"

    def join(name: str, rank: int, **options: Any) -> None:
        made = rpc.RpcBackendOptions(init_method=url, **options)
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=made)

    pending = a.start(join, "worker0", 0)
    b.run(join, "worker1", 1, policy=policy)
    pending.result()

    def check() -> None:
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        with pytest.raises(PolicyError, match="it has not run") as caught:
            rpc.rpc_sync("worker1", keep, (1,))
        assert caught.value.outcome is Outcome.NOT_SENT
        counter = rpc.remote("worker1", Counter)
        assert counter.rpc_sync().increase() == 1
        with pytest.raises(PolicyError, match="it has not run") as caught:
            counter.rpc_sync()._decrease()
        assert caught.value.outcome is Outcome.NOT_SENT

    a.run(check)
    assert b.run(lambda: remote_functions.kept) == []


def raise_limit_reached() -> None:
    rpc.rpc_sync("worker0", raise_limit)


def raise_limit() -> None:
    raise LimitReachedError("too many loaves", "loaves=1")


def test_a_limit_that_a_nested_call_has_reached_is_no_refusal(two_workers):
    def check() -> None:
        with pytest.raises(LimitReachedError) as caught:
            rpc.rpc_sync("worker1", raise_limit_reached)
        assert caught.value.outcome is Outcome.RAN

    two_workers[0].run(check)


def test_a_payload_that_is_refused(workers):
    a, b = workers.rpc(2, channels=rpc.ChannelOptions(max_payload_bytes=1 << 20))

    def check() -> None:
        with pytest.raises(ValueError, match="max_payload_bytes") as caught:
            rpc.rpc_sync("worker1", keep, (torch.zeros(2 << 20, dtype=torch.uint8),))
        assert caught.value.__cause__.outcome is Outcome.NOT_SENT
        with pytest.raises(ValueError, match="max_payload_bytes"):
            rpc.rpc_sync("worker1", torch.zeros, (1 << 20,))

    a.run(check)
    assert b.run(lambda: remote_functions.kept) == []


def count_run(path: str) -> int:
    with Path(path).open("a") as file:
        file.write("x")
    return os.getpid()


def test_a_call_that_was_not_sent_never_runs(workers, tmp_path):
    """Counts the runs of calls that fail in all these ways, while the callee stops and goes on."""
    a, b = workers.rpc(2)
    log = tmp_path / "runs"

    def call(pid: int) -> None:
        outcomes = []
        blocks = fill_socket(pid)
        calls = [rpc.rpc_async("worker1", count_run, (str(log),), timeout=0.05 * (1 + i % 3)) for i in range(60)]
        for future in calls[::7]:
            future.cancel()
        os.kill(pid, signal.SIGCONT)
        calls += [rpc.rpc_async("worker1", count_run, (str(log),), timeout=0.001) for _ in range(60)]
        for future in calls:
            try:
                future.wait()
                outcomes.append(Outcome.RAN)
            except (RpcTimeoutError, RpcCancelledError) as error:
                outcomes.append(error.outcome)
        for block in blocks:
            block.wait()
        assert_clean()
        assert len(outcomes) == 120
        remote_functions.kept[:] = [outcomes.count(Outcome.RAN), outcomes.count(Outcome.UNKNOWN)]

    a.run(call, b.pid)
    ran, unknown = a.run(lambda: remote_functions.kept)
    runs = len(log.read_text()) if log.exists() else 0
    assert ran <= runs <= ran + unknown
