"""Parsers of rpc for whole messages: an agent without threads or network gets envelopes from another worker.

It has pending requests, so that answers are looked at, and a policy, so that it unpickles nothing that could do
what it likes.
"""

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from google.protobuf.message import DecodeError
from gradwire import autograd, rpc
from gradwire.autograd.extension import Autograd
from gradwire.c10d import HashStore
from gradwire.errors import NotInitializedError
from gradwire.extensions import DEFAULT_EXTENSIONS
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import AgentFactories, GrpcAgent
from gradwire.rpc.calls.streams import Streams
from gradwire.rpc.channels.payloads import read_inline
from gradwire.rpc.collectives.rounds import RoundKey, RoundResult
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.contracts.options import ChannelOptions, RpcBackendOptions
from gradwire.rpc.contracts.policy import Policy
from gradwire.rpc.contracts.worker import Member, WorkerInfo
from gradwire.rpc.membership.roster import RosterLog
from gradwire.rpc.peers.peer import Peer, Peers
from gradwire.rpc.wire.failures import encode_failure
from gradwire.rpc.wire.parsing import parse_envelope
from gradwire.tracing.recording import SETTINGS, ProfileRequest
from hypothesis import strategies as st

from tests.addresses import address_here
from tests.fuzz.exposed import count_to, echo
from tests.fuzz.framing import framed, unframed
from tests.fuzz.rpc_value_targets import MAX_OPERATIONS, PICKLES
from tests.fuzz.rpc_wire_targets import AUDIT, ENVELOPES, FAILURES, ME, MIB, PEER
from tests.fuzz.target import Target
from tests.simulated_peers import simulated_links, simulated_parts

__all__ = ["ANSWER_TYPES", "RPC_MESSAGE_TARGETS", "valid_messages"]

OTHER = WorkerInfo("other", 2)

MAX_TASKS = 2000
"""Tasks of one input."""


class _WaitError(Exception):
    """A task waits, as one does for other workers."""


class _Threads:
    """What an agent has of threads and of the network: tasks are queued, and what is sent is kept."""

    threads = idle = queued = queued_bytes = 0
    is_inherited = False

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], object]] = deque()
        self.sent: list[bytes] = []
        self.me = ME
        self.channels = SimpleNamespace(devices=SimpleNamespace(staging=None), broadcasts=None)
        self.audit = AUDIT
        self.peers = Peers(ME)

    def run(self) -> None:
        """Runs tasks until there are none."""
        for _ in range(MAX_TASKS):
            if not self.tasks:
                return
            self.tasks.popleft()()
        raise AssertionError(f"there are tasks after {MAX_TASKS}")

    # An executor, and a scheduler.

    def submit(self, task: Callable[..., object], *args: Any, urgent: bool = True) -> None:
        self.tasks.append(partial(task, *args))

    submit_urgent = call_soon = submit

    def call_last(self, function: Callable[[], None]) -> None:
        function()

    def call_later(self, _seconds: float, _task: Callable[[], None]) -> None:
        """Drops what is to be done again."""

    def blocking(self) -> NoReturn:
        raise _WaitError

    # A network, and its transports.

    name = "fuzz"
    read_answer = None

    def listen(self, _where: object, messages: Any, watchers: Any) -> str:
        self.messages = messages
        links = simulated_links(watchers, self)
        self._parts = simulated_parts(lambda *_: self, messages, links, _inline_channels)
        return ""

    def open(self, members: Sequence[Member], _control: object) -> None:
        for member in members:
            self.peers.add(Peer(member, self._parts))

    def admit(self) -> None:
        pass

    connect = admit

    def send(self, envelope: bytes, _attached: object = ()) -> None:
        self.sent.append(envelope)

    def withdraw(self, *_: object) -> bool:
        return True


def _inline_channels(_peer: Peer) -> Any:
    """Returns channels to a peer, by which nothing goes: all payloads are in their envelope."""
    limit = 32 * MIB
    options = ChannelOptions(inline_threshold=limit, max_inline_bytes=limit, shared_memory_threshold=limit)
    return SimpleNamespace(options=options, has_socket=False, shared_memory=SimpleNamespace(segments=None))


class _NoDeadlines:
    def __init__(self, *_: object) -> None:
        pass

    def add(self, _identifier: int, _seconds: float) -> None:
        pass


def _agent(info: WorkerInfo) -> tuple[GrpcAgent, _Threads]:
    """Makes the agent of a worker."""
    threads: Any = _Threads()
    made = GrpcAgent(
        info,
        RpcBackendOptions(policy=Policy(accepts="exposed", max_operations=MAX_OPERATIONS)),
        "fuzz",
        RosterLog(HashStore(), "fuzz"),
        extensions=DEFAULT_EXTENSIONS,
        factories=AgentFactories(
            network=lambda *_: threads,
            executor=lambda *_: threads,
            deadlines=_NoDeadlines,
            scheduler=lambda *_: threads,
        ),
    )
    made.listen(address_here())
    made.open([Member(worker, "", 0, "") for worker in (ME, PEER, OTHER)])
    return made, threads


# What another worker sends.

CONTROL = {
    "rref.fork": (0, 1, 1, 2),
    "rref.await": (0, 0),
    "rref.accept": (0, 3),
    "rref.delete": (0, 1, 1, 2),
    "call.confirmed": (2,),
    "autograd.release": (1 << 48 | 1, frozenset({1, 2}), "it is lost"),
    "autograd.joined": 1,
    "autograd.ask_open": None,
    "autograd.open": (1 << 48 | 9, frozenset({1 << 48 | 1})),
    "autograd.abort": (1 << 48 | 1, (1, 1), ValueError("it failed")),
    "call.cancelled": (4,),
    "all_gather.ask": RoundKey("user", 0, (0, 1)),
    "all_gather.tell": (RoundKey("topic", 0, (0, 1)), RoundResult({0: 1, 1: 2})),
    "other": None,
}

CONTEXT = 1 << 48 | 1
PASS = (1, 1)

REQUESTS = (
    (MessageType.BACKWARD, ((CONTEXT, PASS, [], False, 0.0, None), (0, [torch.ones(2)]))),
    (MessageType.BACKWARD, ((CONTEXT, PASS, [0], False, 0.0, None), None)),
    (MessageType.CLOSURE, (CONTEXT, [0])),
    (MessageType.SENDS, CONTEXT),
    (MessageType.RREF_FETCH, (1, 0)),
    (MessageType.ALL_GATHER, ("topic", 0, (0, 1), "value", False)),
    (MessageType.ALL_GATHER_STATUS, ("topic", 0, (0, 1))),
    (MessageType.GREETING, None),
    (MessageType.VIEW_SNAPSHOT, None),
    (MessageType.VIEW_STACKS, None),
    (MessageType.PROFILE_START, ProfileRequest(profile="1" * 32, settings=SETTINGS[:1]).encode()),
    (MessageType.PROFILE_CLOCK, None),
    (MessageType.PROFILE_STOP, "1" * 32),
)


@cache
def valid_messages() -> list[bytes]:
    """Returns envelopes as an agent sends them, but for its answers."""
    peer, threads = _agent(PEER)
    with holder.using(peer):
        rpc.rpc_async(ME, echo, (1, "two", torch.ones(3)), {"key": None})
        rpc.rpc_async(ME, echo, (torch.ones(20, 30, dtype=torch.float64).to_sparse(), torch.ones(3).double().t()))
        created = rpc.remote(ME, echo, (1,))
        with autograd.context() as context:
            assert context == CONTEXT
            rpc.rpc_async(ME, echo, (torch.ones(2, requires_grad=True), rpc.remote(OTHER, echo), created))
            stream = rpc.rpc_stream(ME, count_to, (3,))
            for kind, value in REQUESTS:
                peer.request(ME, Request(kind, value))
            peer.request(ME, Request(MessageType.RREF_BACKWARD, (rpc.RRef(1), context, True)))
            peer.post(ME, MessageType.GRADIENTS, (context, PASS, 0, [torch.ones(2), (torch.ones(1), (3,)), None]))
        peer.request(ME, Request(MessageType.CALL, (echo, (), {}), header=lambda each: each.profile.SetInParent()))
        for name, payload in CONTROL.items():
            peer.control.send(ME, name, payload)
            threads.run()
        stream.close()
        threads.run()
    peer._extensions.close()
    credit = agent_pb2.Envelope(type=MessageType.STREAM_CREDIT)
    credit.stream.stream_id, credit.stream.items, credit.stream.nbytes = 5, 3, 1000
    others = (credit, agent_pb2.Envelope(type=MessageType.CANCEL, id=5))
    return [*threads.sent, *map(agent_pb2.Envelope.SerializeToString, others)]


def _answer(kind: MessageType.ValueType, identifier: int, body: bytes) -> bytes:
    envelope = agent_pb2.Envelope(id=identifier, type=kind, body=agent_pb2.Payload(inline=body))
    if kind == MessageType.STREAM_ITEM:
        envelope.stream.stream_id = identifier
    return envelope.SerializeToString()


BODIES = (
    st.sampled_from(
        [
            None,
            {0: encode_failure(ValueError("refused"))},
            {0: 2**40},
            (2, b""),
            (2, encode_failure(ValueError("refused"))),
            ("2", 2**40),
            [],
            RoundResult({0: 1, 1: 2}),
            (0, [None]),
        ]
    ).map(partial(pickle.dumps, protocol=5))
    | PICKLES
    | FAILURES
)
ANSWER_TYPES = (MessageType.RESULT, MessageType.ERROR, MessageType.STREAM_ITEM)
ANSWERS = st.builds(
    _answer,
    st.sampled_from([*ANSWER_TYPES, MessageType.RESULT, MessageType.CALL]),
    st.integers(1, 8),
    BODIES,
)
MESSAGES = st.lists(
    st.deferred(lambda: st.sampled_from(valid_messages()))
    | ANSWERS
    | ENVELOPES.map(agent_pb2.Envelope.SerializeToString),
    max_size=5,
).map(framed)


def receive_messages(data: bytes) -> None:
    """Has an agent handle messages of another worker."""
    agent, threads = _agent(ME)
    before = threading.active_count()
    with holder.using(agent):
        pending = _make_requests(agent, threads)
        messages = unframed(data)
        for message in messages:
            with suppress(DecodeError):
                envelope, nbytes = parse_envelope(message)
                envelope.has_headers = True
                threads.messages.on_message(agent.peers.of(PEER), envelope, read_inline, nbytes, announced=False)
                threads.run()
        assert len(agent.extension(Autograd).contexts) <= len(messages)
        assert threading.active_count() == before
    agent._extensions.close()
    agent._caller.fail_all(NotInitializedError("the test is over"))  # the collector does not see torch's futures
    assert not torch.autograd._profiler_enabled()
    assert not torch.is_anomaly_enabled()
    del pending


def _make_requests(agent: GrpcAgent, threads: _Threads) -> list[object]:
    """Makes requests to the other worker; returns what has to be kept."""
    kept: list[object] = [rpc.rpc_async(PEER, echo), rpc.remote(PEER, echo, (1,))]
    kept.append(agent.extension(Streams).consume(PEER, (count_to, (3,), {}), 1 << 20, 4))
    agent.control.send(PEER, "other", None)
    threads.run()
    return kept


RPC_MESSAGE_TARGETS = (
    Target(name="rpc-messages", parse=receive_messages, inputs=MESSAGES, max_bytes=8 * MIB, is_slow=True),
)
