"""A call ends once, whatever happens to it and in whatever order, and leaves nothing behind."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from gradwire.errors import (
    AnswerFailedError,
    LossCause,
    Outcome,
    RpcCancelledError,
    RpcTimeoutError,
    SendFailedError,
    SendQueueFullError,
    WorkerLostError,
    WorkerSuspectError,
)
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.base import PayloadLostError
from gradwire.rpc.channels.payloads import read_inline
from gradwire.rpc.contracts.extension import Extension
from gradwire.rpc.contracts.messages import CALL, ERROR, RESULT, Handler, Incoming, MessageType, Outgoing, Request
from gradwire.rpc.contracts.options import FlowControlOptions
from gradwire.rpc.contracts.worker import PROCESS_ENDED, WorkerEnd, WorkerInfo, WorkerWatcher
from gradwire.rpc.execution.futures import Future, error_of
from gradwire.rpc.peers.peer import Peer
from gradwire.rpc.requests.call import CallCounter
from gradwire.rpc.requests.caller import Caller
from gradwire.rpc.requests.codec import Extensions
from gradwire.rpc.wire.pickling import Packed, Packer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.simulated_peers import SilentTransport, bring_back, call_parts, lose, silent_peer, suspect

ME = WorkerInfo("me", 0)
PEER = WorkerInfo("peer", 1)
BROKEN = WorkerEnd(LossCause.DISCONNECTED, "its connection broke")
MAX_IN_FLIGHT = 5

ENDS = (
    RpcCancelledError,
    RpcTimeoutError,
    SendFailedError,
    SendQueueFullError,
    WorkerLostError,
    WorkerSuspectError,
    ValueError,
)
"""What calls fail with here."""


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose time stands still, until it is told to go on."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def run_ready(self) -> None:
        for _ in range(3):
            self.call_soon(self.stop)
            self.run_forever()


class Threads:
    """An executor: what is submitted waits until the test has it run."""

    is_inherited = False

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []

    def submit(self, task: Callable[..., object], *args: Any) -> None:
        self.tasks.append(lambda: task(*args))

    submit_urgent = submit

    def call_last(self, function: Callable[[], None]) -> None:
        function()

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class Clock:
    """Deadlines that expire when the test says so."""

    def __init__(self, expire: Callable[[int], None], is_live: Callable[[int], bool], *_: object) -> None:
        self.expire, self.is_live = expire, is_live
        self.added: list[int] = []

    def add(self, identifier: int, _seconds: float) -> None:
        self.added.append(identifier)

    def close(self) -> None:
        self.added.clear()


class World(SilentTransport):
    """A network with one other worker, its transport, and the codec in front of it."""

    maps_devices = False

    def __init__(self, loop: VirtualTime) -> None:
        self.me = ME
        self.peer: Peer
        """The other worker."""
        self.sent: list[int] = []
        """The ids of the requests that have reached the other worker, or will."""
        self.fails_next = False
        self.loop = loop

    # A network.

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon(function, *args)

    # A transport. By `send` it asks the other worker not to begin a request; it has begun.

    def withdraw(self, beginning: bytes) -> bool:
        identifier = agent_pb2.Envelope.FromString(beginning).id
        if identifier % 3 or identifier not in self.sent:
            return False
        self.sent.remove(identifier)
        return True

    # A codec, and its values.

    @property
    def values(self) -> "World":
        return self

    def device_map(self, _worker: WorkerInfo) -> Mapping[Any, Any]:
        return {}

    def pack_request(self, *_: object) -> Packed:
        return Packed((b"", [], [], frozenset()))

    def try_to_send(self, peer: Peer, message: Outgoing, _broadcast: object) -> bool:
        if self.fails_next:
            self.fails_next = False
            raise SendFailedError(PEER.name, "the test fails it")
        if peer.absence is not None:
            if not peer.absence.waits:
                raise peer.absence.as_error(PEER.name)
            return False
        self._send(message)
        return True

    def send_prepared(self, peer: Peer, message: Outgoing) -> None:
        peer.check_present()
        self._send(message)

    def _send(self, message: Outgoing) -> None:
        self.sent.append(message.envelope.id)

    def read(self, source: Peer, envelope: agent_pb2.Envelope, *_: object, **__: object) -> Incoming:
        return Incoming(source.info, envelope, b"", [])

    def unpack(self, message: Incoming) -> int:
        return message.envelope.id

    def record_refusal(self, *_: object) -> None:
        pass

    def resend_control(self, *_: object) -> None:
        """Does nothing: there are no control messages."""

    def decode_failure(self, *_: object) -> Exception:
        return ValueError("the function has failed")


class Ends(Extension):
    """Counts what it is told of requests."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type] # it uses no agent
        self.begun: list[int] = []
        self.ended: list[int] = []

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        return {CALL: Handler(lambda _: None, user_values=True, cancellable=True)}

    def on_request(self, identifier: int, *_: object) -> None:
        self.begun.append(identifier)

    def on_complete(self, identifier: int) -> None:
        self.ended.append(identifier)


class Calls(RuleBasedStateMachine):
    """All that can happen to calls."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTime()
        self.world: Any = World(self.loop)
        self.threads: Any = Threads()
        self.ends = Ends()
        extensions = Extensions(Packer())
        extensions.add(self.ends)
        options = FlowControlOptions(max_in_flight=MAX_IN_FLIGHT, when_full="raise")
        clocks: list[Clock] = []

        def make_clock(*args: Any) -> Any:
            clocks.append(Clock(*args))
            return clocks[0]

        watchers: list[WorkerWatcher] = []
        self.peer = self.world.peer = silent_peer(PEER, watchers, self.threads, self.world)
        parts = call_parts(self.peer, extensions, self.threads, CallCounter(), options, self.world.call_soon)
        self.counter = parts.counter
        self.caller = Caller(parts, self.world, make_clock)
        watchers.append(self.caller)
        (self.clock,) = clocks
        self.futures: list[Future[Any]] = []
        self.completions: list[int] = []
        self.is_closed = False

    @rule(timeout=st.sampled_from([0.0, 60.0]), idempotent=st.booleans())
    def send(self, timeout: float, idempotent: bool) -> None:
        request = Request(CALL, None, timeout, keep=object(), idempotent=idempotent)
        with suppress(SendQueueFullError, WorkerLostError):
            future = self.caller.send(PEER, request, timeout)
            index = len(self.futures)
            self.futures.append(future)
            future.add_done_callback(lambda _: self.completions.append(index))

    @rule()
    def fail_the_next(self) -> None:
        self.world.fails_next = True

    @rule(data=st.data(), kind=st.sampled_from([RESULT, ERROR]), begun=st.booleans())
    def answer(self, data: st.DataObject, kind: int, begun: bool) -> None:
        if self.world.sent and self.peer.absence is None:
            identifier = data.draw(st.sampled_from(self.world.sent))
            self.world.sent.remove(identifier)
            envelope = agent_pb2.Envelope(id=identifier, type=kind, not_begun=kind == ERROR and not begun)
            self.caller.receive(self.peer, envelope, read_inline)
            self.caller.receive(self.peer, envelope, read_inline)  # which is dropped

    @rule(data=st.data())
    def answer_unreadably(self, data: st.DataObject) -> None:
        if self.world.sent and self.peer.absence is None:
            identifier = data.draw(st.sampled_from(self.world.sent))
            self.world.sent.remove(identifier)
            envelope = agent_pb2.Envelope(id=identifier, type=RESULT)
            for _ in range(2):
                self.threads.submit(self.caller.note_rejected(self.peer, envelope, ValueError("malformed")))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.futures:
            future = data.draw(st.sampled_from(self.futures))
            assert future.cancel() in (True, False)

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        if self.clock.added:
            identifier = data.draw(st.sampled_from(self.clock.added))
            self.clock.added.remove(identifier)
            if self.clock.is_live(identifier):
                self.clock.expire(identifier)

    @rule()
    def run_threads(self) -> None:
        self.threads.run()

    @rule()
    def pass_time(self) -> None:
        self.loop.now += 2.0
        self.loop.run_ready()

    @precondition(lambda self: self.peer.absence is None)
    @rule(waits=st.booleans())
    def suspect(self, waits: bool) -> None:
        suspect(self.peer, BROKEN, waits=waits)

    @precondition(lambda self: self.peer.absence is not None and self.peer.end is None)
    @rule()
    def come_back(self) -> None:
        bring_back(self.peer)

    @precondition(lambda self: self.peer.end is None)
    @rule()
    def lose(self) -> None:
        self.world.sent.clear()
        lose(self.peer, PROCESS_ENDED)

    @invariant()
    def each_ends_once(self) -> None:
        assert len(self.completions) == len(set(self.completions))
        for index in self.completions:
            error = error_of(self.futures[index])
            assert error is None or isinstance(error, ENDS)
            assert getattr(error, "outcome", Outcome.RAN) is not None
        assert len(self.ends.ended) == len(set(self.ends.ended))

    def teardown(self) -> None:
        self.world.fails_next = False
        self.caller.stop_deadlines()
        self.threads.run()
        self.caller.fail_all(RuntimeError("the agent ends"))  # type: ignore[arg-type]
        self.loop.run_ready()
        self.threads.run()
        assert sorted(self.completions) == list(range(len(self.futures)))
        assert sorted(self.ends.begun) == sorted(self.ends.ended)
        assert not self.caller.in_flight
        assert not self.caller.kept
        assert not self.counter.in_flight
        self.loop.close()


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def calls_one_at_a_time() -> tuple[VirtualTime, Threads, Peer, Caller]:
    """Returns a caller that may have one call in flight, what it runs on, and the worker that it calls."""
    loop, threads = VirtualTime(), Threads()
    world: Any = World(loop)
    extensions = Extensions(Packer())
    extensions.add(Ends())
    watchers: list[WorkerWatcher] = []
    peer = world.peer = silent_peer(PEER, watchers, threads, world)
    parts = call_parts(
        peer, extensions, threads, CallCounter(), FlowControlOptions(max_in_flight=1), world.call_soon
    )
    caller = Caller(parts, world, Clock)  # type: ignore[arg-type]
    watchers.append(caller)
    return loop, threads, peer, caller


def test_an_attempt_that_waits_for_capacity_counts_no_longer_when_its_worker_is_lost():
    loop, threads, peer, caller = calls_one_at_a_time()
    caller.send(PEER, Request(CALL, None), 0)
    request = Request(CALL, None, keep=object(), idempotent=True)
    waiting = [loop.create_task(caller.send_async(PEER, request, 60)) for _ in range(2)]
    loop.run_ready()
    assert peer.window.waiting
    lose(peer, PROCESS_ENDED)
    threads.run()
    loop.run_ready()
    assert all(each.done() for each in waiting)
    assert not peer.window.calls
    assert not peer.window.waiting
    assert not caller.kept
    caller.fail_all(RuntimeError("the agent ends"))  # type: ignore[arg-type]
    loop.run_ready()
    loop.close()


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_an_answer_to_a_call_that_has_not_been_sent_ends_its_wait(is_confirmed):
    loop, threads, peer, caller = calls_one_at_a_time()

    def answer(identifier: int) -> None:
        if is_confirmed:
            caller.on_confirmed(PEER, (identifier,))
        else:
            caller.receive(peer, agent_pb2.Envelope(id=identifier, type=RESULT), read_inline)
        threads.run()

    caller.send(PEER, Request(CALL, None), 0)
    waiting = loop.create_task(caller.send_async(PEER, Request(CALL, None), 60))
    loop.run_ready()
    assert not waiting.done()
    answer(2)  # by a worker that guesses its id; its timeout does not end the wait any more
    loop.run_ready()
    assert waiting.done()
    assert waiting.result().done()
    assert not peer.window.waiting
    answer(1)
    suspect(peer, BROKEN, waits=True)
    postponed = caller.send(PEER, Request(CALL, None, keep=object()), 0)
    answer(3)
    assert postponed.done()
    assert not peer.window.calls
    assert not caller._postponed
    assert not caller.kept
    loop.close()


BECOMES = [lose, partial(suspect, waits=False), partial(suspect, waits=True)]
"""What may happen to a worker that has answered."""


@pytest.mark.parametrize("becomes", BECOMES)
def test_a_call_whose_answer_has_come_does_not_fail_with_its_worker(becomes):
    loop, threads, peer, caller = calls_one_at_a_time()
    future = caller.send(PEER, Request(CALL, None), 0)
    caller.receive(peer, agent_pb2.Envelope(id=1, type=RESULT), read_inline)
    becomes(peer, BROKEN)
    threads.tasks.reverse()  # the answer waits longest for a thread
    threads.run()
    assert future.value() == 1
    loop.close()


@pytest.mark.parametrize("becomes", BECOMES)
def test_a_call_whose_answer_cannot_be_read_has_run_whatever_becomes_of_its_worker(becomes):
    loop, threads, peer, caller = calls_one_at_a_time()
    future = caller.send(PEER, Request(CALL, None), 0)
    error = PayloadLostError("half of it has not come")
    threads.submit(caller.note_rejected(peer, agent_pb2.Envelope(id=1, type=RESULT), error))
    becomes(peer, BROKEN)
    threads.tasks.reverse()
    threads.run()
    with pytest.raises(AnswerFailedError) as raised:
        future.value()
    assert raised.value.outcome is Outcome.RAN
    loop.close()
