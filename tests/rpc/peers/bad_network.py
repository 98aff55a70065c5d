"""A network that fails, delays and reorders messages, for protocols that must work all the same."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from gradwire.errors import SendFailedError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import AgentFactories
from gradwire.rpc.agent.network import Network, NetworkSeams
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.transports.base import Transport, TransportClosedError

MAX_DELAY_S = 0.03


class BadNetwork:
    """Fails or delays a share of the envelopes that an agent sends.

    Args:
        seed: of the random choices.
        kinds: the message types that may fail or come late; others are sent as they are.
    """

    def __init__(self, seed: int, kinds: Sequence[int]) -> None:
        self.kinds = kinds
        self.failed = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # the control thread sends, and those that answer

    def factories(self) -> AgentFactories:
        """Returns the factories of the agent."""
        return AgentFactories(network=partial(Network, seams=NetworkSeams(wrap=partial(_BadTransport, self))))

    def fate(self) -> float:
        """Returns the seconds by which an envelope is late; -1 if it is not sent."""
        with self._lock:
            choice = self._random.random()
            self.failed += choice < 0.25
            return -1.0 if choice < 0.25 else self._random.uniform(0, MAX_DELAY_S) if choice < 0.5 else 0.0


class _BadTransport:
    def __init__(
        self, bad: BadNetwork, transport: Transport, peer: WorkerInfo, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._bad, self._transport, self._peer, self._loop = bad, transport, peer, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        seconds = self._bad.fate() if agent_pb2.Envelope.FromString(envelope).type in self._bad.kinds else 0.0
        if seconds < 0:
            raise SendFailedError(self._peer.name, "the test failed it")
        if not seconds:
            self._transport.send(envelope, attached)
            return
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._send_late, envelope)

    def _send_late(self, envelope: bytes) -> None:
        with contextlib.suppress(TransportClosedError):
            self._transport.send(envelope)


class Recorder:
    """Has the envelopes that an agent has sent to others."""

    def __init__(self) -> None:
        self.sent: list[agent_pb2.Envelope] = []

    def factories(self) -> AgentFactories:
        """Returns the factories of the agent."""
        return AgentFactories(
            network=partial(Network, seams=NetworkSeams(wrap=partial(_RecordingTransport, self)))
        )


class _RecordingTransport:
    def __init__(
        self, recorder: Recorder, transport: Transport, _peer: WorkerInfo, _loop: asyncio.AbstractEventLoop
    ) -> None:
        self._recorder, self._transport = recorder, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        if self._transport.name != "loopback":
            self._recorder.sent.append(agent_pb2.Envelope.FromString(envelope))
        self._transport.send(envelope, attached)
