"""Evicts the members that have not come back: writes that into the log of the group, when others agree.

A control message tells the others, which read the log then.

Before a worker evicts a member to which it has never been connected, the other members are asked about it: one
that cannot reach a member does not know whether the member is dead or only out of its reach. The member stays if
one of them is connected to it, or may be connected again, or gets an answer from it; and also unless more than
half of the others can be asked.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar, final

import grpc
from google.protobuf.message import DecodeError

from ...net.event_loop import acquire_event_loop
from ...proto.v1 import agent_pb2
from ..contracts.agent import ControlMessages
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import Member, WorkerInfo
from ..execution.executor import Executor, SerialCalls
from ..peers.link import LinkState
from ..peers.peer import Peers
from ..transports.grpc_endpoint import VOUCH_METHOD, GrpcEndpoint, RefusedError
from ..transports.liveness import Reach, probe
from .addresses import ListenAddress, Presence, presence_of
from .roster import RosterError, RosterFollower

__all__ = [
    "CONTROL_KINDS",
    "Evictions",
    "Verdict",
    "Vote",
    "Vouching",
    "ask_before_joining",
    "parse_question",
    "tell_of_change",
    "verdict_of",
]

ROSTER_CHANGED = "roster.changed"
"""Says that the log of the group has another entry. It does not say which: its receiver reads the store."""

CONTROL_KINDS = (ROSTER_CHANGED,)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Seconds between attempts while the store does not answer: doubled from the first to the longest."""

VERDICT_TIMEOUT_S = 600.0
"""Seconds that the other members may take to say what they know of one, in sum."""

TICK_S = 15.0
"""Seconds between looks at the clock, unless a quarter of the lease is shorter."""

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

T = TypeVar("T")

_Step = Callable[[bool], None]
"""Reads the store or writes to it, on a thread of the executor; takes whether it has been tried before."""

log = logging.getLogger(__name__)


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


async def _ask(
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
    """Asks members about another one, on behalf of a worker of this name that is none yet, and waits for that."""
    events = acquire_event_loop()
    try:
        endpoint = GrpcEndpoint(name, options.find_credentials(), options.liveness)
        endpoint.reach = where.reach
        try:
            return events.run(_ask(endpoint, group, name, worker, others))
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

    def __init__(self, group: str, endpoint: GrpcEndpoint, peers: Peers, executor: Executor) -> None:
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
        return await _ask(self._endpoint, self._group, self._peers.me.name, worker, others)

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


def tell_of_change(control: ControlMessages, workers: Iterable[WorkerInfo]) -> None:
    """Tells workers that the log of the group has changed, which they then read."""
    for worker in workers:
        control.send(worker, ROSTER_CHANGED, None)


@final
class Evictions:
    """The evictions by one agent, and its copy of the log.

    What cannot be done because the store, or too many members, do not answer is tried again and again, by timers
    of the event loop, until `close`. After a time in which this process was stopped, the log is read: this worker
    may have been evicted, and may know nobody who would tell it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        peers: Peers,
        follower: RosterFollower,
        lease: float,
        ask_others: Callable[[WorkerInfo, Sequence[Member]], Coroutine[Any, Any, Verdict]],
    ) -> None:
        """Evicts nobody yet.

        `lease` is the time in seconds after which a suspect worker may be evicted. `ask_others` asks about a
        member to which this worker has never been connected.
        """
        self._loop = loop
        self._executor = executor
        self._peers = peers
        self._follower = follower
        self._roster = follower.roster
        self._tick_s = min(TICK_S, lease / 4)
        self._ask_others = ask_others
        self._control: ControlMessages
        self._retries: set[asyncio.TimerHandle] = set()
        """Used on the event loop."""
        self._questions: set[concurrent.futures.Future[Verdict]] = set()
        """Those for which threads of the executor wait, which has to end after `close`."""
        self._ticking: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._is_reading = False
        """Whether the log is being read, or will be when the store answers. Guarded by the lock."""
        self._is_stale = False
        """Whether it has to be read again then. Guarded by the lock."""

    def open(self, control: ControlMessages) -> None:
        """Listens to what other workers tell from now on, and tells them."""
        self._control = control
        control.on(ROSTER_CHANGED, lambda _sender, _payload: self.read())
        self._call_soon(self._tick, self._loop.time())

    def close(self) -> None:
        """Tries nothing again. Called on the event loop."""
        self._is_closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        for retry in self._retries:
            retry.cancel()
        self._retries.clear()
        for question in self._questions.copy():
            question.cancel()

    def evict(self, peer: WorkerInfo, reason: str) -> None:
        """Evicts a worker as soon as the store answers, unless it or this one is a member no more. Never waits.

        A worker to which this one has never been connected stays if others vouch for it.
        """
        self._executor.submit_urgent(self._run, partial(self._evict, peer, reason), 0.0)

    def read(self) -> None:
        """Has the log read to its end, as soon as the store answers. Called on any thread, and never waits."""
        with self._lock:
            self._is_stale = self._is_reading
            if self._is_reading:
                return
            self._is_reading = True
        self._executor.submit_urgent(self._run, self._read, 0.0)

    # On threads of the executor.

    def _run(self, step: _Step, pause: float) -> None:
        """Takes a step, again after a pause if the store does not answer; `pause` is the last one, in seconds."""
        try:
            step(pause > 0)
        except RosterError as error:  # which no attempt would change
            log.warning("the log of the group cannot be followed: %s", error)
        except concurrent.futures.CancelledError:
            pass  # of a question, by `close`
        except Exception as error:  # of the store, for the most part
            if not pause:
                log.warning("the membership of the group cannot be changed or read yet: %s", error)
            self._call_soon(self._retry, step, min(MAX_PAUSE_S, 2 * pause) or FIRST_PAUSE_S)
        else:
            self._call_soon(self._follower.follow)

    def _evict(self, peer: WorkerInfo, reason: str, again: bool) -> None:
        self._roster.catch_up()
        is_stranger = not self._peers.of(peer).has_connected and self._roster.has(peer.wire_id)
        if is_stranger and not self._is_agreed(peer):
            return
        has_evicted = self._roster.evict(peer.wire_id, reason, self._peers.me.wire_id)
        if has_evicted or again:  # the store may have done it before, and not have answered
            tell_of_change(self._control, self._peers.connected())

    def _is_agreed(self, peer: WorkerInfo) -> bool:
        """Returns whether no other member vouches for one. Raises RuntimeError if too few can be asked."""
        others = [member for member in self._roster.members() if member.info not in (peer, self._peers.me)]
        question = asyncio.run_coroutine_threadsafe(self._ask_others(peer, others), self._loop)
        self._questions.add(question)
        try:
            if self._is_closed:  # before it was there to be found
                question.cancel()
            verdict = question.result(VERDICT_TIMEOUT_S)
        finally:
            question.cancel()
            self._questions.discard(question)
        if verdict is Verdict.UNDECIDED:
            raise RuntimeError(f"too few members could be asked whether {peer.name!r} lives")
        if verdict is Verdict.STAYS:
            log.warning(
                "worker %s stays in the group: it is out of reach from here, but not for others", peer.name
            )
        return verdict is Verdict.SILENT

    def _read(self, _again: bool) -> None:
        while True:
            try:
                self._roster.catch_up()
            except RosterError:  # it is not tried again by itself
                if self._end_reading():
                    raise
            else:
                if self._end_reading():
                    return

    def _end_reading(self) -> bool:
        """Returns whether the log has been read to its end; else there is more of it, which has to be read."""
        with self._lock:
            self._is_reading, self._is_stale = self._is_stale, False
            return not self._is_reading

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    # On the event loop.

    def _tick(self, before: float) -> None:
        """Reads the log if this process was stopped since the last tick; `before` is the time of that."""
        if self._is_closed:
            return
        now = self._loop.time()
        if now - before > 2 * self._tick_s:
            self.read()
        self._ticking = self._loop.call_later(self._tick_s, self._tick, now)

    def _retry(self, step: _Step, pause: float) -> None:
        if self._is_closed:
            return

        def submit() -> None:
            self._retries.discard(retry)
            self._executor.submit_urgent(self._run, step, pause)

        retry = self._loop.call_later(pause, submit)
        self._retries.add(retry)
