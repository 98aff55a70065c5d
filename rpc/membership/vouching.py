"""Before a worker evicts a member to which it has never been connected, the other members are asked about it.

One that cannot reach a member does not know whether the member is dead or only out of its reach. So it asks all
others. The member stays if one of them is connected to it, or may be connected again, or gets an answer from it;
and also unless more than half of the others can be asked.
"""

import asyncio
from collections.abc import Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, final

import grpc
from google.protobuf.message import DecodeError

from ...net.event_loop import acquire_event_loop
from ...proto.v1 import agent_pb2
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import Member, WorkerInfo
from ..execution.executor import Executor
from ..peers.link import LinkState
from ..peers.peers import Peers
from ..transports.grpc_endpoint import VOUCH_METHOD, GrpcEndpoint, RefusedError
from ..transports.liveness import Reach, probe
from .addresses import ListenAddress
from .presence import Presence, presence_of
from .serial_calls import SerialCalls

__all__ = ["Verdict", "Vote", "Vouching", "ask", "ask_before_joining", "parse_question", "verdict_of"]

MAX_REQUEST_BYTES = 4 << 10
"""Bytes of a question: two names and a number."""

MAX_QUESTIONS = 64
"""Questions that may wait for an answer of a member, which is asked once at a time; others get none."""

MAX_ASKED = 32
"""Members that are asked at a time."""

ASK_TIMEOUT_S = 10.0
"""Seconds that a member may take to answer, which may have to look for PROBE_TIMEOUT_S itself."""

PROBE_TIMEOUT_S = 2.0
"""Seconds in which the host of one that does not answer has to say whether anybody listens."""


class Vote(Enum):
    """What a member says of another one."""

    VOUCHES = auto()
    """It is connected to it, or gets an answer."""
    DENIES = auto()
    """Neither of that."""
    ABSENT = auto()
    """It cannot be asked."""
    GONE = auto()
    """Its process has ended, so it is not counted."""


class Verdict(Enum):
    """What the members say of another one together."""

    STAYS = "another member is connected to it, or gets an answer from it"
    UNDECIDED = "no more than half of the other members can be asked about it"
    SILENT = "more than half of the other members were asked, and none of them vouches for it"


def verdict_of(votes: Iterable[Vote]) -> Verdict:
    """Returns what the members but one say of that one. It is undecided if there are no others."""
    counted = [vote for vote in votes if vote is not Vote.GONE]
    if Vote.VOUCHES in counted:
        return Verdict.STAYS
    return Verdict.SILENT if 2 * counted.count(Vote.DENIES) > len(counted) else Verdict.UNDECIDED


def parse_question(data: bytes) -> agent_pb2.VouchRequest:
    """Parses the question of another worker. Raises RefusedError if it is too long, or malformed."""
    if len(data) > MAX_REQUEST_BYTES:
        raise RefusedError(f"the question has {len(data)} bytes, of {MAX_REQUEST_BYTES} at most")
    try:
        return agent_pb2.VouchRequest.FromString(data)
    except DecodeError:
        raise RefusedError("the message is no question") from None


async def ask(
    endpoint: GrpcEndpoint, group: str, me: str, worker: WorkerInfo, members: Iterable[Member]
) -> Verdict:
    """Asks members about another one, by an endpoint that need not listen; returns what they say together."""
    question = agent_pb2.VouchRequest(group=group, worker_name=me, member_id=worker.wire_id)
    limit, request = asyncio.Semaphore(MAX_ASKED), question.SerializeToString()

    async def ask_one(member: Member) -> Vote:
        async with limit:
            return await _ask_one(endpoint, request, member)

    return verdict_of(await asyncio.gather(*map(ask_one, members)))


def ask_before_joining(
    name: str,
    options: RpcBackendOptions,
    where: ListenAddress,
    group: str,
    worker: WorkerInfo,
    others: Iterable[Member],
) -> Verdict:
    """Asks members about another one on behalf of a worker that is none yet, and waits for what they say together.

    The name, options and address (`where`) are those of the worker that wants to join.
    """
    events = acquire_event_loop()
    try:
        endpoint = GrpcEndpoint(name, options.find_credentials(), options.liveness)
        endpoint.reach = where.reach
        try:
            return events.run(ask(endpoint, group, name, worker, others))
        finally:
            endpoint.audit.close()
    finally:
        events.release()


async def _ask_one(endpoint: GrpcEndpoint, request: bytes, member: Member) -> Vote:
    try:
        channel = endpoint.channel(member.info.name, member.address)
        try:
            reply = await channel.unary_unary(VOUCH_METHOD)(request, timeout=ASK_TIMEOUT_S)
        finally:
            await channel.close()
        return Vote.VOUCHES if agent_pb2.VouchReply.FromString(reply).vouches else Vote.DENIES
    except (OSError, grpc.RpcError, DecodeError):
        found = await probe(asyncio.get_running_loop(), endpoint.reach, member.address, PROBE_TIMEOUT_S)
        return Vote.GONE if found is Reach.GONE else Vote.ABSENT


@final
class Vouching:
    """Answers the questions of other workers, and asks them. Used on the event loop only."""

    def __init__(
        self,
        group: str,
        endpoint: GrpcEndpoint,
        peers: Peers,
        executor: Executor,
    ) -> None:
        """Has been asked nothing yet. The endpoint knows who asks; threads of the executor wait for members."""
        self.where: ListenAddress | None = None
        """At which this worker listens."""
        self._group = group
        self._endpoint = endpoint
        self._peers = peers
        self._looks = SerialCalls(executor)
        self._questions = 0

    async def ask_others(self, worker: WorkerInfo, others: Iterable[Member]) -> Verdict:
        """Asks other members about one; returns what they say together."""
        return await ask(self._endpoint, self._group, self._peers.me.name, worker, others)

    async def serve(self, data: bytes, context: Any) -> bytes:
        """Serves the Vouch method of the agent's gRPC service."""
        peer, claimed = self._endpoint.on_stream(context), ""
        self._questions += 1
        try:
            if self._questions > MAX_QUESTIONS:
                raise RefusedError("too many questions", grpc.StatusCode.UNAVAILABLE)
            request = parse_question(data)
            claimed = request.worker_name
            if reason := self._endpoint.why_refused(context, claimed):
                raise RefusedError(reason)
            if request.group != self._group:
                raise RefusedError("it asks about a member of another job")
            vouches = await self._vouches(request.member_id)
        except RefusedError as refusal:
            self._endpoint.audit.deny("agent", refusal, peer=peer, worker=claimed)
            await context.abort(refusal.code, str(refusal))
            raise  # never reached: abort raises
        finally:
            self._questions -= 1
        return agent_pb2.VouchReply(vouches=vouches).SerializeToString()

    async def _vouches(self, wire_id: int) -> bool:
        if wire_id == self._peers.me.wire_id:
            return True
        peer = self._peers.by_id.get(wire_id)
        if peer is None:
            raise RefusedError("this worker does not know the member", grpc.StatusCode.UNAVAILABLE)
        if peer.link is None or peer.link.state is LinkState.UNCONNECTED:
            assert self.where is not None  # else nobody could ask
            # Whether the member answers, or cannot be asked from here.
            return await self._looks.run(partial(presence_of, peer.member, self.where)) is Presence.ALIVE
        return peer.link.state is not LinkState.LOST
