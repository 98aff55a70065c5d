"""Connections that break while a worker connects, which refuses nobody."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from gradwire.c10d import HashStore
from gradwire.errors import LossCause
from gradwire.rpc.contracts.worker import RosterVersion, WorkerInfo
from gradwire.rpc.membership.roster import RosterFollower, RosterLog
from gradwire.rpc.peers.peer import Peers
from gradwire.rpc.transports.grpc_stream import end_of_error


@pytest.mark.parametrize("code", list(grpc.StatusCode)[1:])
def test_a_worker_refuses_with_a_status_that_no_broken_connection_has(code):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core", None)
    is_broken = code.name in {"UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED", "DEADLINE_EXCEEDED"}
    end = end_of_error(error, "10.0.0.1:5")
    assert end.cause is (LossCause.UNREACHABLE if is_broken else LossCause.REFUSED)
    assert "Internal error from Core" in end.reason


class OneTask:
    """Stands for an executor that is busy: runs the task that it was given when it is told to."""

    def submit_urgent(self, task: Callable[..., None], *args: object) -> None:
        self.run = lambda: task(*args)


def test_a_roster_whose_connection_broke_is_not_waited_for():
    async def check() -> None:
        executor: Any = OneTask()
        roster, peers = RosterLog(HashStore(), "group"), Peers(WorkerInfo("a", 0))
        follower = RosterFollower(roster, peers, lambda _member: None, lambda: None, executor)
        learning = asyncio.ensure_future(follower.learn(RosterVersion(1)))
        await asyncio.sleep(0)
        learning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await learning
        executor.run()

    asyncio.run(check())
