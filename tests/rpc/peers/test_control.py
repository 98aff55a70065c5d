"""Control messages arrive once each, whatever happens to them on the way, and travel with other messages."""

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gradwire import rpc
from gradwire.errors import SerializationError, WorkerLostError
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.execution import timers
from gradwire.rpc.peers import control
from gradwire.rref import forks
from gradwire.rref.forks import References

from tests.remote_functions import add, wait_until
from tests.rpc.execution.interruption import UNINTERRUPTED, Interruption
from tests.rpc.peers.bad_network import BadNetwork, Recorder

FOREVER_S = 3600.0


@pytest.mark.parametrize("seed", range(2))
def test_every_message_is_processed_once(agents, seed):
    bad = [BadNetwork(seed + 10 * rank, (MessageType.CONTROL,)) for rank in range(3)]
    a, b, c = agents(3, lambda rank: bad[rank].factories())
    got: list[tuple[str, int]] = []
    for agent in (a, b, c):
        agent.control.on("count", lambda sender, payload: got.append((sender.name, payload)))
    acknowledged = threading.Semaphore(0)
    errors = []

    def done(error):
        errors.append(error)
        acknowledged.release()

    expected = []
    for i in range(40):
        for sender, receiver in ((a, b), (b, a), (a, c), (c, c)):
            sender.control.send(receiver.info, "count", i, done)
            expected.append((sender.info.name, i))
        if i % 2:  # not all at once, or they would travel together
            for _ in range(8):
                assert acknowledged.acquire(timeout=60)
    assert not any(errors)
    assert sorted(got) == sorted(expected)
    assert sum(network.failed for network in bad) > 10
    assert all(agent.control.pending() == 0 for agent in (a, b, c))


@pytest.mark.parametrize("payload", [(), (0,), (1, 2**64 - 1), (1, True), (-1,), (2**64,), [1], None, ("a", 1)])
def test_payloads_arrive_as_they_are(agents, payload):
    a, b = agents(2)
    got: list[object] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    a.control.send(b.info, "note", payload)
    wait_until(lambda: got)
    assert [repr(each) for each in got] == [repr(payload)]


def test_messages_travel_together_and_in_order(agents):
    recorder = Recorder()
    a, b = agents(2, lambda _rank: recorder.factories())
    got: list[int] = []
    b.control.on("note", lambda sender, payload: got.append(payload))
    last = threading.Event()
    for i in range(100):
        a.control.send(b.info, "note", i, urgent=False)
    a.control.send(b.info, "note", 100, lambda _: last.set())
    assert last.wait(20)
    assert got == list(range(101))
    assert len(recorder.sent) < 20


def send_together(agent, receiver, payloads: list[Any], done) -> None:
    hold, held = threading.Event(), threading.Event()
    agent.control.run(lambda: held.set() or hold.wait(20))
    assert held.wait(20)
    for index, payload in enumerate(payloads):
        agent.control.send(receiver.info, "note", payload, partial(done, index))
    hold.set()


def test_a_message_that_cannot_be_read_does_not_take_others_with_it(agents):
    a, b = agents(2)
    got: list[object] = []
    b.control.on("note", lambda sender, payload: got.append(payload))
    told: dict[int, Exception | None] = {}
    send_together(a, b, ["before", Unreadable(), threading.Lock(), "after"], told.__setitem__)
    wait_until(lambda: len(told) == 4)
    assert [told[0], told[3]] == [None, None]
    assert isinstance(told[1], ZeroDivisionError)
    assert isinstance(told[2], TypeError)
    assert got == ["before", "after"]


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


def test_a_message_that_is_too_large_is_told_so(agents):
    a, b = agents(2)
    b.control.on("note", lambda _sender, _payload: None)
    told: dict[int, Exception | None] = {}
    send_together(a, b, [b"x" * (1 << 20), b"x" * (17 << 20), "after"], told.__setitem__)
    wait_until(lambda: len(told) == 3)
    assert [told[0], told[2]] == [None, None]
    assert isinstance(told[1], SerializationError)


def test_an_error_of_who_is_told_leaves_others_alone(agents):
    a, b = agents(2)
    b.control.on("note", lambda sender, payload: None)
    told: list[int] = []

    def note_and_fail(index: int, error: Exception | None) -> None:
        told.append(index)
        raise ZeroDivisionError

    send_together(a, b, ["first", "second", "third"], note_and_fail)
    wait_until(lambda: told == [0, 1, 2])
    assert a.control.pending() == 0


def test_errors_and_losses_are_told(agents):
    a, b = agents(2)

    def fail(sender, payload):
        raise LookupError("no such thing")

    b.control.on("fail", fail)
    told: list[Exception] = []
    a.control.send(b.info, "fail", None, told.append)
    wait_until(lambda: told)
    assert isinstance(told[0], LookupError)
    b.shutdown(graceful=False, timeout=0)
    a.control.send(b.info, "fail", None, told.append)
    wait_until(lambda: len(told) == 2)
    assert isinstance(told[1], WorkerLostError)


def test_a_message_on_its_way_to_a_worker_that_is_lost_is_told_so(agents):
    a, b = agents(2)
    begun, goes_on = threading.Event(), threading.Event()
    b.control.on("wait", lambda _sender, _payload: begun.set() or goes_on.wait(20))
    told: list[Exception] = []
    a.control.send(b.info, "wait", None, told.append)
    assert begun.wait(20)
    closing = threading.Thread(target=partial(b.shutdown, graceful=False, timeout=0))
    closing.start()
    wait_until(lambda: told)
    assert isinstance(told[0], WorkerLostError)
    goes_on.set()
    closing.join()


def test_a_call_is_confirmed_by_whom_it_was_sent_to(agents):
    a, b, c = agents(3)
    begun.clear()
    goes_on.clear()
    with holder.using(a):
        call = rpc.rpc_async(b.info, wait_here)
    assert begun.wait(20)
    told: list[Exception | None] = []
    for identifier in range(100):
        c.control.send(a.info, "call.confirmed", (identifier,), told.append)
    wait_until(lambda: len(told) == 100)
    assert [str(error) for error in told if error] == ["worker 'agent2' confirms a request to another worker"]
    goes_on.set()
    assert call.wait() == "waited"


begun, goes_on = threading.Event(), threading.Event()


def wait_here() -> str:
    begun.set()
    assert goes_on.wait(20)
    return "waited"


def test_a_sender_does_not_run_ahead_of_its_acknowledgements(agents, monkeypatch):
    monkeypatch.setattr(control, "WINDOW", 600)
    a, b = agents(2)
    got: list[int] = []
    b.control.on("note", lambda _sender, number: got.append(number))
    done = threading.Semaphore(0)
    for number in range(5000):
        a.control.send(b.info, "note", number, lambda _error: done.release(), urgent=bool(number % 3))
    for _ in range(5000):
        assert done.acquire(timeout=60)
    assert got == list(range(5000))
    assert a.control.pending() == 0


def test_errors_that_are_told_are_short(agents):
    a, b = agents(2)

    def fail(sender, payload):
        raise LookupError(payload)

    b.control.on("fail", fail)
    told: list[Exception] = []
    a.control.send(b.info, "fail", "x" * 1_000_000, told.append)
    wait_until(lambda: told)
    assert str(told[0]).startswith("LookupError: xxx")
    assert len(str(told[0])) < 2000


# With other messages.


class Pair:
    """Two connected agents, of which the control threads send nothing that is not urgent by themselves."""

    def __init__(self, agents, monkeypatch, transport: str) -> None:
        self.recorders = Recorder(), Recorder()
        options = {"transports": (transport, "grpc")}
        self.a, self.b = agents(2, lambda rank: self.recorders[rank].factories(), **options)
        call(self.a, self.b)
        wait_until(lambda: self.a.debug_info()["transports"]["agent1"] == transport)
        monkeypatch.setattr(timers, "LINGER_S", FOREVER_S)
        monkeypatch.setattr(control, "ATTACH_AFTER_S", 0.0)

    def sent(self) -> list[list[str]]:
        """Returns the types of the envelopes that each has sent since this was called."""
        types = [[MessageType.Name(each.type) for each in recorder.sent] for recorder in self.recorders]
        for recorder in self.recorders:
            recorder.sent.clear()
        return types


@pytest.fixture(params=["unix", "tcp"])
def pair(request, agents, monkeypatch) -> Pair:
    return Pair(agents, monkeypatch, request.param)


def call(a: GrpcAgent, b: GrpcAgent) -> None:
    with holder.using(a):
        assert rpc.rpc_sync(b.info, add, (1, 2)) == 3


def processes_what_came(agent: GrpcAgent) -> bool:
    """Wakes the control thread, which processes what came with an answer; returns True.

    Called again and again, because what came with an answer is taken after the future is complete.
    """
    agent.control.run(lambda: None)
    return True


def wait_for_creation(agent: GrpcAgent, rref: rpc.RRef) -> None:
    """Waits until an agent knows that a creation has ended, of which it may learn by an answer."""
    creation = rref._get_future()
    wait_until(lambda: processes_what_came(agent) and creation.done())


def test_a_call_takes_messages_along_and_its_answer_acknowledges_them(pair):
    a, b = pair.a, pair.b
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    told: list[Exception | None] = []
    pair.sent()
    for i in range(10):
        a.control.send(b.info, "note", i, told.append, urgent=False)
    call(a, b)  # whose answer acknowledges them, because they are processed before it runs
    assert got == list(range(10))
    wait_until(lambda: processes_what_came(a) and told == [None] * 10)
    assert a.control.pending() == 0
    assert pair.sent() == [["CALL"], ["RESULT"]]


def test_messages_that_nobody_waits_for_are_acknowledged_without_the_control_thread(pair):
    a, b = pair.a, pair.b
    b.control.on("note", lambda _sender, _payload: None)
    a.control.send(b.info, "note", 1, urgent=False)
    assert a.control.pending() == 1
    call(a, b)
    wait_until(lambda: not a.control.pending())


def test_the_error_of_a_message_that_was_taken_along_is_told(pair):
    a, b = pair.a, pair.b

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


def test_what_no_message_takes_along_is_sent_alone(pair, monkeypatch):
    a, b = pair.a, pair.b
    monkeypatch.setattr(timers, "LINGER_S", 0.01)
    got: list[int] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    settled = threading.Event()
    pair.sent()
    a.control.send(b.info, "note", 1, lambda _error: settled.set(), urgent=False)
    assert settled.wait(20)
    assert got == [1]
    assert pair.sent() == [["CONTROL"], ["CONTROL"]]


def test_a_large_message_has_an_envelope_of_its_own(pair):
    a, b = pair.a, pair.b
    b.control.on("note", lambda _sender, _payload: None)
    told: dict[str, Exception | None] = {}
    pair.sent()
    for name, each in (("before", 1), ("large", b"x" * 100_000), ("after", 2)):
        a.control.send(b.info, "note", each, partial(told.__setitem__, name), urgent=False)
    call(a, b)
    wait_until(lambda: processes_what_came(a) and processes_what_came(b) and len(told) == 3)
    assert told == {"before": None, "large": None, "after": None}
    wait_until(lambda: not a.control.pending())
    assert "CONTROL" in pair.sent()[0]


@pytest.mark.parametrize("answers", [False, True], ids=["call", "answer"])
def test_a_control_message_that_exits_takes_nothing_with_it(pair, answers):
    a, b = pair.a, pair.b

    def leave(_sender, _payload) -> None:
        raise SystemExit

    sender, receiver = (b, a) if answers else (a, b)
    receiver.control.on("note", leave)
    told: list[Exception | None] = []
    sender.control.send(receiver.info, "note", 1, told.append, urgent=False)
    call(a, b)
    wait_until(lambda: processes_what_came(a) and processes_what_came(b) and told)
    assert "SystemExit" in str(told)


def test_what_is_urgent_waits_for_no_other_message(pair):
    a, b = pair.a, pair.b
    got: list[str] = []
    b.control.on("note", lambda _sender, payload: got.append(payload))
    a.control.send(b.info, "note", "waits", urgent=False)
    a.control.send(b.info, "note", "urgent")
    wait_until(lambda: got == ["waits", "urgent"])  # without any other message


def test_an_answer_takes_messages_along(pair):
    a, b = pair.a, pair.b
    got: list[int] = []
    a.control.on("note", lambda _sender, payload: got.append(payload))
    b.control.send(a.info, "note", 1, urgent=False)
    call(a, b)
    wait_until(lambda: processes_what_came(a) and got == [1])


def test_the_confirmation_of_a_reference_comes_with_its_value(pair):
    a, b = pair.a, pair.b
    pair.sent()
    with holder.using(a):
        rref = rpc.remote(b.info, add, (1, 2))
        wait_until(lambda: b.control.pending())
        assert not rref.confirmed_by_owner()
        assert rref.to_here() == 3
        assert rref.confirmed_by_owner()
    assert pair.sent() == [["RREF_CREATE", "RREF_FETCH"], ["RESULT"]]


def test_who_waits_for_a_creation_does_not_wait_for_other_messages(pair, monkeypatch):
    a, b = pair.a, pair.b
    monkeypatch.setattr(forks, "MIN_WAITING_TIMEOUT_S", 30.0)
    with holder.using(a):
        early, late = rpc.remote(b.info, add, (1, 2)), rpc.remote(b.info, add, (1, 2))
        for rref in (early, late):
            wait_for_creation(a, rref)
        short = rpc.remote(b.info, add, (1, 2), timeout=20)
        wait_until(short.confirmed_by_owner)


def test_a_reference_is_deleted_with_the_next_message(pair):
    a, b = pair.a, pair.b
    table = b.extension(References).table
    with holder.using(a):
        rref = rpc.remote(b.info, add, (1, 2))
        assert rref.to_here() == 3
        wait_until(lambda rref=rref: processes_what_came(a) and rref.confirmed_by_owner())
        assert len(table) == 1
        del rref
        gc.collect()
        wait_until(lambda: a.control.pending() or not len(table))  # another thread may have dropped it last
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
    """Calls a worker, with a control message that the call takes along."""
    agent = current_agent()
    agent.control.send(agent.worker(worker), "note", 1, urgent=False)
    assert rpc.rpc_sync(worker, add, (1, 2), timeout=5) == 3


@pytest.mark.parametrize("answers", [False, True], ids=["call", "answer"])
def test_the_finalizer_of_a_value_may_call_the_worker_whose_message_deletes_it(pair, answers):
    a, b = pair.a, pair.b
    b.control.on("note", lambda _sender, _payload: None)
    table = b.extension(References).table
    finalized.clear()
    with holder.using(a):
        rref = rpc.remote(b.info, CallsAtItsEnd, (a.info.name,))
        wait_for_creation(a, rref)
        wait_until(
            lambda rref=rref: processes_what_came(b) and processes_what_came(a) and rref.confirmed_by_owner()
        )
        del rref
        gc.collect()
    wait_until(lambda: a.control.pending() or not len(table))  # another thread may have dropped it last
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


def interrupted_at_each_moment(run: Callable[[], None], check: Callable[[], None]) -> int:
    """Interrupts a function later and later; returns the number of moments."""
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        try:
            with Interruption(moment):
                run()
            uninterrupted += 1
        except KeyboardInterrupt:
            uninterrupted = 0
        moment += 1
        check()
    return moment


def test_the_sending_of_messages_may_be_interrupted_at_any_moment(agents, monkeypatch):
    monkeypatch.setattr(timers, "LINGER_S", 0.002)
    monkeypatch.setattr(control, "ATTACH_AFTER_S", 0.0)
    a, b = agents(2)
    processed: list[Any] = []
    settled: list[int] = []
    b.control.on("note", lambda _sender, payload: processed.append(payload))
    sent = 0

    def send() -> None:
        nonlocal sent
        for payload in ("first", "x" * 5000, "last"):
            number, sent = sent, sent + 1
            a.control.send(
                b.info, "note", payload, lambda _error, number=number: settled.append(number), urgent=False
            )

    def check() -> None:
        a.control.send(b.info, "note", "then")
        wait_until(lambda: not a.control.pending() and len(settled) == len(set(settled)))

    assert interrupted_at_each_moment(send, check) > 20
    wait_until(lambda: len(settled) == len([each for each in processed if each != "then"]))
    assert len(settled) >= sent - 1
