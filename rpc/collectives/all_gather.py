"""`rpc.all_gather` and `rpc.barrier`: a worker collects the values of all and answers each with the result.

The living member with the lowest id leads a round. The others send it their values in requests, which it answers
once it has the values of all living members. A member that dies drops out of the round; when the leader dies, the
member with the next id leads.

A leader may die after it has answered some members. The remaining members then send their values to a later one,
marked as a round that was tried before. That leader asks the members whose values are missing for its result: a
member that has the result answers at once; one that gets it later answers then. A leader waits for all living
members, so it makes no result of its own while one of them has another, and all living members get the same.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, final

import torch

from ...c10d.debug.call_site import CallSite, find_call_site_of_thread
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
from ..contracts.agent import RpcAgent, current_agent
from ..contracts.messages import UNSET_RPC_TIMEOUT, Handler, MessageType, Request, check_timeout
from ..contracts.worker import WorkerEnd, WorkerInfo, WorkerWatcher
from ..execution.ctrl_c import wait_interruptibly
from .rounds import (
    CONTROL_KINDS,
    USER_TOPIC,
    VOID,
    Replacements,
    Round,
    RoundKey,
    RoundLeader,
    RoundResult,
    Series,
)

__all__ = ["CONTROL_KINDS", "WARN_INTERVAL_S", "AllGatherService", "AllGatherStates", "all_gather", "barrier"]

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

REQUEST_PARTS = ("the topic", "the number", "the members", "obj", "the attempt")
"""Names of the items of an ALL_GATHER request, for errors."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class AllGatherStates:
    """The state of an all_gather in torch.distributed.rpc; unused here, for programs that name the class."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


def all_gather(
    obj: T, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, T]:
    """Gathers an object of each worker on all of them. All must call it, and their collectives in the same order.

    Args:
        obj: the object of this worker; anything that pickles.
        worker_names: the workers that take part, this one among them. By default all workers of the group; in a
            dynamic group, its current members.
        timeout: seconds, 0 for no limit. By default that of the options.

    Each worker keeps a copy of the objects until the next collective of the same workers has ended: members whose
    leader dies may ask for them. After one with large objects, `barrier` of the same workers frees the copies.

    A worker that dies meanwhile and is started again takes part or not, for all workers alike: if not, the first
    collective that it calls is the next one of the others.

    Returns:
        The objects by worker name, without those of workers that have died.

    Raises:
        NotInitializedError: this process is no worker.
        UnknownWorkerError: there is no worker of some name.
        ValueError: this worker is not among `worker_names`.
        RpcTimeoutError: some workers did not call it in time; the error names them.
        WorkerLostError: this worker and another one have lost each other, and the others have ended it without
            this one.
        SerializationError: the object does not pickle.
    """
    return _all_gather("all_gather", obj, worker_names, timeout)


def barrier(worker_names: Collection[str] | None = None) -> None:
    """Blocks until all of these workers have called it, with the timeout of the options. See `all_gather`.

    Args:
        worker_names: as in `all_gather`.

    Raises:
        NotInitializedError, UnknownWorkerError, ValueError, RpcTimeoutError, WorkerLostError: as in `all_gather`.
    """
    _all_gather("barrier", None, worker_names, UNSET_RPC_TIMEOUT)


def _all_gather(operation: str, obj: T, worker_names: Collection[str] | None, timeout: float) -> dict[str, T]:
    agent = current_agent()
    workers: Sequence[WorkerInfo] = agent.workers()
    if worker_names:
        workers = [agent.worker(name) for name in sorted(worker_names)]
    if agent.info not in workers:
        raise ValueError(f"{agent.info.name!r} is not among the workers {[worker.name for worker in workers]}")
    seconds = check_timeout(timeout)
    seconds = agent.rpc_timeout if seconds is None else seconds
    try:
        values = agent.all_gather(USER_TOPIC, obj, workers, seconds, operation)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the frames of the wait
    by_name = {agent.incarnation(wire_id).name: gathered for wire_id, gathered in values.items()}
    return {worker.name: by_name[worker.name] for worker in workers if worker.name in by_name}


@final
class AllGatherService(WorkerWatcher):
    """Runs the all_gathers that one agent takes part in."""

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._round_locks: dict[Series, threading.Lock] = {}
        """Held while a round of the series runs on this worker."""
        self._round_counts: dict[Series, int] = defaultdict(int)
        """Rounds that this worker has begun, by series. Changed under the series' round lock."""
        self._running: dict[RoundKey, tuple[str, CallSite, float]] = {}
        """What the user has called, in which line, and when, as time.time()."""
        self._replacements = Replacements(agent)
        self._leader = RoundLeader(agent, self._replacements)

    def close(self) -> None:
        """Ends the waits for workers that were started again."""
        self._replacements.close()

    def describe(self) -> Mapping[str, Any]:
        """Returns the collectives that this worker is in; the same ones have one topic, number and members."""
        running = [
            {
                "operation": operation,
                "topic": key.topic,
                "number": key.number,
                "members": [self._agent.incarnation(member).name for member in key.members],
                "since": since,
                "call_site": f"{file}:{line}",
            }
            for key, (operation, (file, line), since) in self._running.copy().items()
        ]
        return {"collectives": running}

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of the requests between members and leader."""
        return self._leader.handlers()

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Stops all rounds from waiting for a lost worker."""
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

        `on_waiting` is called every `WARN_INTERVAL_S` with the names of the members whose values are missing. By
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
                self._running[key] = operation, call_site, time.time()
                try:
                    result = self._take_part(Round(key, value, workers, timeout, deadline, on_waiting))
                except RpcTimeoutError as error:
                    raise RpcTimeoutError(error.worker, timeout, f"{operation} waits for") from None
                finally:
                    self._running.pop(key, None)
        if self._agent.info.wire_id not in result.values:
            raise self._excluded_error(operation, workers)
        return dict(result.values)

    @contextlib.contextmanager
    def _next_round(self, series: Series, deadline: float | None, timeout: float, operation: str) -> Iterator[int]:
        """Context manager for one round of a series; yields the round's number.

        On each worker the rounds of a series run one after another, so a round depends on no older result than
        that of the round before it.
        """
        round_lock = self._round_locks.setdefault(series, threading.Lock())
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
            result = self._run_once(round_, was_tried=False) if may_begin else VOID
            while result is None:  # with the next leader, when one has died
                result = self._run_once(round_, was_tried=True)
        if result.is_void:
            self._replacements.wait_for(round_.key.members, round_.deadline)
        return result

    def _run_once(self, round_: Round, *, was_tried: bool) -> RoundResult | None:
        """Returns the result of a round as its leader tells it; None if the value is to be sent (again).

        `was_tried` says that another attempt at this round may have given some members a result.
        """
        leader = self._leader_of(round_.key)
        if leader == self._agent.info.wire_id:
            for worker in round_.workers.values():  # only the loss of a connected worker is noticed
                if worker.wire_id != leader:
                    self._agent.connect(worker)
        answer = self._send_value(round_, leader, was_tried)
        try:
            result = self._wait_for_result(round_, leader, answer)
        except WorkerLostError:
            return None
        except RESENT_AFTER as error:
            self._wait_to_resend(round_, leader, error)
            return None
        if leader != self._agent.info.wire_id:  # which has recorded it, and has sent this worker a copy as well
            self._leader.finish(round_.key, result.copy())  # the program may change what it gets
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

    def _send_value(self, round_: Round, leader: int, was_tried: bool) -> torch.futures.Future[Any]:
        """Sends this worker's value to the leader; returns the future of the result."""
        key = round_.key
        body = (*key, round_.value, was_tried)
        left = round_.seconds_left()
        seconds = 0.0 if left is None else max(1e-3, left)  # 0 is no limit
        self._leader.discard_asker(key, leader)
        try:
            return self._agent.request(
                round_.workers[leader], Request(MessageType.ALL_GATHER, body, timeout=seconds, label=REQUEST_PARTS)
            )
        except SerializationError:
            self._round_counts[key.series] -= 1  # no worker has heard of the round
            raise

    def _wait_for_result(self, round_: Round, leader: int, answer: torch.futures.Future[Any]) -> RoundResult:
        """Waits for the leader's answer. Raises WorkerLostError, or RpcTimeoutError with the missing members."""
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
            raise RpcTimeoutError(", ".join(self._missing_members(round_, leader)), round_.timeout) from None
        return result

    def _wait_to_resend(self, round_: Round, leader: int, error: RpcError) -> None:
        """Waits until a value can be sent again. The others wait for it in this round, not in the next one."""
        left, name = round_.seconds_left(), round_.workers[leader].name
        if left is not None and left <= RESEND_PAUSE_S:
            raise RpcTimeoutError(name, round_.timeout) from error
        log.debug("worker %s sends its value for a collective again to %s: %s", self._agent.info.name, name, error)
        with self._agent.blocking():
            wait_interruptibly(time.sleep, RESEND_PAUSE_S)

    def _wait(self, future: torch.futures.Future[Any], seconds: float) -> bool:
        """Waits for a future; returns whether it is done."""
        done = threading.Event()
        future.add_done_callback(lambda _future: done.set())
        with self._agent.blocking():
            return wait_interruptibly(done.wait, seconds)

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

    def _log_wait(self, operation: str, names: Sequence[str]) -> None:
        log.info("%s of worker %s waits for %s", operation, self._agent.info.name, ", ".join(names))
