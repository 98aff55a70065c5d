"""all_gather among workers: one of them collects the values of all and answers each with the result.

The living member with the lowest id leads a round. The others send it their values in requests, which it answers
once it has the values of all living members. A member that dies drops out of the round; when the leader dies, the
member with the next id leads.

Workers that run all_gather often do it through a process group (group_rounds.py decides when). A group is fast,
but if a member dies in a round, the group may succeed on some of the others only. Likewise a leader may die
after it has answered some members. In both cases the remaining members send their values to a (later) leader,
marked as a round that was tried before. Two rules ensure that all living members get the same result:

- A member either takes the group's result, or abandons the group and then sends its value to a leader; never both.
  A leader waits for all living members, so it makes no result of its own while one of them has another.
- The leader of a round that was tried before asks the members whose values are missing for its result. A member
  that has the result answers at once; one that gets it later answers then.

A value that was lost on its way to a leader that lives, or whose answer was, is sent again in the same round: the
others wait for it there. So is one for a leader that is suspect, until that is back or lost.

Members need not agree on who is lost: if two of them lose each other, the second one may lead a round of its own,
while the others, which are connected to both, go to the first one. So a leader that is not the first of all
members asks those that are missing as well, after a moment. A member whose value is not in the result that it
gets, because the leader counts it as lost, raises WorkerLostError; all others have the same result. Only members
that no other member connects can get different ones: each side takes the other for dead.

A member that was killed may be replaced: started again under its name and rank, with another wire id. Members
learn of it at different times, so some may be in a round with the old incarnation, where others begin one with the
new one. All living members have the same outcome:

- If all of them have begun the round with the old incarnation, it ends with that one's value or without it.
- If one of them has not begun it when it learns of the new incarnation, it never will, and says so when it is
  asked for the result. Then the round is void: no member has a result of it, or will. All run it again, with the
  latest incarnation of each member and within the same timeout.

A worker that knows of a new incarnation begins all collectives with that one, and the first one of the new
incarnation is the first of these: the void one, or that after the last one that ended without it. A leader that
learns of it asks the members whose values are missing. A member answers when it is in no round of that series:
what is void on one member has no result on another.
"""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, final

import torch

from ...c10d.debug.call_site import find_call_site_of_thread
from ...c10d.torch_types import TorchStore
from ...errors import (
    AnswerFailedError,
    RpcError,
    RpcTimeoutError,
    SendFailedError,
    SerializationError,
    UnknownWorkerError,
    WorkerLostError,
    WorkerSuspectError,
)
from ..contracts.agent import RpcAgent
from ..contracts.messages import Handler, MessageType, Request
from ..contracts.worker import WorkerInfo
from .all_gather_group import AllGatherGroup
from .group_rounds import NO_STATUS, GroupRounds, NextRound
from .leader import CONTROL_KINDS, RoundLeader
from .replacements import Replacements
from .rounds import VOID, Round, RoundKey, RoundResult, Series
from .running_rounds import RunningRounds

__all__ = ["CONTROL_KINDS", "WARN_INTERVAL_S", "AllGatherService", "ValueCodec"]

WARN_INTERVAL_S = 10.0
"""Seconds after which a waiting worker first logs which members are missing, and the interval of later log
lines."""

RESENT_AFTER = (SendFailedError, AnswerFailedError, UnknownWorkerError, WorkerSuspectError)
"""The errors after which a value is sent again: the leader is not lost, and may or may not have it.

A leader that does not know one of the members is about to: that one is just joining the group.
"""

RESEND_PAUSE_S = 0.1
"""Seconds between two attempts to send a value to the same leader."""

STATUS_TIMEOUT_S = 2.0
"""Seconds that the leader may take to answer which members are missing."""

ASK_AFTER_S = 1.0
"""Seconds after which a leader asks whether a round has ended without it, if it is not the first member."""

MAX_GROUP_WAIT_S = 24 * 3600.0
"""Seconds that a round without a timeout waits in a process group; after that it goes on by messages."""

REQUEST_PARTS = ("the topic", "the number", "the members", "obj", "the status", "the attempt")
"""Names of the items of an ALL_GATHER request, for errors."""

log = logging.getLogger(__name__)


class ValueCodec(Protocol):
    """Encodes values as bytes that several workers can decode."""

    def flatten(self, value: object, label: str, worker: WorkerInfo) -> memoryview | None:
        """Returns a value as bytes; None if it can only travel in a message. Raises SerializationError.

        Args:
            value: anything that pickles.
            label: the value's name in errors.
            worker: one of the receivers.
        """

    def unflatten(self, data: bytes | bytearray, worker: WorkerInfo) -> Any:
        """Returns the value that `flatten` has encoded on a worker."""


@final
class AllGatherService:
    """Runs the all_gathers that one agent takes part in."""

    def __init__(self, agent: RpcAgent, codec: ValueCodec) -> None:
        """Args: agent: the agent of this worker. codec: encodes values for rounds through process groups."""
        self._agent = agent
        self._codec = codec
        self._lock = threading.Lock()
        self._round_locks: dict[Series, threading.Lock] = defaultdict(threading.Lock)
        """Held while a round of the series runs on this worker."""
        self._round_counts: dict[Series, int] = defaultdict(int)
        """Rounds that this worker has begun, by series. Changed under the series' round lock."""
        self._running = RunningRounds(agent)
        self._group_rounds = GroupRounds(
            agent.info.wire_id,
            agent.options.all_gather,
            agent.options.channels.max_payload_bytes,
            insecure=agent.options.insecure,
        )
        self._replacements = Replacements(agent)
        self._leader = RoundLeader(agent, self._replacements, self._group_rounds.abandon_if_used)

    def open(self, store: TorchStore, may_form: Callable[[Sequence[int]], bool]) -> None:
        """Allows process groups of the workers that may form them. Their members rendezvous at the store."""
        self._group_rounds.open(store, may_form)

    def close(self) -> None:
        """Ends all process groups, and waits for their threads."""
        self._replacements.close()
        self._group_rounds.close()

    def describe(self) -> Mapping[str, Any]:
        """Returns the number of process groups, and the collectives that this worker is in, for the debug info."""
        return {"all_gather_groups": self._group_rounds.formed_groups, "collectives": self._running.describe()}

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of the requests between members and leader."""
        return self._leader.handlers()

    def on_worker_suspect(self, worker: WorkerInfo) -> None:
        """Has rounds with a suspect worker go on by messages, which are sent again until it is back or lost."""
        self._group_rounds.end_groups_of(worker.wire_id)

    def on_worker_lost(self, worker: WorkerInfo) -> None:
        """Stops all rounds from waiting for a lost worker."""
        self._group_rounds.end_groups_of(worker.wire_id)
        self._leader.on_worker_lost(worker)

    def on_worker_joined(self, worker: WorkerInfo) -> None:
        """Has rounds with a worker that this one has replaced end, or begin again with this one."""
        self._replacements.record(worker)
        self._leader.on_worker_replaced()

    def all_gather(
        self,
        topic: str,
        value: object,
        members: Sequence[WorkerInfo],
        timeout: float,
        operation: str = "all_gather",
        on_waiting: Callable[[Sequence[str]], None] | None = None,
    ) -> dict[int, Any]:
        """Returns the values of all living members, by wire id. See `RpcAgent.all_gather`.

        Args:
            topic: separates collectives of different purpose.
            value: what this worker contributes; anything that pickles.
            members: the workers that take part, this one among them.
            timeout: seconds, 0 for no limit.
            operation: what errors and log lines call the collective.
            on_waiting: called every `WARN_INTERVAL_S` with the names of the members whose values are missing. By
                default they are logged.
        """
        if on_waiting is None:
            on_waiting = partial(self._log_wait, operation)
        deadline = time.monotonic() + timeout if timeout else None
        result, call_site = VOID, find_call_site_of_thread()
        while result.is_void:
            workers = self._replacements.latest(members)
            series = Series(topic, tuple(workers))
            with self._next_round(series, deadline, timeout, operation) as number:
                key = RoundKey(topic, number, series.members)
                try:
                    with self._running.running(key, operation, call_site):
                        result = self._take_part(Round(key, value, workers, timeout, deadline, on_waiting))
                except RpcTimeoutError as error:
                    raise RpcTimeoutError(error.worker, timeout, f"{operation} waits for") from None
        if self._agent.info.wire_id not in result.values:
            raise self._excluded_error(operation, workers)
        if not result.is_flat:
            return dict(result.values)
        return {each: self._codec.unflatten(flat, workers[each]) for each, flat in result.values.items()}

    @contextlib.contextmanager
    def _next_round(self, series: Series, deadline: float | None, timeout: float, operation: str) -> Iterator[int]:
        """Context manager for one round of a series; yields the round's number.

        On each worker the rounds of a series run one after another, so a round depends on no older result than
        that of the round before it.
        """
        with self._lock:
            round_lock = self._round_locks[series]
        with self._agent.blocking():
            if not round_lock.acquire(timeout=max(0.0, deadline - time.monotonic()) if deadline else -1):
                activity = f"{operation} waits for an earlier collective among the same workers to end on"
                raise RpcTimeoutError(self._agent.info.name, timeout, activity)
        try:
            number = self._round_counts[series]
            self._round_counts[series] += 1
            yield number
        finally:
            round_lock.release()

    def _take_part(self, round_: Round) -> RoundResult:
        """Returns the result of a round; if it is void, when this worker knows of the new incarnation, too."""
        with self._leader.taking_part(round_.key.series) as may_begin:
            result = self._run(round_) if may_begin else VOID
        if result.is_void:
            self._replacements.wait_for(round_.key.members, round_.deadline)
        return result

    def _run(self, round_: Round) -> RoundResult:
        """Returns the result of a round, which goes through a process group if the members have agreed on that."""
        key = round_.key
        was_tried, result = False, None
        if key.may_use_group and (group := self._group_rounds.start_round(key.members, key.number)) is not None:
            was_tried, result = self._run_through_group(group, round_)
        while result is None:
            result = self._run_by_messages(round_, was_tried)
            was_tried = True
        if key.may_use_group:
            present = tuple(sorted(result.values))
            if self._agent.info.wire_id in present:
                self._group_rounds.apply_result(key.members, key.number, present, result.next_round)
            else:
                self._group_rounds.abandon(key.members)
        return result

    def _run_through_group(self, group: AllGatherGroup, round_: Round) -> tuple[bool, RoundResult | None]:
        """Returns `(was_tried, result)`: whether other members may have a result of the group, and the result.

        The result is None if the round has to go on by messages.
        """
        key = round_.key
        with self._undo_round_unless_sent(key.series):
            flat = self._codec.flatten(round_.value, "obj", round_.workers[self._leader_of(key)])
        # The other half of the time is for messages, and for finding out which members are missing.
        left = round_.seconds_left()
        seconds = left / 2 if left is not None else MAX_GROUP_WAIT_S
        try:
            with self._agent.blocking():
                values = group.all_gather(key.number, flat, seconds)
        except Exception as error:
            log.debug(
                "worker %s continues round %d by messages, its process group failed: %s",
                self._agent.info.name,
                key.number,
                error,
            )
            self._group_rounds.abandon(key.members)
            return True, None
        if values is None:
            return False, None
        result = RoundResult(values, NextRound(group.generation, through_group=True), is_flat=True)
        self._leader.finish(key, result)
        return True, result

    def _run_by_messages(self, round_: Round, was_tried: bool) -> RoundResult | None:
        """Returns the result of a round as its leader tells it; None if the value is to be sent (again).

        Args:
            round_: the round to run.
            was_tried: whether another attempt at this round may have given some members a result.
        """
        leader = self._leader_of(round_.key)
        if leader == self._agent.info.wire_id:
            self._connect_to_members(round_)
        answer = self._send_value(round_, leader, was_tried)
        try:
            result = self._wait_for_result(round_, leader, answer)
        except WorkerLostError:
            return None
        except RESENT_AFTER as error:
            self._wait_to_resend(round_, leader, error)
            return None
        self._leader.finish(round_.key, result)
        return result

    def _leader_of(self, key: RoundKey) -> int:
        """Returns the id of the member that leads: the lowest that is not known to be lost."""
        return next(i for i in key.members if i == self._agent.info.wire_id or self._agent.end_of(i) is None)

    def _excluded_error(self, operation: str, workers: Mapping[int, WorkerInfo]) -> WorkerLostError:
        """Returns the error of a round that has ended without this worker's value."""
        me = self._agent.info
        for identifier, worker in workers.items():
            if (end := self._agent.end_of(identifier)) is not None:
                reason = f"{end.reason}; the other workers have ended this {operation} without {me.name!r}"
                return WorkerLostError(worker.name, reason, end.cause)
        return WorkerLostError(me.name, f"the other workers have ended this {operation} without it")

    def _connect_to_members(self, round_: Round) -> None:
        """Connects to the other members, because only the loss of a connected worker is noticed."""
        for worker in round_.workers.values():
            if worker.wire_id != self._agent.info.wire_id:
                self._agent.connect(worker)

    def _send_value(self, round_: Round, leader: int, was_tried: bool) -> torch.futures.Future[Any]:
        """Sends this worker's value to the leader; returns the future of the result."""
        key = round_.key
        status = self._group_rounds.status(key.members) if key.may_use_group else NO_STATUS
        body = (*key, round_.value, status, was_tried)
        left = round_.seconds_left()
        seconds = 0.0 if left is None else max(1e-3, left)  # 0 is no limit
        self._leader.discard_asker(key, leader)
        with self._undo_round_unless_sent(key.series):
            return self._agent.request(
                round_.workers[leader], Request(MessageType.ALL_GATHER, body, timeout=seconds, label=REQUEST_PARTS)
            )

    def _wait_for_result(self, round_: Round, leader: int, answer: torch.futures.Future[Any]) -> RoundResult:
        """Waits for the leader's answer.

        Raises:
            RpcTimeoutError: the round took too long; the error names the missing members.
            WorkerLostError: the leader is lost.
        """
        is_second = self._agent.info.wire_id == leader != round_.key.members[0]
        try:
            if is_second and not self._wait(answer, ASK_AFTER_S):
                self._leader.ask_missing(round_.key)
            while not self._wait(answer, WARN_INTERVAL_S):
                round_.on_waiting(self._missing_members(round_, leader))
                if is_second:  # the round may not have been open here before
                    self._leader.ask_missing(round_.key)
            result: RoundResult = answer.wait()
        except RpcTimeoutError:
            missing = self._missing_members(round_, leader)
            raise RpcTimeoutError(", ".join(missing), round_.timeout) from None
        return result

    def _wait_to_resend(self, round_: Round, leader: int, error: RpcError) -> None:
        """Waits until a value can be sent again. The others wait for it in this round, not in the next one."""
        left, name = round_.seconds_left(), round_.workers[leader].name
        if left is not None and left <= RESEND_PAUSE_S:
            raise RpcTimeoutError(name, round_.timeout) from error
        log.debug("worker %s sends its value for a collective again to %s: %s", self._agent.info.name, name, error)
        with self._agent.blocking():
            time.sleep(RESEND_PAUSE_S)

    def _wait(self, future: torch.futures.Future[Any], seconds: float) -> bool:
        """Waits for a future; returns whether it is done."""
        done = threading.Event()
        future.add_done_callback(lambda _future: done.set())
        with self._agent.blocking():
            return done.wait(seconds)

    def _missing_members(self, round_: Round, leader: int) -> list[str]:
        """Returns the names of the members whose values are missing; the leader's if it does not answer."""
        try:
            asked = self._agent.request(
                round_.workers[leader],
                Request(MessageType.ALL_GATHER_STATUS, tuple(round_.key), timeout=STATUS_TIMEOUT_S),
            )
            missing: Sequence[int] = asked.wait()
        except RpcError:
            missing = [leader]
        return [round_.workers[identifier].name for identifier in missing]

    @contextlib.contextmanager
    def _undo_round_unless_sent(self, series: Series) -> Iterator[None]:
        """Context manager that takes back a round whose value does not pickle: no worker has heard of it."""
        try:
            yield
        except SerializationError:
            self._round_counts[series] -= 1
            raise

    def _log_wait(self, operation: str, names: Sequence[str]) -> None:
        log.info("%s of worker %s waits for %s", operation, self._agent.info.name, ", ".join(names))
