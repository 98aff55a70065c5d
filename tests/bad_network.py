"""A network that loses, repeats and reorders messages, for protocols that must work all the same."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.peers import control


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes agents of this process repeat unacknowledged control messages within milliseconds."""
    monkeypatch.setattr(control, "ATTEMPT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(control, "MAX_DOUBLINGS", 0)
    monkeypatch.setattr(control, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(control, "MAX_PAUSE_S", 0.02)


class BadNetwork:
    """Loses, repeats and delays a share of the envelopes that an agent sends.

    Args:
        agent: its envelopes go through this network from now on.
        seed: of the random choices.
        kinds: the message types that may be lost, repeated or delayed; others are sent as they are.
    """

    def __init__(self, agent: GrpcAgent, seed: int, kinds: Sequence[int]) -> None:
        self._network = agent._network
        self._kinds = kinds
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # the control thread sends, and those that answer
        self._kept: list[tuple[WorkerInfo, bytes]] = []
        self.lost = 0
        agent._codec._network = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def send(self, worker: WorkerInfo, data: bytes) -> None:
        self._send(worker, data, self._network.send)

    def send_behind(self, worker: WorkerInfo, data: bytes, seconds: float) -> None:
        self._send(worker, data, lambda worker, data: self._network.send_behind(worker, data, seconds))

    def _send(self, worker: WorkerInfo, data: bytes, send: Callable[[WorkerInfo, bytes], Any]) -> None:
        kind = agent_pb2.Envelope.FromString(data).type
        late: list[tuple[WorkerInfo, bytes]] = []
        with self._lock:
            fate = self._random.random() if kind in self._kinds else 1.0
            if fate < 0.25:
                self.lost += 1
                return
            if fate < 0.4:
                self._kept.append((worker, data))  # comes after something later, perhaps much later
                return
            if self._kept and self._random.random() < 0.5:
                late.append(self._kept.pop(self._random.randrange(len(self._kept))))
        send(worker, data)
        if fate < 0.6:
            send(worker, data)
        for each in late:
            self._network.send(*each)
