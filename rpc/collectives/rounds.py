"""A round of all_gather: what identifies it, its result, its leader, and members that have been replaced.

A round is one all_gather, or one barrier, among a fixed set of workers, its members. They send their values to
one of them, the leader (all_gather.py). Every worker has one RoundLeader, because any worker may have to lead when
those with lower ids have died. It keeps the results that later leaders may ask for.
"""

import contextlib
import copy
import reprlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from ...errors import LimitReachedError, NotInitializedError, RpcError, RpcTimeoutError, UnknownWorkerError
from ..contracts.agent import RpcAgent
from ..contracts.messages import Deferred, Handler, Incoming, MessageType
from ..contracts.policy import message_value
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly

__all__ = [
    "ASK_RESULT",
    "CONTROL_KINDS",
    "TELL_RESULT",
    "USER_TOPIC",
    "VOID",
    "Replacements",
    "Round",
    "RoundKey",
    "RoundLeader",
    "RoundResult",
    "Series",
]

USER_TOPIC = "user"
"""The topic of the collectives that users call.

A topic separates the collectives of one purpose from those of others among the same workers.
"""

MAX_TOPIC_CHARACTERS = 1024

ASK_RESULT = "all_gather.ask"
"""The kind of control message by which a leader asks a member for the result of a round; its payload is the
key."""

TELL_RESULT = "all_gather.tell"
"""The kind of control message that answers `ASK_RESULT`; its payload is the key and the result.

The result has no values if it is not kept any more: then the round has ended without the worker that asks.
"""

CONTROL_KINDS = (ASK_RESULT, TELL_RESULT)

MAX_OPEN_ROUNDS = 1024
"""Rounds of one other worker that are not over here: it has sent its value, or asked for the result."""


class Series(NamedTuple):
    """Identifies the consecutive rounds of one topic among the same members."""

    topic: str
    members: tuple[int, ...]
    """Worker ids, ascending."""


@message_value
class RoundKey(NamedTuple):
    """Identifies one round on all of its members. Sent between workers."""

    topic: str
    number: int
    """The number of the round in its series, from 0."""
    members: tuple[int, ...]
    """Worker ids, ascending."""

    @classmethod
    def from_payload(cls, payload: object, sender: int) -> "RoundKey":
        """Returns the key that a member has sent. Raises ValueError if it is none, or the sender no member."""
        if not isinstance(payload, tuple) or len(payload) != 3:
            raise ValueError("malformed message: it names no round")
        topic, number, members = payload
        is_sound = (
            type(topic) is str
            and len(topic) <= MAX_TOPIC_CHARACTERS
            and type(number) is int
            and number >= 0
            and type(members) is tuple
            and all(type(each) is int for each in members)
            and sorted(set(members)) == list(members)
        )
        if not is_sound or sender not in members:
            raise ValueError(f"malformed message: worker {sender} is in no round of {reprlib.repr(members)}")
        return cls(topic, number, members)

    @property
    def series(self) -> Series:
        """The series that the round belongs to."""
        return Series(self.topic, self.members)


@final
@dataclass(frozen=True, slots=True)
class Round:
    """One round on one of its members.

    key: identifies the round.
    value: what this worker contributes; any value that can be pickled.
    workers: all members by worker id, in ascending order.
    timeout: seconds that the caller allows; 0 for no limit.
    deadline: when the timeout expires, in seconds of `time.monotonic`; None for no limit.
    on_waiting: called at intervals during a long wait, with the names of the members whose values are missing.
    """

    key: RoundKey
    value: object
    workers: Mapping[int, WorkerInfo]
    timeout: float
    deadline: float | None
    on_waiting: Callable[[Sequence[str]], None]

    def seconds_left(self) -> float | None:
        """Returns the seconds until the deadline, negative after the deadline; None for no limit."""
        return None if self.deadline is None else self.deadline - time.monotonic()


@message_value
class RoundResult(NamedTuple):
    """The result of one round. Sent between workers."""

    values: Mapping[int, Any]
    """The members' values by worker id, without members that died before they contributed."""
    is_void: bool = False
    """Whether the round has no values: its members are to run it again with the latest incarnation of each."""

    def copy(self) -> "RoundResult":
        """Returns a result of which the program can change nothing, but for values that cannot be copied."""
        return RoundResult({worker: _copy_of(value) for worker, value in self.values.items()}, self.is_void)


def _copy_of(value: object) -> object:
    try:
        return copy.deepcopy(value)
    except Exception:  # references, for example, which have nothing to change
        return value


VOID = RoundResult({}, is_void=True)

ENDED = RoundResult({})
"""Takes the place of the result of a round that has ended, where later rounds have ended as well."""


@final
class Replacements:
    """The workers that have been replaced since one agent joined its group. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        self._latest: dict[int, int] = {}
        """The wire id of the latest incarnation of each worker that has been replaced, by worker id."""
        self._is_closed = False

    def record(self, worker: WorkerInfo) -> None:
        """Records a worker that has joined, and that may have replaced another one."""
        if worker.wire_id == worker.id:
            return  # the first incarnation
        with self._changed:
            self._latest[worker.id] = max(worker.wire_id, self._latest.get(worker.id, worker.wire_id))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the waits in `wait_for`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def concern(self, members: Iterable[int]) -> bool:
        """Returns whether one of these incarnations has been replaced. If so, that is true for ever.

        Wire ids that are not known here are taken for members.
        """
        return bool(self._latest) and any(self._is_replaced(each) for each in members)

    def _is_replaced(self, wire_id: int) -> bool:
        # This worker goes on as it is: if it has been replaced, its messages fail with the reason.
        if wire_id == self._agent.info.wire_id or not self._agent.is_member(wire_id):
            return False
        return self._latest.get(self._agent.incarnation(wire_id).id, wire_id) > wire_id

    def latest(self, workers: Collection[WorkerInfo]) -> dict[int, WorkerInfo]:
        """Returns the latest incarnations of workers, this one as it is, by wire id in ascending order."""
        me = self._agent.info
        found = [each if each.wire_id == me.wire_id else self._agent.worker(each) for each in workers]
        return {each.wire_id: each for each in sorted(found, key=lambda worker: worker.wire_id)}

    def wait_for(self, members: Collection[int], deadline: float | None) -> None:
        """Waits until this worker learns that one of these incarnations has been replaced, as others know.

        The deadline is in seconds of `time.monotonic`; None for never. Raises RpcTimeoutError, which names the
        members that are lost, or NotInitializedError when the agent has shut down.
        """
        with self._agent.blocking(), self._changed:
            left = None if deadline is None else deadline - time.monotonic()
            if not wait_interruptibly(
                self._changed.wait_for, lambda: self._is_closed or self.concern(members), left
            ):
                lost = [self._agent.incarnation(each).name for each in members if self._agent.end_of(each)]
                raise RpcTimeoutError(", ".join(lost) or "a worker that was started again", 0.0)
        if self._is_closed:
            raise NotInitializedError(f"worker {self._agent.info.name!r} has shut down its RPC agent")


class _OpenRound:
    """A round that this worker leads and whose values have not all arrived."""

    def __init__(self, key: RoundKey) -> None:
        self.expected = set(key.members)
        """The ids of the members that are not known to be lost."""
        self.values: dict[int, Any] = {}
        self.answers: dict[int, Future[RoundResult]] = {}
        """What each member that has sent its value waits for, by its id."""
        self.asked: set[int] = set()
        """The ids of the members that have been asked for the round's result."""
        self.passed_on: set[int] = set()
        """The ids of the members that will never begin this round, because a member has been replaced."""

    @property
    def missing(self) -> set[int]:
        """The ids of the living members whose values have not arrived, and may still do so."""
        return self.expected - self.values.keys() - self.passed_on

    def result(self) -> RoundResult:
        """Returns the result of the values that have arrived."""
        return VOID if self.passed_on else RoundResult(self.values)


@final
class RoundLeader:
    """Collects the values of rounds, answers with the results, and keeps the last result of each series.

    Safe to use from any thread.
    """

    def __init__(self, agent: RpcAgent, replacements: Replacements) -> None:
        """Registers the handlers of control messages."""
        self._agent = agent
        self._replacements = replacements
        self._lock = threading.Lock()
        self._running: set[Series] = set()
        """The series of which this worker is in a round."""
        self._open: dict[RoundKey, _OpenRound] = {}
        self._finished: dict[Series, tuple[int, RoundResult]] = {}
        """The number and result of the last round whose result is known, by series. The program of this worker has
        none of these values: it may change its own."""
        self._askers: dict[RoundKey, set[int]] = {}
        """The ids of leaders that have asked for the result of a round which is not known here yet."""
        agent.control.on(ASK_RESULT, self._on_ask)
        agent.control.on(TELL_RESULT, self._on_tell)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of the requests that members send to a leader."""
        return {
            MessageType.ALL_GATHER: Handler(
                self._on_value, description="the value for a collective, sent to worker"
            ),
            MessageType.ALL_GATHER_STATUS: Handler(
                self._on_status_request, description="the question which members are missing, to worker"
            ),
        }

    @contextlib.contextmanager
    def taking_part(self, series: Series) -> Iterator[bool]:
        """Context manager in which this worker is in a round of a series, one round at a time.

        Yields whether it may begin the round. It begins no more when it knows that a member has been replaced.
        """
        with self._lock:
            may_begin = not self._replacements.concern(series.members)
            if may_begin:
                self._running.add(series)
        try:
            yield may_begin
        finally:
            if may_begin:
                with self._lock:
                    self._running.discard(series)
                if self._askers:
                    self._answer_askers()

    def finish(self, key: RoundKey, result: RoundResult) -> None:
        """Records the result of a round, and answers the members and leaders that wait for it.

        Only the first result of a round counts; later ones are ignored.
        """
        series = key.series
        with self._lock:
            number, last_result = self._finished.get(series, (-1, result))
            if number < key.number:
                self._finished[series] = (key.number, result)
                self._drop_superseded(series)
            elif number == key.number:
                result = last_result
            open_round = self._open.pop(key, None)
            askers = self._askers.pop(key, set())
        if open_round is not None:
            # Its own last: once this worker has the result, it may shut down.
            me = self._agent.info.wire_id
            for member in sorted(open_round.answers, key=me.__eq__):
                open_round.answers[member].set_result(result)
        self._tell(askers, key, result)

    def discard_asker(self, key: RoundKey, leader: int) -> None:
        """Sends a leader no result that it has asked for, because it gets this worker's value instead."""
        with self._lock:
            self._askers.get(key, set()).discard(leader)

    def ask_missing(self, key: RoundKey) -> None:
        """Asks the members whose values for a round are missing for its result, each of them once."""
        to_ask: set[int] = set()
        with self._lock:
            if (open_round := self._open.get(key)) is not None:
                to_ask = open_round.missing - open_round.asked
                open_round.asked |= to_ask
        for member in to_ask:
            self._agent.control.send(self._agent.incarnation(member), ASK_RESULT, key)

    def on_worker_lost(self, worker: WorkerInfo) -> None:
        """Completes the rounds in which only this worker's value was missing."""
        with self._lock:
            for open_round in self._open.values():
                open_round.expected.discard(worker.wire_id)
        self._finish_complete_rounds()

    def on_worker_replaced(self) -> None:
        """Ends the rounds that cannot end otherwise, because some members run them with another incarnation."""
        self._answer_askers()
        with self._lock:
            concerned = [key for key in self._open if self._replacements.concern(key.members)]
        for key in concerned:
            self.ask_missing(key)

    def _will_not_begin(self, series: Series) -> bool:
        """Returns whether this worker is in no round of a series, and never will be. Called with the lock."""
        return series not in self._running and self._replacements.concern(series.members)

    def _answer_askers(self) -> None:
        """Tells the leaders that ask for the results of rounds which this worker will not begin."""
        with self._lock:
            keys = [key for key in self._askers if self._will_not_begin(key.series)]
            answers = [(self._askers.pop(key), key, self._known_result(key) or VOID) for key in keys]
        for leaders, key, result in answers:
            self._tell(leaders, key, result)

    def _tell(self, leaders: Iterable[int], key: RoundKey, result: RoundResult) -> None:
        for leader in leaders:
            self._agent.control.send(self._agent.incarnation(leader), TELL_RESULT, (key, result))

    def _on_value(self, message: Incoming) -> Deferred:
        """Handles a member's value; the answer is the result of the round."""
        topic, number, members, value, was_tried = message.value
        answer: Future[RoundResult] = Future()
        key = self._key((topic, number, members), message.source)
        with self._lock:
            if (known := self._known_result(key)) is not None:
                answer.set_result(known)
                return Deferred(answer)
            open_round = self._open.get(key)
            if open_round is None:
                self._check_count(message.source.wire_id)
                open_round = self._open[key] = _OpenRound(key)
            elif message.source.wire_id in open_round.values and not was_tried:
                raise ValueError(f"{message.source.name!r} sends its value for round {number} twice")
            open_round.values[message.source.wire_id] = value
            former = open_round.answers.pop(message.source.wire_id, None)
            open_round.answers[message.source.wire_id] = answer
            open_round.expected -= {i for i in members if self._agent.end_of(i) is not None}
        if former is not None:
            former.set_exception(RpcError("the value was sent again"))  # to a request that has failed there
        if was_tried or self._replacements.concern(key.members):
            self.ask_missing(key)
        self._finish_complete_rounds()
        return Deferred(answer)

    def _on_status_request(self, message: Incoming) -> list[int]:
        """Returns the ids of the members whose values for a round are missing."""
        key = self._key(message.value, message.source)
        with self._lock:
            open_round = self._open.get(key)
            return [] if open_round is None else sorted(open_round.missing)

    def _on_ask(self, leader: WorkerInfo, payload: tuple[Any, ...]) -> None:
        """Tells another leader the result of a round now, or once it is known."""
        key = self._key(payload, leader, may_be_new=True)
        with self._lock:
            result = self._known_result(key)
            if result is None and self._will_not_begin(key.series):
                result = VOID
            if result is None:
                if key not in self._askers:
                    self._check_count(leader.wire_id)
                self._askers.setdefault(key, set()).add(leader.wire_id)
        if result is not None:
            self._agent.control.send(leader, TELL_RESULT, (key, result))

    def _on_tell(self, member: WorkerInfo, payload: tuple[Any, ...]) -> None:
        """Takes the result of a round that a member was asked for."""
        key, result = self._key(payload[0], member), payload[1]
        if not isinstance(result, RoundResult) or not set(result.values) <= set(key.members):
            raise ValueError("malformed message: it has no result")
        with self._lock:
            open_round = self._open.get(key)
            if open_round is None:
                return  # it has ended without
            if member.wire_id not in open_round.asked:
                raise ValueError(f"{member.name!r} was not asked for the result of round {key.number}")
            if result.is_void:
                open_round.passed_on.add(member.wire_id)
        if result.is_void:
            self._finish_complete_rounds()
        else:
            self.finish(key, result)

    def _key(self, payload: object, sender: WorkerInfo, *, may_be_new: bool = False) -> RoundKey:
        """Returns the round that a member has named. If it may be new, other members need not be known here.

        Raises ValueError if it is no round of that member and this worker, and UnknownWorkerError if another of
        its members is not known here. If that is just joining, it will be.
        """
        key = RoundKey.from_payload(payload, sender.wire_id)
        if (me := self._agent.info.wire_id) not in key.members:
            raise ValueError(f"malformed message: worker {me} is in no round of {key.members}")
        for member in key.members:
            if not may_be_new and not self._agent.is_member(member):
                raise UnknownWorkerError(member, [worker.name for worker in self._agent.workers()])
        return key

    def _check_count(self, worker: int) -> None:
        """Raises ValueError if too many rounds of a worker are open. Called with the lock."""
        if worker == self._agent.info.wire_id or len(self._open) + len(self._askers) < MAX_OPEN_ROUNDS:
            return
        count = sum(worker in each.values for each in self._open.values())
        count += sum(worker in leaders for leaders in self._askers.values())
        if count >= MAX_OPEN_ROUNDS:
            raise LimitReachedError(
                f"{count} collectives of worker {worker} wait for others here: {MAX_OPEN_ROUNDS} may",
                f"MAX_OPEN_ROUNDS={MAX_OPEN_ROUNDS}",
            )

    def _finish_complete_rounds(self) -> None:
        with self._lock:
            complete = {key: each.result() for key, each in self._open.items() if not each.missing}
        for key, result in complete.items():
            self.finish(key, result)

    def _known_result(self, key: RoundKey) -> RoundResult | None:
        """Returns the result of a round, None if it is not known. Called with the lock."""
        number, result = self._finished.get(key.series, (-1, None))
        if number > key.number:
            return ENDED  # by members that count the worker which does not know that as lost
        return result if number == key.number else None

    def _drop_superseded(self, current: Series) -> None:
        """Drops the results of series that have lost members and whose living members are all in this one."""
        for former in [each for each in self._finished if each.topic == current.topic and each != current]:
            living = {i for i in former.members if self._agent.end_of(i) is None}
            if len(living) < len(former.members) and living <= set(current.members):
                del self._finished[former]
