"""Stores and members that do not answer for long: they keep one thread, and nobody else, waiting."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire.c10d import HashStore
from gradwire.net.event_loop import acquire_event_loop
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.worker import Member, RosterVersion, WorkerInfo
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.membership import evictions
from gradwire.rpc.membership.addresses import Presence
from gradwire.rpc.membership.evictions import Evictions, Verdict, Vouching
from gradwire.rpc.membership.roster import RosterError, RosterFollower, RosterLog
from gradwire.rpc.peers.peer import Peers
from gradwire.rpc.transports.grpc_endpoint import Handshake

from tests.remote_functions import wait_until
from tests.simulated_peers import silent_peer

ME, PEER, NEW = (WorkerInfo(name, number) for number, name in enumerate(("me", "peer", "new")))


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor(2, "test")
    yield made
    assert made.close(20)


class Hanging:
    """Stands for a call that does not return before it may."""

    def __init__(self) -> None:
        self.calls = self.blocked = self.most_blocked = 0
        self.may_return = threading.Event()
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.calls += 1
            self.blocked += 1
            self.most_blocked = max(self.most_blocked, self.blocked)
        assert self.may_return.wait(30)
        with self._lock:
            self.blocked -= 1


async def until(condition: Any) -> None:
    await asyncio.to_thread(wait_until, condition)


def member(info: WorkerInfo) -> Member:
    return Member(info, f"127.0.0.1:{1000 + info.id}", 0)


def follower(
    log: RosterLog, executor: Executor, let_in: Any = lambda: None, peers: Peers | None = None
) -> RosterFollower:
    known = peers or Peers(ME, dynamic=True)
    return RosterFollower(log, known, lambda new: known.add(silent_peer(new.info)), let_in, executor)


class HangingStore(HashStore):
    """A store that answers no question before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = Hanging()

    def check(self, keys: Any) -> bool:
        self.hanging.wait()
        return super().check(keys)


def test_a_member_is_let_in_while_the_store_hangs(executor):
    store = HangingStore()
    store.hanging.may_return.set()
    log, others = RosterLog(store), RosterLog(store)
    assert others.join(member(PEER))
    assert others.join(member(NEW))
    store.hanging.may_return.clear()
    followed = threading.Event()

    async def check() -> None:
        updates = follower(log, executor, followed.set)
        endpoint: Any = SimpleNamespace(audit=None, why_refused=lambda *_: "")
        members: Any = {PEER.id: SimpleNamespace(info=PEER)}
        handshake = Handshake("g", ME, members, updates.learn, endpoint)
        handshake.open(RosterVersion())

        def hello_of(worker: WorkerInfo) -> agent_pb2.Hello:
            hello = agent_pb2.Hello()
            hello.CopyFrom(handshake.hello)
            hello.worker_id, hello.worker_name = worker.id, worker.name
            hello.roster.length, hello.roster.digest = others.version.length, others.version.digest
            return hello

        for _ in range(3):
            assert await asyncio.wait_for(handshake.admit(hello_of(PEER), None), 10) == PEER
        await until(lambda: store.hanging.blocked == 1)
        # Who is no member has to wait for the store, and gives up at some time.
        attempts = [asyncio.ensure_future(handshake.admit(hello_of(NEW), None)) for _ in range(3)]
        await asyncio.sleep(0)
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        members[NEW.id] = SimpleNamespace(info=NEW)
        last = asyncio.ensure_future(updates.learn(others.version))
        await asyncio.sleep(0)
        store.hanging.may_return.set()
        await last

    asyncio.run(check())
    assert followed.is_set()
    assert log.version == others.version
    assert store.hanging.most_blocked == 1


def test_reads_whose_callers_gave_up_do_not_pile_up(executor):
    """Each of them would keep one more thread waiting for the store."""
    store = HangingStore()

    async def check() -> None:
        updates = follower(RosterLog(store), executor)
        for _ in range(3):
            reading = asyncio.ensure_future(updates.learn(RosterVersion(5)))
            await until(lambda: store.hanging.blocked)
            await asyncio.sleep(0.05)  # in which another thread would begin
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        store.hanging.may_return.set()

    asyncio.run(check())
    wait_until(lambda: not store.hanging.blocked)
    assert store.hanging.most_blocked == 1


def test_a_question_that_is_cancelled_leaves_its_look_in_place(executor, monkeypatch, caplog):
    """The look ended with an InvalidStateError, and the next one began beside it."""
    looking = Hanging()

    def look(*_: object) -> Presence:
        looking.wait()
        return Presence.ALIVE

    monkeypatch.setattr(evictions, "presence_of", look)
    endpoint: Any = SimpleNamespace(
        on_stream=lambda _: "peer", why_refused=lambda *_: "", audit=SimpleNamespace(deny=lambda *_, **__: None)
    )
    peers: Any = SimpleNamespace(me=ME, by_id={PEER.id: SimpleNamespace(link=None, member=member(PEER))})
    question = agent_pb2.VouchRequest(group="g", worker_name="new", member_id=PEER.id).SerializeToString()

    async def check() -> None:
        asked = Vouching("g", endpoint, peers, executor)
        asked.where = SimpleNamespace()  # type: ignore[assignment]
        first, second = (asyncio.ensure_future(asked.serve(question, None)) for _ in range(2))
        await until(lambda: looking.calls == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.05)  # in which the second look would begin
        looking.may_return.set()
        assert agent_pb2.VouchReply.FromString(await second).vouches

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())
    assert (looking.calls, looking.most_blocked) == (2, 1)
    assert not caplog.records


def test_no_thread_waits_for_others_after_the_end(executor):
    """It would wait for as long as they may take to say what they know of a member."""
    asked, cancelled = threading.Event(), threading.Event()

    async def never(*_: object) -> Verdict:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return Verdict.SILENT

    store = HashStore()
    log = RosterLog(store)
    for info in (ME, PEER, NEW):
        assert log.join(member(info))
    peers = Peers(ME, dynamic=True)
    for info in (ME, PEER):
        peers.add(silent_peer(info))
    events = acquire_event_loop()

    async def close() -> None:
        asking.close()

    try:
        asking = Evictions(events.loop, executor, peers, follower(log, executor, peers=peers), 1000.0, never)
        asking.open(SimpleNamespace(on=lambda *_: None))  # type: ignore[arg-type]
        asking.evict(PEER, "it was silent")
        assert asked.wait(20)
        events.run(close())
        assert cancelled.wait(20)
        assert executor.close(20)
        assert log.has(PEER.wire_id)
    finally:
        events.release()


def test_a_change_that_is_told_during_a_read_that_fails_is_read(executor):
    """It was forgotten, until another one was told."""
    log, reads = RosterLog(HashStore()), []

    def catch_up() -> None:
        reads.append(None)
        if len(reads) == 1:
            following.read()
            raise RosterError("the snapshot of the roster is refused")

    log.catch_up = catch_up  # type: ignore[method-assign]
    events = acquire_event_loop()
    try:
        peers = Peers(ME, dynamic=True)
        following = Evictions(
            events.loop,
            executor,
            peers,
            follower(log, executor, peers=peers),
            1000.0,
            None,  # type: ignore[arg-type] # nobody is evicted
        )
        following.read()
        wait_until(lambda: len(reads) == 2 and not following._is_reading)
    finally:
        events.release()
