"""Answers of workers that were not asked, and calls that end whatever is told of that."""

import pytest
from gradwire import Outcome, rpc
from gradwire.c10d import HashStore
from gradwire.errors import RpcCancelledError
from gradwire.extensions import DEFAULT_EXTENSIONS
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.extension import Extension
from gradwire.rpc.contracts.messages import RESULT
from gradwire.rpc.contracts.options import RpcBackendOptions
from gradwire.rpc.contracts.worker import Member, WorkerInfo
from gradwire.rpc.membership.roster import RosterLog

from tests.addresses import address_here
from tests.remote_functions import set_event, wait_for


def test_a_malformed_answer_of_another_worker_releases_nothing(agents):
    """What a request keeps alive stays until its own worker has answered, also if it has timed out."""
    agent, asked, other = agents(3)
    kept = agent._caller.kept
    kept[7] = "a lease"
    agent._flow_control.admit(agent.peers.of(asked.info).window, 7, 0)
    answer = agent_pb2.Envelope(id=7, type=RESULT)
    agent._caller.note_rejected(agent.peers.of(other.info), answer, ValueError("malformed"))()
    assert kept == {7: "a lease"}
    agent._caller.note_rejected(agent.peers.of(asked.info), answer, ValueError("malformed"))()
    assert not kept


class Raising(Extension):
    """Cannot note the end of any call."""

    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        raise RuntimeError(f"request {identifier} has failed")

    def on_complete(self, identifier: int) -> None:
        raise RuntimeError(f"request {identifier} is complete")


@pytest.mark.timeout(60)
def test_calls_end_although_an_extension_raises(caplog):
    extensions = [*DEFAULT_EXTENSIONS, Raising]
    roster = RosterLog(HashStore(), "test")
    agent = GrpcAgent(WorkerInfo("alone", 0), RpcBackendOptions(), "test", roster, extensions=extensions)
    try:
        agent.open([Member(agent.info, agent.listen(address_here()))])
        with holder.using(agent):
            assert rpc.rpc_async("alone", divmod, (7, 2), timeout=0).wait() == (3, 1)
            with pytest.raises(ZeroDivisionError):
                rpc.rpc_async("alone", divmod, (1, 0), timeout=0).wait()
            call = rpc.rpc_async("alone", wait_for, ("never",), timeout=0)
            assert call.cancel()
            with pytest.raises(RpcCancelledError):
                call.wait()
            set_event("never")
        assert any("the end of a call cannot be noted" in each.message for each in caplog.records)
        assert any("the failure of a call cannot be noted" in each.message for each in caplog.records)
    finally:
        agent.shutdown(graceful=False, timeout=0)
