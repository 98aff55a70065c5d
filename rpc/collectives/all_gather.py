"""Values of several workers, brought together at one of them and handed back to all.

The living member with the lowest id leads: the others send it their value in a request that it answers when
it has everybody's. A member that dies drops out of the gathering; when the leader dies the next one leads.

Workers that gather often do so through a process group (gather_paths.py says when). That is fast, but if a member
dies it may go well for some of the others only. In the same way a leader may die when it has told its result to
some. In both cases the others come to a (later) leader, and say that the round was tried before.
These two rules make all living members get the same:

- A member takes the group's result, or gives the group up and then comes to a leader with its value: never both. A
  leader waits for all who live, so it makes no result of its own while a living member has another.
- Nor does it wait in vain: of a round that was tried before it asks those that have not come for the result. Who
  has it tells it at once, and who gets it later, then.
"""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch

from ...errors import RpcError, RpcTimeoutError, SerializationError, WorkerLostError
from ..contracts.messages import Deferred, Handler, Incoming, MessageType, Request
from ..contracts.worker import WorkerInfo
from .all_gather_group import AllGatherGroup
from .group_rounds import NO_STATUS, GroupRounds, MemberStatus, NextRound, plan_next_round

if TYPE_CHECKING:
    from ..contracts.agent import RpcAgent

__all__ = ["WARN_INTERVAL_S", "AllGatherService", "Outcome", "ValueCodec"]

Key = tuple[str, int, tuple[int, ...]]
"""Topic, number of the round, and ids of the members."""

GROUP_TOPIC = "user"
"""Of gatherings that go through groups."""

WARN_INTERVAL_S = 10.0
"""How long a worker waits before it says for whom, and again after as long."""

STATUS_TIMEOUT_S = 2.0
"""How long the leader may take to tell who is missing."""

MAX_GROUP_WAIT_S = 24 * 3600.0
"""Seconds for which a group waits if there is no timeout; after that, the members go on waiting by messages."""

ASK = "all_gather.ask"
TELL = "all_gather.tell"
CONTROL_KINDS = (ASK, TELL)
"""Kinds of control messages: what came out of a round? This."""

REQUEST_PARTS = ("the topic", "the number", "the members", "obj", "the standing", "the attempt")
"""The items of a GATHER request, in words."""

log = logging.getLogger(__name__)


class ValueCodec(Protocol):
    """Turns values into bytes for several workers, and back."""

    def flatten(self, value: object, what: str, worker: WorkerInfo) -> memoryview | None:
        """Returns a value as bytes; None if it can only travel in a message. Raises SerializationError.

        Args:
            value: anything that pickles.
            what: the value's name in errors.
            worker: one of the receivers.
        """

    def unflatten(self, data: bytes | bytearray) -> Any:
        """Returns the value that was flattened."""


class Outcome(NamedTuple):
    """What came out of a round."""

    values: Mapping[int, Any]
    """By worker id."""
    plan: NextRound
    flat: bool = False
    """Did they come through a group? They are flat then."""


class _OpenRound:
    """One gathering, at its leader."""

    def __init__(self, members: Sequence[int]) -> None:
        self.expected = set(members)
        self.values: dict[int, Any] = {}
        self.statuses: dict[int, MemberStatus] = {}
        self.answers: list[Future[Outcome]] = []
        self.asked = False
        """Have those that had not come been asked what came out of it?"""

    @property
    def complete(self) -> bool:
        """Has everybody come?"""
        return self.expected <= self.values.keys()

    def outcome(self, number: int) -> Outcome:
        """What comes out of it if this is all."""
        return Outcome(self.values, plan_next_round(number, self.statuses.values()))


@final
class AllGatherService:
    """Runs the all_gathers that one agent takes part in."""

    def __init__(self, agent: "RpcAgent", codec: ValueCodec) -> None:
        """Args: agent: the agent of this worker. codec: turns values into bytes and back."""
        self._agent = agent
        self._codec = codec
        self._lock = threading.Lock()
        self._turns: dict[tuple[str, tuple[int, ...]], threading.Lock] = defaultdict(threading.Lock)
        """Of each gathering: held while it goes through a round."""
        self._rounds: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        """Of each gathering: how many there have been. Changed with its turn."""
        self._open: dict[Key, _OpenRound] = {}
        self._finished: dict[tuple[str, tuple[int, ...]], tuple[int, Outcome]] = {}
        """The last round of each gathering whose outcome is known here."""
        self._askers: dict[Key, set[int]] = {}
        """Leaders that want to know what comes out of a round."""
        self.paths = GroupRounds(agent.info.id, agent.options.all_gather, agent.options.channels.max_payload_bytes)
        """Which way those of users go."""
        agent.control.on(ASK, self._asked)
        agent.control.on(TELL, lambda _worker, what: self._finish(*what))

    def all_gather(
        self,
        topic: str,
        value: object,
        members: Sequence[WorkerInfo],
        timeout: float,
        operation: str = "all_gather",
        still_waiting: Callable[[Sequence[str]], None] | None = None,
    ) -> dict[int, Any]:
        """The values of all living members, by worker id: see `RpcAgent.all_gather`.

        `still_waiting` is called every now and then with the names of those that are missing; by default that is
        logged.
        """
        if still_waiting is None:
            still_waiting = partial(self._log_wait, operation)
        by_id = {worker.id: worker for worker in sorted(members, key=lambda worker: worker.id)}
        ids = tuple(by_id)
        deadline = time.monotonic() + timeout if timeout else None
        with self._turn(topic, ids, timeout, operation) as number:
            try:
                outcome = self._go_through((topic, number, ids), value, by_id, timeout, deadline, still_waiting)
            except RpcTimeoutError as error:
                raise RpcTimeoutError(error.worker, timeout, f"{operation} waits for") from None
        if not outcome.flat:
            return dict(outcome.values)
        return {identifier: self._codec.unflatten(flat) for identifier, flat in outcome.values.items()}

    @contextlib.contextmanager
    def _turn(self, topic: str, ids: tuple[int, ...], timeout: float, operation: str) -> Iterator[int]:
        """The number of the next round, which begins when the one before is over on this worker.

        So who is in a round needs no result older than that of the round before.
        """
        with self._lock:
            turn = self._turns[topic, ids]
        with self._agent.blocking():
            if not turn.acquire(timeout=timeout or -1):
                what = f"{operation} waits for an earlier collective among the same workers to end on"
                raise RpcTimeoutError(self._agent.info.name, timeout, what)
        try:
            number = self._rounds[topic, ids]
            self._rounds[topic, ids] += 1
            yield number
        finally:
            turn.release()

    def _go_through(
        self,
        key: Key,
        value: object,
        members: Mapping[int, WorkerInfo],
        timeout: float,
        deadline: float | None,
        still_waiting: Callable[[Sequence[str]], None],
    ) -> Outcome:
        """What comes out of a round, on the way that it goes."""
        topic, number, ids = key
        tried = False
        outcome = None
        if topic == GROUP_TOPIC and (group := self.paths.begin(ids, number)) is not None:
            tried, outcome = self._through_group(group, key, value, members, deadline)
        while outcome is None:
            outcome = self._by_messages(key, value, members, tried, timeout, deadline, still_waiting)
            tried = True
        if topic == GROUP_TOPIC:
            self.paths.apply_result(ids, number, tuple(sorted(outcome.values)), outcome.plan)
        return outcome

    def _through_group(
        self,
        group: AllGatherGroup,
        key: Key,
        value: object,
        members: Mapping[int, WorkerInfo],
        deadline: float | None,
    ) -> tuple[bool, Outcome | None]:
        """Has a round been tried, and its outcome if it went through the group."""
        with self._not_begun(key):
            flat = self._codec.flatten(value, "obj", members[self._leader(key)])
        # The other half of the time is for going by messages, and for finding out who is missing.
        seconds = (deadline - time.monotonic()) / 2 if deadline is not None else MAX_GROUP_WAIT_S
        try:
            with self._agent.blocking():
                values = group.all_gather(key[1], flat, seconds)
        except Exception as error:
            log.debug("worker %s gathers by messages: %s", self._agent.info.name, error)
            self.paths.abandon(key[2])
            return True, None
        if values is None:
            return False, None
        outcome = Outcome(values, NextRound(group.generation, formed=True), flat=True)
        self._finish(key, outcome)
        return True, outcome

    def _by_messages(
        self,
        key: Key,
        value: object,
        members: Mapping[int, WorkerInfo],
        tried: bool,
        timeout: float,
        deadline: float | None,
        still_waiting: Callable[[Sequence[str]], None],
    ) -> Outcome | None:
        """The outcome of a round as the leader tells it; None if the leader is lost."""
        leader = self._leader(key)
        if leader == self._agent.info.id:
            for worker in members.values():
                if worker.id != leader:
                    self._agent.connect(worker)
        topic, number, ids = key
        status = self.paths.status(ids) if topic == GROUP_TOPIC else NO_STATUS
        body = (topic, number, ids, value, status, tried)
        left = max(1e-3, deadline - time.monotonic()) if deadline is not None else 0.0
        with self._lock:
            self._askers.get(key, set()).discard(leader)  # it gets this value, and so needs no result
        with self._not_begun(key):
            future = self._agent.request(
                members[leader], Request(MessageType.ALL_GATHER, body, timeout=left, what=REQUEST_PARTS)
            )
        try:
            while not self._wait(future):
                still_waiting(self._ask_who_is_missing(members, leader, key))
            outcome: Outcome = future.wait()
        except WorkerLostError:
            return None
        except RpcTimeoutError:
            missing = self._ask_who_is_missing(members, leader, key)
            raise RpcTimeoutError(", ".join(missing), timeout) from None
        self._finish(key, outcome)
        return outcome

    @contextlib.contextmanager
    def _not_begun(self, key: Key) -> Iterator[None]:
        """Who cannot send its value is in this round still, for nobody has heard of it."""
        try:
            yield
        except SerializationError:
            topic, _, ids = key
            self._rounds[topic, ids] -= 1
            raise

    def _log_wait(self, operation: str, names: Sequence[str]) -> None:
        log.info("%s of worker %s waits for %s", operation, self._agent.info.name, ", ".join(names))

    def _leader(self, key: Key) -> int:
        return next(i for i in key[2] if i == self._agent.info.id or self._agent.end_of(i) is None)

    def _wait(self, future: torch.futures.Future[Any]) -> bool:
        """Waits for a future, but not for longer than patience lasts; is it done?"""
        done = threading.Event()
        future.add_done_callback(lambda _future: done.set())
        with self._agent.blocking():
            return done.wait(WARN_INTERVAL_S)

    def _ask_who_is_missing(self, members: Mapping[int, WorkerInfo], leader: int, key: Key) -> list[str]:
        """The names of those that have not come, as far as the leader tells."""
        try:
            asked = self._agent.request(
                members[leader], Request(MessageType.ALL_GATHER_STATUS, key, timeout=STATUS_TIMEOUT_S)
            )
            missing: Sequence[int] = asked.wait()
        except RpcError:
            missing = [leader]
        return [members[identifier].name for identifier in missing]

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Gathering, and asking how far it is."""
        return {
            MessageType.ALL_GATHER: Handler(
                self._handle, description="the value for a collective, sent to worker"
            ),
            MessageType.ALL_GATHER_STATUS: Handler(
                self._tell_who_is_missing, description="the question who is missing in a collective, to worker"
            ),
        }

    def on_worker_lost(self, worker: WorkerInfo) -> None:
        """Nobody waits for a dead member."""
        self.paths.on_worker_lost(worker.id)
        with self._lock:
            for open_round in self._open.values():
                open_round.expected.discard(worker.id)
        self._complete()

    def _tell_who_is_missing(self, message: Incoming) -> list[int]:
        topic, number, ids = message.value
        with self._lock:
            open_round = self._open.get((topic, number, tuple(ids)))
            return [] if open_round is None else sorted(open_round.expected - open_round.values.keys())

    def _handle(self, message: Incoming) -> Deferred:
        topic, number, ids, value, status, tried = message.value
        answer: Future[Outcome] = Future()
        key = (topic, number, ids)
        with self._lock:
            if (known := self._outcome_of(key)) is not None:
                answer.set_result(known)
                return Deferred(answer)
            open_round = self._open.get(key)
            if open_round is None:
                open_round = self._open[key] = _OpenRound(ids)
            open_round.values[message.source.id] = value
            open_round.statuses[message.source.id] = status
            open_round.answers.append(answer)
            open_round.expected -= {i for i in ids if self._agent.end_of(i) is not None}
            ask = open_round.expected - open_round.values.keys() if tried and not open_round.asked else ()
            open_round.asked |= tried
        for member in ask:
            self._agent.control.send(self._agent.worker(member), ASK, key)
        self._complete()
        return Deferred(answer)

    def _asked(self, leader: WorkerInfo, key: Key) -> None:
        """A leader wants to know what comes out of a round, for it is not the first that leads in it."""
        topic, number, ids = key
        with self._lock:
            outcome = self._outcome_of(key)
            if outcome is None:
                if self._finished.get((topic, ids), (-1, None))[0] > number:
                    return  # all who live have been through with it
                self._askers.setdefault(key, set()).add(leader.id)
        if outcome is not None:
            self._agent.control.send(leader, TELL, (key, outcome))
        elif topic == GROUP_TOPIC:
            self.paths.abandon(ids)

    def _outcome_of(self, key: Key) -> Outcome | None:
        topic, number, ids = key
        finished, outcome = self._finished.get((topic, ids), (-1, None))
        return outcome if finished == number else None

    def _finish(self, key: Key, outcome: Outcome) -> None:
        """What came out of a round; the first who says so is right."""
        topic, number, ids = key
        with self._lock:
            if self._finished.get((topic, ids), (-1, None))[0] < number:
                self._finished[topic, ids] = (number, outcome)
                self._drop_former(topic, ids)
            outcome = self._outcome_of(key) or outcome
            late = self._open.pop(key, None)
            askers = self._askers.pop(key, set())
        for answer in late.answers if late is not None else ():
            answer.set_result(outcome)
        for leader in askers:
            self._agent.control.send(self._agent.worker(leader), TELL, (key, outcome))

    def _drop_former(self, topic: str, ids: tuple[int, ...]) -> None:
        """Drops the results of gatherings that have lost members, and whose others have all come to this one."""
        for former in [key for key in self._finished if key[0] == topic and key[1] != ids]:
            living = {i for i in former[1] if self._agent.end_of(i) is None}
            if len(living) < len(former[1]) and living <= set(ids):
                del self._finished[former]

    def _complete(self) -> None:
        with self._lock:
            complete = {key: g.outcome(key[1]) for key, g in self._open.items() if g.complete}
        for key, outcome in complete.items():
            self._finish(key, outcome)
