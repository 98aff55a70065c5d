"""An agent that fails and delays messages on purpose, for tests of programs and of gradwire itself.

    options = FaultyRpcBackendOptions(
        init_method=url,
        messages_to_fail=["CALL", "rref.fork"],  # the first two sends of each fail
        num_fail_sends=2,
        messages_to_delay={"RESULT": 1.5},       # each leaves 1.5 seconds late
    )
    rpc.init_rpc("worker0", backend=BackendType.FAULTY, rank=0, world_size=2, rpc_backend_options=options)

It is a GrpcAgent whose transports are wrapped. A call whose sending fails raises SendFailedError at its caller and
is never sent again; a control message, which keeps count of references and contexts, is sent again until it
arrives. What is delayed does not hold up anything else, and the delay counts against the call's timeout.
"""

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from ..c10d.torch_types import TorchStore
from ..errors import SendFailedError
from ..proto.v1 import agent_pb2
from .agent.grpc_agent import AgentFactories, GrpcAgent
from .agent.network import Network, NetworkSeams
from .backend_registry import register_backend
from .channels import broadcast
from .collectives import all_gather
from .contracts.agent import CANCELLED
from .contracts.extension import Extension, ExtensionFactory
from .contracts.messages import MessageType
from .contracts.options import RpcBackendOptions
from .contracts.worker import WorkerEnd, WorkerInfo
from .execution.futures import Future
from .execution.poller import SocketWaiter
from .grpc_backend import start_agent
from .membership import evictions
from .peers.control import ControlStreams
from .requests.server import CONFIRMED
from .transports.base import Connecting, Transport, TransportClosedError
from .wire.parsing import embed

__all__ = ["FaultyRpcBackendOptions", "control_kinds", "message_names", "start_faulty_agent"]


def control_kinds() -> Sequence[str]:
    """Returns the kinds of control messages that an agent with the default extensions sends."""
    from ..extensions import DEFAULT_EXTENSIONS  # here, because the extensions are built on this package

    kinds = [CANCELLED, CONFIRMED, *all_gather.CONTROL_KINDS, *broadcast.CONTROL_KINDS, *evictions.CONTROL_KINDS]
    classes = [each for each in DEFAULT_EXTENSIONS if isinstance(each, type) and issubclass(each, Extension)]
    return sorted([*kinds, *(kind for extension in classes for kind in extension.control_kinds)])


def message_names() -> Sequence[str]:
    """Returns the names that messages have in FaultyRpcBackendOptions."""
    return [*sorted(set(MessageType.keys()) - {"MESSAGE_TYPE_UNSPECIFIED"}), *control_kinds()]


@dataclass(slots=True, kw_only=True)
class FaultyRpcBackendOptions(RpcBackendOptions):
    """The options of `init_rpc` with backend="FAULTY".

    messages_to_fail: names of messages (see `message_names`), the first sends of which fail on this worker.
    num_fail_sends: how many sends of each of them fail.
    messages_to_delay: names of messages, and the seconds by which each of their sends is late.
    """

    messages_to_fail: Sequence[str] = ()
    num_fail_sends: int = 0
    messages_to_delay: Mapping[str, float] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        check = _CHECKS.get(name)
        RpcBackendOptions.__setattr__(self, name, check(value) if check is not None else value)


def _check_to_fail(names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise TypeError(f"messages_to_fail is {names!r}: give a list of names")
    return [_check_name("messages_to_fail", name) for name in names]


def _check_count(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"num_fail_sends is {count!r}: give a whole number, 0 or more")
    return count


def _check_delays(delays: Mapping[str, float]) -> Mapping[str, float]:
    for name, seconds in delays.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"messages_to_delay[{name!r}] is {seconds!r}: give seconds, 0 or more")
    return {_check_name("messages_to_delay", name): float(seconds) for name, seconds in delays.items()}


def _check_name(option: str, name: str) -> str:
    if name not in (names := message_names()):
        raise ValueError(f"{option} names {name!r}; messages are called {', '.join(names)}")
    return name


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "messages_to_fail": _check_to_fail,
    "num_fail_sends": _check_count,
    "messages_to_delay": _check_delays,
}


def _options(rpc_timeout: float, init_method: str, **others: Any) -> FaultyRpcBackendOptions:
    return FaultyRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


def start_faulty_agent(
    store: TorchStore,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    extensions: Sequence[ExtensionFactory] | None = None,
) -> GrpcAgent:
    """Starts an agent as `start_agent` does, with the faults of its FaultyRpcBackendOptions.

    Raises:
        TypeError: the options are others.
    """
    if not isinstance(rpc_backend_options, FaultyRpcBackendOptions):
        raise TypeError(f"rpc_backend_options is {rpc_backend_options!r}: give FaultyRpcBackendOptions")
    if extensions is None:
        from ..extensions import DEFAULT_EXTENSIONS  # see control_kinds

        extensions = DEFAULT_EXTENSIONS
    factories = AgentFactories(
        network=partial(Network, seams=NetworkSeams(wrap=partial(_FaultyTransport, _Faults(rpc_backend_options)))),
        # By themselves, so that they fail without the calls that would take them along.
        control=partial(ControlStreams, takes_along=False),
    )
    make_agent = partial(GrpcAgent, extensions=extensions, factories=factories)
    return start_agent(store, name, rank, world_size, rpc_backend_options, make_agent)


@final
class _Faults:
    """Decides which messages of one worker fail or are delayed."""

    def __init__(self, options: FaultyRpcBackendOptions) -> None:
        self._lock = threading.Lock()
        self._to_fail = Counter(dict.fromkeys(options.messages_to_fail, options.num_fail_sends))
        self._delays = dict(options.messages_to_delay)

    def should_fail(self, names: Sequence[str]) -> bool:
        """Returns whether this send is to fail, and counts it."""
        with self._lock:
            for name in names:
                if self._to_fail[name]:
                    self._to_fail[name] -= 1
                    return True
        return False

    def delay(self, names: Sequence[str]) -> float:
        """Returns the seconds by which a message is delayed."""
        return max(self._delays.get(name, 0.0) for name in names)


@final
class _FaultyTransport:
    """Wraps a transport: fails or delays what is sent."""

    @property
    def name(self) -> str:
        return "faulty"

    @property
    def queued_bytes(self) -> int:
        return self._transport.queued_bytes

    def __init__(
        self, faults: _Faults, transport: Transport, peer: WorkerInfo, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._faults = faults
        self._transport = transport
        self._peer = peer
        self._loop = loop
        self._delayed: dict[asyncio.TimerHandle, bytes] = {}
        """The delayed envelopes. Used on the event loop only."""

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        names = _names(envelope)
        if self._faults.should_fail(names):
            raise SendFailedError(self._peer.name, f"fault injection failed the {names[0]} message")
        if delay := self._faults.delay(names):
            self._loop.call_soon_threadsafe(self._send_at, self._loop.time() + delay, embed(envelope, attached))
        else:
            self._transport.send(envelope, attached)

    def withdraw(self, beginning: bytes) -> bool:
        return self._transport.withdraw(beginning)

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        self._transport.read_answer(future, waiter)

    def connect(self) -> Connecting:
        return self._transport.connect()

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        """Sends what is delayed at once, and closes the transport."""
        for timer, envelope in list(self._delayed.items()):
            timer.cancel()
            self._send_delayed(envelope)
        self._delayed.clear()
        await self._transport.close(drain, end, dial=dial)

    def _send_at(self, when: float, envelope: bytes) -> None:
        def leave() -> None:
            del self._delayed[timer]
            self._send_delayed(envelope)

        timer = self._loop.call_at(when, leave)
        self._delayed[timer] = envelope

    def _send_delayed(self, envelope: bytes) -> None:
        # If the peer is lost meanwhile, the calls that wait for an answer have failed already.
        with contextlib.suppress(TransportClosedError):
            self._transport.send(envelope)


def _names(data: bytes) -> Sequence[str]:
    """Returns the names of a message, the most specific first."""
    envelope = agent_pb2.Envelope.FromString(data)
    kinds = dict.fromkeys(message.kind for message in envelope.control.messages)
    return [*kinds, MessageType.Name(envelope.type)]


FAULTY = register_backend("FAULTY", _options, start_faulty_agent)
