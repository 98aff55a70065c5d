"""Control messages, and answers that nobody waits for, travel with other messages to the same worker."""

import gc
import pickle
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gradwire import rpc
from gradwire.errors import SerializationError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.messages import MessageType, Outgoing, Request
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.execution import scheduler
from gradwire.rpc.peers import attached_control, control, control_queue
from gradwire.rpc.peers.control_queue import ControlMessage, ControlQueue
from gradwire.rpc.requests.codec import Codec
from gradwire.rref import forks
from gradwire.rref.forks import References

from tests.bad_network import hurry
from tests.remote_functions import add, wait_until

FOREVER_S = 3600.0


@pytest.fixture(params=[("unix",), ("tcp",)], ids=["unix", "tcp"])
def pair(request, agents, monkeypatch) -> tuple[GrpcAgent, GrpcAgent]:
    """Two connected agents, of which the control threads send nothing that is not urgent by themselves."""
    a, b = agents(2, transports=(*request.param, "grpc"))
    call(a, b)
    wait_until(lambda: a.debug_info()["transports"]["agent1"] == request.param[0])
    monkeypatch.setattr(scheduler, "LINGER_S", FOREVER_S)
    monkeypatch.setattr(control, "ATTACH_AFTER_S", 0.0)
    return a, b


def call(a: GrpcAgent, b: GrpcAgent) -> None:
    with holder.using(a):
        assert rpc.rpc_sync(b.info, add, (1, 2)) == 3


def processes_what_came(agent: GrpcAgent) -> bool:
    """Wakes the control thread, which processes what came with an answer; returns True.

    Called again and again, because what came with an answer is taken after the future is complete.
    """
    agent.control.run(lambda: None)
    return True


def count_writes(agent: GrpcAgent, monkeypatch) -> Callable[[], int]:
    """Returns a function that returns the number of writes of an agent to the other one since."""
    streams: list[Any] = [each for each in agent._network._transports.values() if each.name != "loopback"]
    (stream,) = streams
    writes: list[int] = []
    monkeypatch.setattr(stream.outbox.socket._writer, "_connection", Counted(stream.outbox.socket, writes))
    return lambda: len(writes)


class Counted:
    """A connection that notes each write."""

    def __init__(self, carrier: Any, writes: list[int]) -> None:
        self._connection, self._writes = carrier._connection, writes

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "sendmsg"):
            self._writes.append(1)
        return getattr(self._connection, name)


def count_control_messages(agent: GrpcAgent, monkeypatch) -> Callable[[], int]:
    """Returns a function that returns how many CONTROL messages an agent has sent since."""
    codec, sent = agent._codec, []
    put = Codec._put

    def count(self: Codec, message: Outgoing, broadcast: Any):
        if self is codec and message.envelope.type == MessageType.CONTROL:
            sent.append(message)
        return put(self, message, broadcast)

    monkeypatch.setattr(Codec, "_put", count)
    return lambda: len(sent)


def test_control_messages_are_attached_to_a_call_and_acknowledged_by_an_answer(pair, monkeypatch):
    a, b = pair
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    told: list[Exception | None] = []
    from_a, from_b = count_control_messages(a, monkeypatch), count_control_messages(b, monkeypatch)
    writes = count_writes(a, monkeypatch)
    for i in range(10):
        a.control.send(b.info, "note", i, told.append, urgent=False)
    assert not writes()
    call(a, b)  # whose answer acknowledges them, because they are processed before it runs
    assert writes() == 1
    assert got == list(range(10))
    wait_until(lambda: processes_what_came(a) and told == [None] * 10)
    assert a.control.pending() == 0
    assert not from_a()
    assert not from_b()


def test_messages_that_nobody_waits_for_are_settled_without_the_control_thread(pair):
    a, b = pair
    b.control.on("note", lambda _sender, _payload: None)
    a.control.send(b.info, "note", 1, urgent=False)
    assert a.control.pending() == 1
    call(a, b)
    wait_until(lambda: not a.control.pending())


def test_the_error_of_an_attached_message_is_told(pair):
    a, b = pair

    def refuse(_sender, payload: int) -> None:
        raise LookupError(f"no {payload}")

    b.control.on("note", refuse)
    told: list[Exception | None] = []
    a.control.send(b.info, "note", 1, told.append, urgent=False)
    call(a, b)
    wait_until(lambda: processes_what_came(a) and told)
    (error,) = told
    assert isinstance(error, LookupError)
    assert str(error) == "no 1"
    assert a.control.pending() == 0


def test_what_nobody_sends_anything_with_is_sent_alone(pair, monkeypatch):
    a, b = pair
    monkeypatch.setattr(scheduler, "LINGER_S", 0.01)
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    from_a, from_b = count_control_messages(a, monkeypatch), count_control_messages(b, monkeypatch)
    settled = threading.Event()
    a.control.send(b.info, "note", 1, lambda _error: settled.set(), urgent=False)
    assert settled.wait(20)
    assert got == [1]
    assert (from_a(), from_b()) == (1, 1)


@pytest.mark.parametrize("payload", [b"x" * 100_000, threading.Lock()], ids=["large", "unsendable"])
def test_what_cannot_be_attached_is_sent_as_a_request(pair, payload):
    a, b = pair
    b.control.on("note", lambda _sender, _payload: None)
    told: dict[str, Exception | None] = {}
    for name, each in (("before", 1), ("odd", payload), ("after", 2)):
        a.control.send(b.info, "note", each, partial(told.__setitem__, name), urgent=False)
    call(a, b)
    wait_until(lambda: processes_what_came(a) and len(told) == 3)
    error = told.pop("odd")
    assert told == {"before": None, "after": None}
    assert isinstance(error, SerializationError) if not isinstance(payload, bytes) else error is None
    wait_until(lambda: not a.control.pending())


def test_attached_messages_that_are_lost_are_sent_again(pair, monkeypatch):
    a, b = pair
    hurry(monkeypatch)
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    settled = threading.Event()
    with monkeypatch.context() as patched, holder.using(a):
        patched.setattr(a._network, "send", lambda *_: 0)  # loses them
        a.control.send(b.info, "note", 1, lambda _error: settled.set(), urgent=False)
        lost = rpc.rpc_async(b.info, add, (1, 2), timeout=60)
    wait_until(lambda: processes_what_came(a) and settled.is_set())
    assert got == [1]
    lost.cancel()


def test_attached_messages_that_are_sent_again_travel_in_batches(pair, monkeypatch):
    a, b = pair
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    monkeypatch.setattr(control, "MAX_BATCH", 50)
    with monkeypatch.context() as patched:
        patched.setattr(a._network, "send", lambda *_: 0)  # loses them
        for i in range(130):
            a.control.send(b.info, "note", i, urgent=False)
        for _ in range(3):
            a.post(b.info, MessageType.CONTROL, None)
    request, sizes = a.request, []

    def note_size(worker: WorkerInfo, sent: Request) -> Any:
        sizes.append(len(sent.value))
        return request(worker, sent)

    monkeypatch.setattr(a, "request", note_size)
    a.control.on_worker_back(b.info)
    wait_until(lambda: processes_what_came(a) and not a.control.pending())
    assert sorted(got) == list(range(130))
    assert sizes == [50, 50, 30]


def test_one_timer_looks_after_attached_messages(pair, monkeypatch):
    a, b = pair
    b.control.on("note", lambda _sender, _payload: None)
    monkeypatch.setattr(a._network, "send", lambda *_: 0)  # loses them
    call_later, timers, find = a._control._scheduler.call_later, [], attached_control._attached

    def note_timer(seconds: float, task: Callable[[], None]) -> None:
        if seconds == control.ATTEMPT_TIMEOUT_S:
            timers.append(task)
        call_later(seconds, task)

    def attach() -> None:
        a.control.send(b.info, "note", 1, urgent=False)
        a.post(b.info, MessageType.CONTROL, None)

    def attach_meanwhile(queue: ControlQueue) -> list[ControlMessage]:
        monkeypatch.setattr(attached_control, "_attached", find)
        attach()  # as another thread may
        return find(queue)

    monkeypatch.setattr(a._control._scheduler, "call_later", note_timer)
    monkeypatch.setattr(attached_control, "_attached", attach_meanwhile)
    attach()
    done = threading.Event()
    for _ in range(2):
        a.control.run(lambda: a.control.run(done.set))
        assert done.wait(20)
        done.clear()
    assert len(timers) == 1


def test_an_acknowledgement_that_is_lost_is_repeated(pair, monkeypatch):
    a, b = pair
    hurry(monkeypatch)
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    attached = b._control._queue(a.info)
    settled = threading.Event()
    a.control.send(b.info, "note", 1, lambda _error: settled.set(), urgent=False)
    monkeypatch.setattr(attached, "processed", LossyDeque())
    call(a, b)
    assert got == [1]
    wait_until(lambda: processes_what_came(a) and settled.is_set())
    assert got == [1]  # processed once


def post_header(agent: GrpcAgent, worker: WorkerInfo, header: agent_pb2.ControlHeader) -> None:
    agent.post(worker, MessageType.CONTROL, None, header=lambda envelope: envelope.control.CopyFrom(header))


def test_what_there_is_to_tell_a_worker_is_bounded(pair, monkeypatch):
    a, b = pair
    refused: list[int] = []

    def refuse(_sender, payload: int) -> None:
        refused.append(payload)
        raise LookupError

    b.control.on("bad", refuse)
    b.control.on("note", lambda _sender, _payload: None)
    monkeypatch.setattr(control_queue, "WINDOW", 50)
    monkeypatch.setattr(control_queue, "MAX_FAILED", 20)
    payload = pickle.dumps(1)
    header = agent_pb2.ControlHeader()
    for number in range(80):
        header.messages.add(number=number, kind="bad" if number % 2 else "note", payload=payload)
    for _ in range(5):
        post_header(a, b.info, header)
    queue = b._control._queue(a.info)
    wait_until(lambda: len(queue.processed) == 50)
    assert len(queue.failed) == 20
    assert len(refused) == 40


def test_a_failure_that_is_told_many_times_is_logged_once(pair, caplog):
    a, b = pair
    told: list[Exception | None] = []
    with Muted(a):
        a.control.send(b.info, "note", 1, told.append, urgent=False)
        a.post(b.info, MessageType.CONTROL, None)
    header = agent_pb2.ControlHeader()
    for _ in range(100):
        header.failed.add(number=0, failure=b.encode_failure(LookupError("no")))
    for _ in range(3):
        post_header(b, a.info, header)
    wait_until(lambda: processes_what_came(a) and told)
    call(b, a)
    a.control.run(lambda: None)
    assert [str(error) for error in told] == ["no"]
    assert len([record for record in caplog.records if "control message note to" in record.message]) == 1


class Muted:
    """Context manager in which what an agent sends is lost."""

    def __init__(self, agent: GrpcAgent) -> None:
        self._network = agent._network

    def __enter__(self) -> None:
        self._network.send = lambda *_: 0  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._network.send


@pytest.mark.parametrize("answers", [False, True], ids=["call", "answer"])
def test_a_control_message_that_exits_takes_nothing_with_it(pair, answers):
    a, b = pair

    def leave(_sender, _payload) -> None:
        raise SystemExit

    sender, receiver = (b, a) if answers else (a, b)
    receiver.control.on("note", leave)
    told: list[Exception | None] = []
    sender.control.send(receiver.info, "note", 1, told.append, urgent=False)
    call(a, b)

    wait_until(lambda: processes_what_came(a) and processes_what_came(b) and told)
    assert "SystemExit" in str(told)


class LossyDeque(deque):
    """Takes nothing in."""

    def append(self, _item: object) -> None:
        pass


def test_what_is_urgent_waits_for_no_other_message(pair):
    a, b = pair
    got: list[str] = []
    told = threading.Event()
    b.control.on("note", lambda _sender, payload: got.append(payload))
    a.control.send(b.info, "note", "waits", urgent=False)
    a.control.send(b.info, "note", "urgent", lambda _error: told.set())
    assert told.wait(20)  # without any other message
    assert got == ["waits", "urgent"]


def test_control_messages_are_attached_to_an_answer(pair):
    a, b = pair
    got: list[int] = []
    a.control.on("note", lambda _sender, payload: got.append(payload))
    b.control.send(a.info, "note", 1, urgent=False)
    call(a, b)
    wait_until(lambda: processes_what_came(a) and got == [1])


def test_a_message_to_which_nothing_can_be_attached_is_sent(pair, monkeypatch):
    a, b = pair

    def fail(*_args, **_options):
        raise LookupError("no reason")

    a.control.send(b.info, "note", 1, urgent=False)
    with monkeypatch.context() as patched:
        patched.setattr(a._control._attached, "attach", fail)
        call(a, b)
    assert a.control.pending() == 1
    b.control.on("note", lambda _sender, _payload: None)
    call(a, b)
    wait_until(lambda: not a.control.pending())


def test_the_confirmation_of_a_reference_comes_with_its_value(pair, monkeypatch):
    a, b = pair
    writes = count_writes(b, monkeypatch)
    with holder.using(a):
        rref = rpc.remote(b.info, add, (1, 2))
        wait_until(lambda: b._codec._to_flush)
        assert not writes()
        assert not rref.confirmed_by_owner()
        assert rref.to_here() == 3
        wait_until(rref.confirmed_by_owner)
        assert writes() == 1


def test_who_waits_for_a_creation_does_not_wait_for_other_messages(pair, monkeypatch):
    a, b = pair
    monkeypatch.setattr(forks, "MIN_WAITING_TIMEOUT_S", 30.0)
    with holder.using(a):
        early, late = rpc.remote(b.info, add, (1, 2)), rpc.remote(b.info, add, (1, 2))
        early._get_future().wait()
        wait_until(lambda: b._codec._to_flush or late._handle.creation.done())
        late._get_future().wait()
        short = rpc.remote(b.info, add, (1, 2), timeout=20)
        short._handle.creation.wait()


def test_a_reference_is_deleted_with_the_next_message(pair):
    a, b = pair
    table = b.extension(References).table
    with holder.using(a):
        rref = rpc.remote(b.info, add, (1, 2))
        assert rref.to_here() == 3
        wait_until(rref.confirmed_by_owner)
        assert len(table) == 1
        del rref
        gc.collect()
        call(a, b)
        wait_until(lambda: len(table) == 0)


class CallsAtItsEnd:
    """Has a finalizer that calls the worker which has held the last reference."""

    def __init__(self, caller: str) -> None:
        self.caller = caller

    def __del__(self) -> None:
        rpc.rpc_sync(self.caller, call_back, (rpc.get_worker_info().name,), timeout=10)
        finalized.set()


finalized = threading.Event()


def call_back(worker: str) -> None:
    """Calls a worker, with a control message attached to the call."""
    agent = current_agent()
    agent.control.send(agent.worker(worker), "note", 1, urgent=False)
    assert rpc.rpc_sync(worker, add, (1, 2), timeout=5) == 3


@pytest.mark.parametrize("answers", [False, True], ids=["call", "answer"])
def test_the_finalizer_of_a_value_may_call_the_worker_whose_message_deletes_it(pair, answers):
    a, b = pair
    b.control.on("note", lambda _sender, _payload: None)
    table = b.extension(References).table
    finalized.clear()
    with holder.using(a):
        rref = rpc.remote(b.info, CallsAtItsEnd, (a.info.name,))
        rref._get_future().wait()
        wait_until(lambda rref=rref: processes_what_came(b) and rref.confirmed_by_owner())
        del rref
        gc.collect()
    if answers:
        call(b, a)
    else:
        call(a, b)
    wait_until(lambda: processes_what_came(b) and len(table) == 0)
    told = threading.Event()
    b.control.run(told.set)
    assert told.wait(1)  # the control thread does not wait for the finalizer
    assert finalized.wait(20)


def test_nothing_that_waits_is_lost_when_a_worker_leaves(workers):
    a, _ = workers.rpc(2)

    def create() -> list:
        return [rpc.remote("worker1", add, (1, i)) for i in range(40)]

    def use() -> None:
        made = create()
        del made[::2]
        assert [rref.to_here() for rref in made] == list(range(2, 41, 2))

    a.run(use)
    workers.each(workers.all, rpc.shutdown)
