"""Answers of workers that were not asked."""

from types import SimpleNamespace
from typing import Any

from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.pending import PendingRequests
from gradwire.rpc.contracts.messages import RESULT
from gradwire.rpc.contracts.worker import WorkerInfo


def test_a_malformed_answer_of_another_worker_releases_nothing():
    """What a request keeps alive stays until its own worker has answered, also if it has timed out."""
    parts: Any = SimpleNamespace(record_refusal=lambda *_: None, release=lambda *_: None, nesting=None)
    requests = PendingRequests(parts, parts, parts, parts)
    asked, other = WorkerInfo("asked", 1), WorkerInfo("other", 2)
    requests.kept[7] = asked.wire_id, "a lease"
    answer = agent_pb2.Envelope(id=7, type=RESULT)
    requests.on_rejected_answer(other, answer, ValueError("malformed"))
    assert requests.kept == {7: (asked.wire_id, "a lease")}
    requests.on_rejected_answer(asked, answer, ValueError("malformed"))
    assert not requests.kept
