"""Groups of simulated workers: real logs, links, handshakes and evictions on a simulated clock and network.

All workers run on one thread and one event loop, whose time jumps to the next timer. Simulated are the network
(delays, hosts that are cut off), processes that end, and when the store can be reached. What the workers do about
it is decided by RosterLog, RosterFollower, Links, Evictions, Handshake and `greet`, as in an agent.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import grpc
from gradwire.c10d import HashStore
from gradwire.errors import LossCause, RpcTimeoutError, StoreNetworkError, WorkerSuspectError
from gradwire.net.security.audit import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.options import Liveness
from gradwire.rpc.contracts.worker import PROCESS_ENDED, Member, WorkerEnd, WorkerInfo, WorkerWatcher
from gradwire.rpc.grpc_backend import greet
from gradwire.rpc.membership.addresses import ListenAddress, Presence
from gradwire.rpc.membership.evictions import Evictions, Verdict, Vote, verdict_of
from gradwire.rpc.membership.roster import RosterFollower, RosterLog
from gradwire.rpc.peers.link import Links, LinkState
from gradwire.rpc.peers.peer import Peer, Peers
from gradwire.rpc.transports.grpc_endpoint import Handshake, RefusedError
from gradwire.rpc.transports.liveness import Reach

from tests.rpc.membership.virtual_time import VirtualTimeLoop
from tests.simulated_peers import SilentTransport, simulated_parts

LIVENESS = Liveness(heartbeat=1, suspect_after=5, lease=60)

MAX_DELAY_S = 0.05
"""Seconds that a message, or an operation of the store, takes at most."""


FIRST_RETRANSMISSION_S = 1.0
"""Seconds after which TCP sends again what opens a connection; the next time after twice as long, and so on."""


class _Endpoint:
    """What Handshake uses of an agent's endpoint, and Links of its address."""

    def __init__(self, worker: "SimulatedWorker") -> None:
        self.worker = worker
        self.audit = Audit(worker.info.name)

    def reach(self, address: str) -> str:
        return address

    def why_refused(self, _context: object, _name: str) -> str:
        return ""

    def clean_up(self, address: str) -> None:
        pass


class _Stream(SilentTransport):
    """A connection of one worker to another."""

    def __init__(self, worker: "SimulatedWorker", peer: Peer, _address: str) -> None:
        self._worker = worker
        self._peer = peer

    def connect(self) -> None:
        self._worker.group.dial(self._worker, self._worker.group.workers[self._peer.id])


class _Store:
    """The group's store as one worker reaches it."""

    def __init__(self, group: "SimulatedGroup", worker: "SimulatedWorker | None" = None) -> None:
        self._group = group
        self.worker = worker

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if self.worker is not None and not self.worker.is_plugged:
            raise StoreNetworkError("the host is cut off")
        self._group.store_operations += 1
        return getattr(self._group.store, operation)


class Greeting:
    """The answer of a member to a greeting. Waiting for it has the time of the group pass."""

    def __init__(self, worker: "SimulatedWorker", peer: WorkerInfo, seconds: float) -> None:
        self._loop = worker.group.loop
        self._peer = peer
        self._seconds = seconds
        self._deadline = self._loop.time() + seconds
        self.answer: asyncio.Future[None] = self._loop.create_future()
        worker.greetings[peer.wire_id] = self
        worker.peers.of(peer).transport.connect()

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        left = max(0.0, self._deadline - self._loop.time())
        self._loop.run_until_complete(asyncio.wait((self.answer,), timeout=left))
        callback(self)

    def wait(self) -> None:
        if not self.answer.done():
            raise RpcTimeoutError(self._peer.name, self._seconds)
        self.answer.result()


class SimulatedWorker(WorkerWatcher):
    """One incarnation of a worker: what an agent has for its membership, on the group's network."""

    def __init__(self, group: "SimulatedGroup", info: WorkerInfo, roster: RosterLog) -> None:
        self.group = group
        self.info = info
        self.roster = roster
        self.member = Member(info, f"worker:{info.wire_id}", device_count=0, network="simulated")
        self.control = self
        self.is_running = True
        self.is_plugged = True
        self.greetings: dict[int, Greeting] = {}
        self._handlers: dict[str, Callable[[WorkerInfo, Any], None]] = {}
        endpoint: Any = _Endpoint(self)
        self.peers = Peers(info)
        self.follower = RosterFollower(roster, self.peers, self.add, self.let_in, self)  # type: ignore[arg-type]
        self.handshake = Handshake(group.name, info, self.peers.by_id, self.follower.learn, endpoint)
        self.evictions = Evictions(
            group.loop,
            self,  # type: ignore[arg-type]
            self.peers,
            self.follower,
            LIVENESS.lease,
            None,  # type: ignore[arg-type] # `_is_agreed` below takes its place
        )
        self._parts = simulated_parts(
            partial(_Stream, self),
            links=Links(group.loop, LIVENESS, endpoint, self.evictions, (self,), self),  # type: ignore[arg-type]
        )

    def open(self) -> None:
        """Takes in the members of the log."""
        self.evictions.open(self)  # type: ignore[arg-type]
        self.follower.begin(self.roster.members())

    def end(self) -> None:
        """Ends the process, with all that it would do."""
        self.is_running = False
        self.follower.close()
        self.evictions.close()
        self.peers.close()

    def is_evicted(self) -> bool:
        """Returns whether it knows that it was evicted."""
        return any(peer.absence is not None and peer.absence.evicted for peer in self.peers.all())

    # An Executor.

    def submit_urgent(self, function: Callable[..., None], *args: Any) -> None:
        self.group.later(self, function, *args)

    # What changes with the members.

    def add(self, member: Member) -> None:
        self.peers.add(Peer(member, self._parts, is_me=member.info == self.info))

    def let_in(self) -> None:
        self.handshake.open(self.roster.version)

    # A WorkerWatcher, and an Executor for what it does not handle.

    def note_suspect(self, worker: WorkerInfo, reason: str) -> None:
        absence = self.peers.of(worker).absence
        if absence is None or not absence.waits:
            self._fail_greeting(worker, WorkerSuspectError(worker.name, reason))

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        self._fail_greeting(worker, end.as_error(worker.name))

    def submit(self, task: Callable[[], None]) -> None:
        self.group.later(self, task)

    def _fail_greeting(self, worker: WorkerInfo, error: Exception) -> None:
        greeting = self.greetings.get(worker.wire_id)
        if greeting is not None and not greeting.answer.done():
            greeting.answer.set_exception(error)

    # An agent, for `greet`, and its ControlMessages.

    def request(self, worker: WorkerInfo, request: Any) -> Greeting:
        return Greeting(self, worker, request.timeout)

    def on(self, kind: str, handler: Callable[[WorkerInfo, Any], None]) -> None:
        self._handlers[kind] = handler

    def send(self, worker: WorkerInfo, kind: str, payload: object) -> None:
        """Sends a control message, again and again while the other one is suspect."""
        if not self.is_running or self.peers.of(worker).end is not None:
            return
        target = self.group.workers[worker.wire_id]
        self.group.messages += 1
        if target.is_running and self.group.are_connected(self, target):
            self.group.later(target, target._handlers[kind], self.info, payload)
        else:
            self.group.loop.call_later(1.0, self.send, worker, kind, payload)

    # What comes by connections.

    async def on_hello(self, source: "SimulatedWorker", hello: agent_pb2.Hello) -> None:
        """Lets another worker in, or refuses it."""
        try:
            peer = self.peers.by_id.get(hello.worker_id)
            if peer is not None and peer.end is not None:
                raise RefusedError(f"it has given this worker up: {peer.end.reason}")
            worker = await self.handshake.admit(hello, None)
        except RefusedError as refusal:
            self.group.answer(self, source, source.on_refusal, self.info, refusal)
            return
        self._connect(worker)
        self.group.answer(self, source, source.on_welcome, self.info)

    def on_refusal(self, peer: WorkerInfo, refusal: RefusedError) -> None:
        if refusal.code is grpc.StatusCode.FAILED_PRECONDITION:
            self.peers.of(peer).on_closed(WorkerEnd(LossCause.REFUSED, str(refusal)))
        else:
            self.on_break(peer)

    def on_welcome(self, peer: WorkerInfo) -> None:
        self._connect(peer)
        greeting = self.greetings.get(peer.wire_id)
        if greeting is not None and not greeting.answer.done():
            self.group.messages += 2  # the greeting and its answer
            greeting.answer.set_result(None)

    def on_break(self, peer: WorkerInfo, why: str = "the connection broke") -> None:
        """Handles the end of a connection, or of an attempt to make one."""
        if self.is_running:
            self.peers.of(peer).on_broken(WorkerEnd(LossCause.DISCONNECTED, why), ())

    def _connect(self, peer: WorkerInfo) -> None:
        if self.is_connected(peer):
            self.on_break(peer, "it has connected again")
        self.peers.of(peer).on_opened()

    def is_connected(self, worker: WorkerInfo) -> bool:
        """Returns whether there is a connection to another worker."""
        return worker.wire_id in self.peers.by_id and self.peers.of(worker).is_connected


class SimulatedGroup:
    """A group of workers, its network and its store."""

    def __init__(self, seed: int, size: int = 0) -> None:
        """Makes a dynamic group without members, or a static one in which nobody is connected.

        Args:
            seed: of the delays, and of other choices.
            size: the number of ranks of a static group; 0 for a dynamic group.
        """
        self.chance = random.Random(seed)
        self.loop = VirtualTimeLoop()
        self.store = HashStore()
        self.name = f"simulated-{seed}"
        self.workers: dict[int, SimulatedWorker] = {}
        """All incarnations there have been, by wire id."""
        self.messages = 0
        self.store_operations = 0
        self.size = size
        infos = [WorkerInfo(f"worker{rank}", rank) for rank in range(size)]
        first = [self._make(info) for info in infos]
        members = [worker.member for worker in first]
        for worker in first:
            worker.roster.begin(members)
            worker.open()
            worker.let_in()
        self._first = members

    def _make(
        self, info: WorkerInfo, roster: RosterLog | None = None, store: _Store | None = None
    ) -> SimulatedWorker:
        store = store or _Store(self)
        worker = SimulatedWorker(self, info, roster or self._log(store))
        store.worker = worker
        self.workers[info.wire_id] = worker
        return worker

    def _log(self, store: _Store) -> RosterLog:
        return RosterLog(store, self.name if self.size else "")  # type: ignore[arg-type]

    @contextlib.contextmanager
    def installed(self) -> "Iterator[SimulatedGroup]":
        """Context manager in which probes and questions of this process go by the simulated network."""
        with (
            patch("gradwire.rpc.peers.link.probe", self._probe),
            patch("gradwire.rpc.peers.link.probe_now", self._probe_now),
            patch("gradwire.rpc.grpc_backend.presence_of", self._presence),
            patch.object(Evictions, "_is_agreed", lambda each, peer: self._is_agreed(each, peer)),
        ):
            asyncio.set_event_loop(self.loop)
            try:
                yield self
            finally:
                for worker in self.workers.values():
                    worker.end()
                self.pass_time(1.0)
                asyncio.set_event_loop(None)
                self.loop.close()

    @property
    def living(self) -> list[SimulatedWorker]:
        """The workers whose processes run, by wire id."""
        return [worker for worker in self.workers.values() if worker.is_running]

    def pass_time(self, seconds: float) -> None:
        """Has seconds pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    # The network.

    def delay(self) -> float:
        return self.chance.uniform(0.0001, MAX_DELAY_S)

    def later(self, worker: SimulatedWorker, function: Callable[..., object], *args: Any) -> None:
        """Has a worker do something after a delay, if its process still runs."""
        self.loop.call_later(self.delay(), lambda: function(*args) if worker.is_running else None)

    def reaches(self, one: SimulatedWorker, other: SimulatedWorker) -> bool:
        return one.is_plugged and other.is_plugged

    def are_connected(self, one: SimulatedWorker, other: SimulatedWorker) -> bool:
        return self.reaches(one, other) and one.is_connected(other.info) and other.is_connected(one.info)

    def dial(self, source: SimulatedWorker, target: SimulatedWorker) -> None:
        """Has a worker connect to another one."""
        self.messages += 1
        if not self.reaches(source, target):
            self.loop.call_later(LIVENESS.suspect_after, source.on_break, target.info, "it does not answer")
        elif not target.is_running:
            self.later(source, source.on_break, target.info, "nobody listens")
        else:
            hello = agent_pb2.Hello()
            hello.CopyFrom(source.handshake.hello)
            self.later(target, lambda: self.loop.create_task(target.on_hello(source, hello)))

    def answer(
        self, source: SimulatedWorker, target: SimulatedWorker, function: Callable[..., object], *args: Any
    ) -> None:
        self.messages += 1
        if self.reaches(source, target):
            self.later(target, function, *args)

    def unplug(self, worker: SimulatedWorker) -> None:
        """Cuts a worker off: from the others, and from the store."""
        worker.is_plugged = False
        for other in self.living:
            if other is not worker and worker.info.wire_id in other.peers.by_id:
                silent = f"nothing has come from it for {LIVENESS.suspect_after} s"
                if other.is_connected(worker.info):
                    self.loop.call_later(LIVENESS.suspect_after, self._break, other, worker, silent)
                if other.info.wire_id in worker.peers.by_id:
                    self.loop.call_later(LIVENESS.suspect_after, self._break, worker, other, silent)

    def _break(self, one: SimulatedWorker, other: SimulatedWorker, why: str) -> None:
        if not self.reaches(one, other) and one.is_connected(other.info):
            one.on_break(other.info, why)

    def plug_in(self, worker: SimulatedWorker) -> None:
        """Ends what `unplug` began."""
        worker.is_plugged = True

    def _probe_now(self, reach: Any, address: str) -> Reach:
        source = reach.__self__.worker
        target = self.workers[int(address.partition(":")[2])]
        if not self.reaches(source, target):
            return Reach.UNKNOWN
        return Reach.LISTENING if target.is_running else Reach.GONE

    async def _probe(self, _loop: object, reach: Any, address: str, seconds: float) -> Reach:
        end, pause = self.loop.time() + seconds, FIRST_RETRANSMISSION_S
        while (found := self._probe_now(reach, address)) is Reach.UNKNOWN and (left := end - self.loop.time()) > 0:
            await asyncio.sleep(min(pause, left))
            pause *= 2
        await asyncio.sleep(self.delay())
        return found

    def _presence(self, member: Member, _where: object) -> Presence:
        target = self.workers[member.info.wire_id]
        if not target.is_plugged:
            return Presence.SILENT
        return Presence.ALIVE if target.is_running else Presence.GONE

    def _is_agreed(self, evictions: Evictions, peer: WorkerInfo) -> bool:
        """Asks all others about a member, as evictions.py does, but at one moment."""
        me = self.workers[evictions._peers.me.wire_id]
        verdict = verdict_of(
            self._vote(me, self.workers[member.info.wire_id], peer)
            for member in me.roster.members()
            if member.info not in (me.info, peer)
        )
        if verdict is Verdict.UNDECIDED:
            raise RuntimeError("too few members could be asked")
        return verdict is Verdict.SILENT

    def _vote(self, me: SimulatedWorker, other: SimulatedWorker, peer: WorkerInfo) -> Vote:
        self.messages += 2
        if not self.reaches(me, other):
            return Vote.ABSENT
        if not other.is_running:
            return Vote.GONE
        if peer.wire_id not in other.peers.by_id:
            return Vote.ABSENT
        link = other.peers.of(peer).link
        state = link.state if link is not None else LinkState.CONNECTED
        if state is LinkState.UNCONNECTED:
            alive = self.reaches(other, self.workers[peer.wire_id]) and self.workers[peer.wire_id].is_running
            return Vote.VOUCHES if alive else Vote.DENIES
        return Vote.DENIES if state is LinkState.LOST else Vote.VOUCHES

    # What happens to workers.

    def kill(self, worker: SimulatedWorker) -> None:
        """Ends a process without a word."""
        self._end(worker, lambda other: other.on_break(worker.info, "the connection broke"))

    def leave(self, worker: SimulatedWorker) -> None:
        """Has a worker of a dynamic group shut down."""
        worker.roster.leave(worker.info.wire_id)
        end = WorkerEnd(LossCause.SHUTDOWN, "it has shut down")
        self._end(worker, lambda other: other.peers.of(worker.info).on_closed(end))

    def _end(self, worker: SimulatedWorker, notify: Callable[[SimulatedWorker], None]) -> None:
        connected = [other for other in self.living if other is not worker and self.are_connected(worker, other)]
        worker.end()
        for other in connected:
            self.messages += 1
            self.later(other, notify, other)

    def enter(self, name: str, rank: int = -1) -> SimulatedWorker:
        """Has a worker append its join to the log; `greet` is what it does next."""
        store = _Store(self)
        roster = self._log(store)
        if self.size:
            roster.begin(self._first)
        while True:
            roster.catch_up()
            namesake = None if self.size else roster.find(name)
            if namesake is not None and self._presence(namesake, None) is Presence.GONE:
                roster.leave(namesake.info.wire_id, PROCESS_ENDED.reason)
            info = roster.choose(name, rank)
            member = Member(info, f"worker:{info.wire_id}", device_count=0, network="simulated")
            if roster.join(member):
                return self._make(info, roster, store)

    def greet(self, worker: SimulatedWorker) -> None:
        """Has a worker that is in the log make itself known to the members, while time passes."""
        worker.open()
        worker.let_in()
        greet(worker, worker.roster, ListenAddress(None), float("inf"))  # type: ignore[arg-type]

    def join(self, name: str, rank: int = -1) -> SimulatedWorker:
        """Has a worker join, or take its place again."""
        worker = self.enter(name, rank)
        self.greet(worker)
        return worker
