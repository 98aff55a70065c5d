"""Finalizers run at any line of any thread, which may hold any lock: they take none, and may make calls."""

import contextlib
import gc
import threading
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from gradwire import rpc
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.transports.envelope_socket import EnvelopeSocket

from tests import remote_functions
from tests.remote_functions import identity, keep, wait_until
from tests.rpc.calls.generators import count_to

Lock = type(threading.Lock())
ENDS_OF_WALK = (type, types.ModuleType, types.FrameType, threading.Thread, threading.local)
LARGE = 1 << 20


def locks_of(*roots: object) -> list[threading.Lock]:
    """Returns the locks that can be reached from some objects, through whatever refers to them."""
    seen: dict[int, object] = {}
    found: list[threading.Lock] = []
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, ENDS_OF_WALK):
            continue
        seen[id(each)] = each
        if isinstance(each, EnvelopeSocket):
            seen[id(each.reading)] = each.reading  # whoever holds it is to have the socket watched again
        if isinstance(each, Lock):
            found.append(each)
        elif isinstance(each, types.FunctionType):  # not its module
            left += [each.__closure__, each.__defaults__]
        else:
            left += gc.get_referents(each)
    return found


@contextlib.contextmanager
def all_locks_held(*agents: GrpcAgent) -> Iterator[None]:
    """Context manager in which the calling thread holds the locks of agents, as code that is interrupted may."""
    locks = locks_of(*agents)
    held = [lock for lock in locks if lock.acquire(blocking=False)]
    try:
        assert {id(agent._executor._lock) for agent in agents} <= set(map(id, locks))
        yield
    finally:
        for lock in held:
            lock.release()


def user_reference(_a: GrpcAgent, b: GrpcAgent) -> object:
    reference = rpc.remote(b.info, identity, (1,))
    assert reference.to_here() == 1
    return reference


def own_reference(_a: GrpcAgent, _b: GrpcAgent) -> object:
    return rpc.RRef([1])


def stream(_a: GrpcAgent, b: GrpcAgent) -> object:
    items = rpc.rpc_stream(b.info, count_to, (1000,), window_items=2)
    assert next(items) == 0
    return items


def large_tensor(_a: GrpcAgent, b: GrpcAgent) -> object:
    return rpc.rpc_sync(b.info, identity, (torch.ones(LARGE),))


def unanswered_call(_a: GrpcAgent, b: GrpcAgent) -> object:
    return rpc.rpc_async(b.info, identity, (torch.ones(LARGE),))


MAKE = [user_reference, own_reference, stream, large_tensor, unanswered_call]


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc"), ("grpc",)], ids="-".join)
@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
def test_finalizers_take_no_lock(agents, make: Callable[[GrpcAgent, GrpcAgent], object], transports):
    a, b = agents(2, transports=transports)
    with holder.using(a):
        made = make(a, b)
        with all_locks_held(a, b):
            del made
        assert rpc.rpc_sync(b.info, identity, ("still",)) == "still"
    counts = ("num_user_rrefs", "num_consumed_streams")
    wait_until(lambda: [a.debug_info()[each] for each in counts] == [0, 0])


class CallsAtTheEnd:
    """An object in a cycle, which the next garbage collection finds, with a finalizer that makes a call."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.cycle = self

    def __del__(self) -> None:
        self.call()


def collect_with_call(call: Callable[[], object]) -> None:
    """Runs a garbage collection in which a finalizer makes a call."""
    called = False

    def call_once() -> None:
        nonlocal called
        try:
            call()
        finally:  # it may be another thread's collection that finds it
            called = True

    CallsAtTheEnd(call_once)
    while not called:  # one of another thread may be under way, and then this one does nothing
        gc.collect()


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("grpc",)], ids="-".join)
def test_a_call_in_a_garbage_collection_takes_no_lock(agents, transports):
    a, b = agents(2, transports=transports)
    made: list[rpc.Future[int]] = []
    references: list[rpc.RRef[int]] = []

    def call() -> None:
        with holder.using(a):
            made.extend(rpc.rpc_async(worker.info, len, ("abc",)) for worker in (a, b))
            made.append(rpc.rpc_async(b.info, divmod, (1, 0)))
            references.append(rpc.remote(b.info, len, ("abcd",)))

    with all_locks_held(a, b):
        collect_with_call(call)
    assert [each.wait() for each in made[:2]] == [3, 3]
    assert references.pop().to_here() == 4
    with pytest.raises(ZeroDivisionError):
        made[2].wait()


def test_a_finalizer_waits_for_a_call(two_workers):
    """It has interrupted code of the program, which holds no lock of the agent."""
    a, _ = two_workers

    def call_and_collect() -> list[int]:
        answers: list[int] = []
        collect_with_call(lambda: answers.append(rpc.rpc_sync("worker1", len, ("abc",))))
        return answers

    assert a.run(call_and_collect) == [3]
    assert a.log.read_text() == ""


def test_a_finalizer_does_not_wait_where_its_thread_may_hold_a_lock(two_workers):
    """Collections run at any line, also of gradwire: the calls are sent, and nothing is printed."""
    a, b = two_workers
    calls = 100

    def call_and_collect() -> set[int | None]:
        answers: set[int | None] = set()
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for _ in range(calls):
                CallsAtTheEnd(lambda: answers.add(rpc.rpc_sync("worker1", keep, (1,), timeout=0)))
                rpc.rpc_sync("worker1", identity, ([1],))
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        return answers

    answers = a.run(call_and_collect)
    b.run(wait_until, lambda: len(remote_functions.kept) == calls)
    assert None in answers
    assert a.log.read_text() == ""


def test_a_call_in_a_collection_while_a_thread_is_started(agents, monkeypatch):
    """The event loop starts a thread for what has arrived, and a finalizer runs on it meanwhile."""
    a, b = agents(2, transports=("grpc",))
    start = threading.Thread.start
    made: list[rpc.Future[int]] = []
    threads: set[str] = set()
    over = threading.Event()

    def call() -> None:
        if not over.is_set():  # the garbage of a nested collection, which does nothing, may be found at any time
            with holder.using(b):
                made.append(rpc.rpc_async(a.info, len, ("abc",)))

    def start_and_collect(thread: threading.Thread) -> None:
        threads.add(threading.current_thread().name)
        CallsAtTheEnd(call)
        gc.collect()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_and_collect)
    with holder.using(a):
        assert rpc.rpc_sync(b.info, len, ("abc",)) == 3
    assert "gradwire-loop" in threads
    over.set()
    assert {each.wait() for each in made} == {3}


def test_a_collection_while_a_dictionary_is_walked(agents, monkeypatch):
    """Each tuple that is made may begin one, and a finalizer lets other threads run, which change it."""
    (a,) = agents(1)
    poller = a._executor.poller
    monkeypatch.setattr(poller, "kept", dict.fromkeys(range(10_000, 10_100), float("inf")))
    left = 500

    def change() -> None:
        nonlocal left
        left -= 1
        poller.kept[20_000 + left] = float("inf")
        if left:
            CallsAtTheEnd(change)

    threshold = gc.get_threshold()
    try:
        CallsAtTheEnd(change)
        gc.set_threshold(1)
        poller.take_over(1.0)
    finally:
        gc.set_threshold(*threshold)
    assert left < 500
    left = 1  # the next finalizer makes no other one, during another test
