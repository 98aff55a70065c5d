"""A request of another worker runs at most once and is answered once, whatever happens to it in whatever order."""

import concurrent.futures
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.payloads import read_inline
from gradwire.rpc.contracts.extension import Awaited, Extension
from gradwire.rpc.contracts.messages import CALL, Deferred, Handler, Incoming, MessageType, Outgoing
from gradwire.rpc.contracts.options import FlowControlOptions
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.peers.flow_control import Backlogs
from gradwire.rpc.peers.peer import Peer
from gradwire.rpc.requests.call import CallCounter
from gradwire.rpc.requests.codec import Extensions
from gradwire.rpc.requests.server import ServedCall, Server
from gradwire.rpc.wire.pickling import Packed, Packer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.simulated_peers import call_parts, silent_peer

ME = WorkerInfo("me", 0)
PEER = WorkerInfo("peer", 1)
MAX_PARKED = 4

VALUE, FAILURE, FUTURE = "value", "failure", "future"
CANCELLED = "cancelled"
"""The request is cancelled while it runs, and returns a future."""


class Promise:
    """A value that a request waits for."""

    def __init__(self, meanwhile: Callable[[], None] | None) -> None:
        """Args: meanwhile: what other threads do after a wake-up, while the first wait for it is registered."""
        self.is_over = False
        self.wakers: list[Callable[[], None]] = []
        self.meanwhile = meanwhile

    def add_waiter(self, wake: Callable[[], None]) -> None:
        self.wakers.append(wake)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            wake()
            meanwhile()

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        with suppress(ValueError):
            self.wakers.remove(wake)

    def keep(self) -> None:
        self.is_over = True
        for wake in [*self.wakers]:
            wake()


class Functions(Extension):
    """Runs requests, as their ids say."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type] # it uses no agent
        self.kinds: dict[int, str] = {}
        self.promises: dict[int, Promise] = {}
        self.futures: dict[int, concurrent.futures.Future[int]] = {}
        self.runs: Counter[int] = Counter()
        self.cancel: Callable[[int], None]

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        return {CALL: Handler(self.run, user_values=True, cancellable=True)}

    def wait_before_run(self, envelope: agent_pb2.Envelope) -> Sequence[Awaited]:
        promise = self.promises[envelope.id]
        return () if promise.is_over else (promise,)

    def run(self, message: Incoming) -> object:
        identifier = message.envelope.id
        self.runs[identifier] += 1
        if self.kinds[identifier] == FAILURE:
            raise ValueError("the function fails")
        if self.kinds[identifier] == CANCELLED:
            self.cancel(message.envelope.id)
            return Deferred(concurrent.futures.Future())
        if self.kinds[identifier] == FUTURE:
            self.futures[identifier] = future = concurrent.futures.Future()
            return Deferred(future)
        return identifier


class Threads:
    """An executor: what is submitted waits until the test has it run."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []

    def submit(self, task: Callable[..., object], *args: Any) -> None:
        self.tasks.append(lambda: task(*args))

    def run(self, count: int) -> None:
        while self.tasks and count:
            self.tasks.pop(0)()
            count -= 1


class Codec:
    """Notes what is answered."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        self.values, self.packer, self.me = self, self, ME

    def read(self, source: Peer, envelope: agent_pb2.Envelope, *_: object, **__: object) -> Incoming:
        return Incoming(source.info, envelope, b"", [])

    def unpack(self, _message: Incoming) -> None:
        """Returns the value of a request, which is not used."""

    def pack(self, *_: object, **__: object) -> Packed:
        return Packed((b"", [], [], frozenset()))

    def encode_failure(self, _error: BaseException) -> bytes:
        return b"an error"

    def record_refusal(self, *_: object) -> None:
        pass

    def send(self, _peer: Peer, answer: Outgoing) -> None:
        self.answers[answer.envelope.id] += 1


class NoClock:
    """Has no time: requests expire when the test says so."""

    def __init__(self, *_: object) -> None:
        pass

    def add(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


class Requests(RuleBasedStateMachine):
    """All that can happen to requests."""

    def __init__(self) -> None:
        super().__init__()
        self.functions, self.threads, self.codec = Functions(), Threads(), Codec()
        extensions = Extensions(Packer())
        extensions.add(self.functions)
        options = FlowControlOptions(max_in_flight=MAX_PARKED, max_received=MAX_PARKED)
        make_clock: Any = NoClock
        self.counter = CallCounter()
        self.peer, codec = silent_peer(PEER), self.codec
        parts = call_parts(self.peer, extensions, self.threads, self.counter, options)
        self.server = Server(
            parts,
            codec,  # type: ignore[arg-type]
            Backlogs(options, lambda _task: None),
            options,
            make_clock,
        )
        self.functions.cancel = partial(self.server.cancel, self.peer)
        self.arrived: dict[int, ServedCall] = {}
        self.announced: list[int] = []
        """Those whose payloads have not come."""
        self.must_not_run: set[int] = set()

    @rule(
        kind=st.sampled_from([VALUE, FAILURE, FUTURE, CANCELLED]),
        needs=st.booleans(),
        timeout=st.booleans(),
        is_woken_early=st.booleans(),
    )
    def arrive(self, kind: str, needs: bool, timeout: bool, is_woken_early: bool) -> None:
        identifier = len(self.arrived) + 1
        envelope = agent_pb2.Envelope(id=identifier, type=CALL, timeout_ms=3_600_000 if timeout else 0)
        if needs:
            envelope.needed_values.add()
        self.functions.kinds[identifier] = kind
        self.functions.promises[identifier] = Promise(partial(self.threads.run, 10) if is_woken_early else None)
        self.arrived[identifier] = self.server.arrive(self.peer, envelope)
        self.announced.append(identifier)

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def payloads_come(self, data: st.DataObject) -> None:
        identifier = data.draw(st.sampled_from(self.announced))
        self.announced.remove(identifier)
        call = self.server.find(self.peer, self.arrived[identifier].envelope)
        call.payloads = read_inline
        self.peer.received.add(0)
        self.threads.submit(self.server.serve, call)

    @rule(count=st.integers(1, 5))
    def run_threads(self, count: int) -> None:
        self.threads.run(count)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        identifier = data.draw(st.sampled_from(sorted(self.arrived)))
        if not self.functions.runs[identifier]:
            self.must_not_run.add(identifier)
        self.server.cancel(self.peer, identifier)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def keep_a_promise(self, data: st.DataObject) -> None:
        self.functions.promises[data.draw(st.sampled_from(sorted(self.arrived)))].keep()

    @precondition(lambda self: self.functions.futures)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        future = self.functions.futures[data.draw(st.sampled_from(sorted(self.functions.futures)))]
        with suppress(concurrent.futures.InvalidStateError):
            future.set_result(1)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        call = self.arrived[data.draw(st.sampled_from(sorted(self.arrived)))]
        if call.deadline:
            call.deadline = 1e-9
            self.server.abort_expired()

    @rule()
    def fall_silent(self) -> None:
        self.must_not_run.update(identifier for _, identifier in self.server.waiting)
        self.server.note_suspect(PEER, "it does not answer")

    @invariant()
    def runs_and_is_answered_at_most_once(self) -> None:
        assert set(self.functions.runs.values()) <= {0, 1}
        assert set(self.codec.answers.values()) <= {1}
        assert not any(self.functions.runs[identifier] for identifier in self.must_not_run)

    def teardown(self) -> None:
        while self.announced:
            call = self.server.find(self.peer, self.arrived[self.announced.pop()].envelope)
            call.payloads = read_inline
            self.peer.received.add(0)
            self.threads.submit(self.server.serve, call)
        self.threads.run(1000)  # those that need values now wait for them
        for promise in self.functions.promises.values():
            promise.keep()
        self.threads.run(1000)
        for future in self.functions.futures.values():
            with suppress(concurrent.futures.InvalidStateError):
                future.set_result(1)
        self.threads.run(1000)
        assert self.codec.answers == dict.fromkeys(self.arrived, 1)
        assert not self.server.waiting
        assert not self.server.deferred
        assert not self.counter.in_flight
        assert not self.server.answering.in_flight
        assert self.peer.parked_requests == 0
        assert self.peer.received.figures()["received_requests"] == 0


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
