"""The values that this worker owns: their ids, the forks of their references on other workers, requests for them.

An entry is kept as long as any worker has a fork of it; after that, only by the owner's own handles to it.
"""

import contextlib
import itertools
import logging
import reprlib
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, final

import torch

from ..errors import LimitReachedError, RemoteError, RRefError
from ..proto.v1 import agent_pb2
from ..rpc.calls.handler import log_failure, run_function
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Confirmation, Deferred, Incoming
from ..rpc.execution.ctrl_c import wait_interruptibly
from ..rpc.execution.futures import copy_error, printable_text, without_frames
from ..rpc.profiling.extension import run_profiled
from ..rpc.wire.failures import with_traceback_as_text

__all__ = [
    "AwaitedValue",
    "GlobalId",
    "OwnedValue",
    "OwnerTable",
    "ValueServer",
    "ValueTimeoutError",
    "id_source",
    "name_needed",
]


MAX_DELETED_EARLY = 1 << 12
"""Forks that were deleted before the message that makes their value was looked at, of which is known."""

MAX_AWAITED = 1 << 16
"""Values of one creator that may be named before they are created: by default, no more calls are in flight."""

WITHOUT_FINALIZER = frozenset({torch.Tensor, int, float, bool, str, bytes, type(None)})
"""Classes of values that are deleted where their last fork is, without waking a thread."""

MAX_WAITING_BYTES = 4096
"""Bytes of the arguments of a creation whose answer may wait: until then, they are in flight."""

log = logging.getLogger(__name__)


@final
class GlobalId(tuple[int, int]):
    """The id of the worker that made it, and a number that this worker counts up, made of a pair of both.

    No NamedTuple: each would be made by a function in Python, some hundred times in a step of a pipeline.
    """

    __slots__ = ()

    worker: int = property(itemgetter(0))  # type: ignore[assignment]
    number: int = property(itemgetter(1))  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.worker}, local_id={self.number})"

    @classmethod
    def from_payload(cls, payload: object) -> "GlobalId":
        """Returns the id that another worker has sent as a tuple. Raises ValueError if it is none."""
        if isinstance(payload, tuple) and len(payload) == 2:
            worker, number = payload
            if type(worker) is int and type(number) is int:
                return cls((worker, number))
        raise ValueError(f"malformed id: {reprlib.repr(payload)}")

    @classmethod
    def pair_from_payload(cls, payload: object) -> "tuple[GlobalId, GlobalId]":
        """Returns the two ids that another worker has sent as one tuple. Raises ValueError if it is none."""
        if isinstance(payload, tuple) and len(payload) == 4:
            first, number, second, other = payload
            if type(first) is type(number) is type(second) is type(other) is int:
                return cls((first, number)), cls((second, other))
        raise ValueError(f"malformed ids: {reprlib.repr(payload)}")

    @classmethod
    def from_proto(cls, message: agent_pb2.GlobalId | agent_pb2.Reference) -> "GlobalId":
        """Returns the id in a protobuf message: of a reference, that of the value."""
        return cls((message.worker_id, message.number))


def id_source(worker: int) -> Callable[[], GlobalId]:
    """Returns a function in C that makes the ids of one worker. Safe to use from any thread."""
    return map(GlobalId, zip(itertools.repeat(worker), itertools.count(), strict=False)).__next__


def name_needed(identifiers: Sequence[GlobalId], envelope: agent_pb2.Envelope) -> None:
    """Has a request wait, where it arrives, for values of that worker: without a thread, until its timeout."""
    needed = envelope.needed_values
    for worker, number in identifiers:
        needed.add(worker_id=worker, number=number)


class _TooManyAwaitedError(LimitReachedError, RRefError):
    """Too many values of one creator are named before they are created."""


class ValueTimeoutError(Exception):
    """A value was not there in time."""


@final
class OwnedValue:
    """The entry of one value: it is pending, set, or failed."""

    __slots__ = (
        "__weakref__",
        "_futures",
        "_outcomes",
        "_waiters",
        "forks",
        "id",
        "is_asked_for",
        "is_created",
        "must_ask_again",
    )

    def __init__(self, identifier: GlobalId) -> None:
        self.id = identifier
        self.is_created = False
        """Whether the creating message has arrived, and waits for nothing."""
        self.is_asked_for = False
        """Whether its creator is being asked whether that message will arrive."""
        self.must_ask_again = False
        """Whether to ask again after the answer, which the creator may have given too early."""
        self.forks: dict[GlobalId, int] = {}
        """The worker that holds each fork."""
        # The first item of each of these lists counts. So neither needs a lock.
        self._outcomes: list[tuple[Any, Exception | None]] = []
        """The value, or the error of the call that makes it."""
        self._futures: list[Future[Any]] = []
        """The future of the outcome, once somebody waits for it: it takes longer to make than the rest."""
        self._waiters: dict[Callable[[], None], None] = {}
        """Called when `is_created` is set, and when the outcome is there."""

    @property
    def outcome(self) -> tuple[Any, Exception | None] | None:
        """The value and the error, of which one is None; None while the entry is pending."""
        return self._outcomes[0] if self._outcomes else None

    @property
    def future(self) -> Future[Any]:
        """The future of the value."""
        if not self._futures:
            self._futures.append(Future())
        future = self._futures[0]
        if self._outcomes:
            self._complete(future)
        return future

    def state(self) -> str:
        """Returns the state in words: `here`, `pending`, or `failed: ` and the class of the error."""
        if (outcome := self.outcome) is None:
            return "pending"
        return "here" if outcome[1] is None else f"failed: {type(outcome[1]).__name__}"

    def may_have_finalizer(self) -> bool:
        """Returns whether code of the program may run when the value is deleted."""
        return bool(self._outcomes) and type(self._outcomes[0][0]) not in WITHOUT_FINALIZER

    def value(self) -> Any:
        """Returns the value, which must be there. Raises RRefError if it is not, or the error of the entry."""
        if not self._outcomes:
            raise RRefError(f"the value of reference {self.id} is not there, and the request does not wait for it")
        value, error = self._outcomes[0]
        if error is not None:
            raise copy_error(error) from error.__cause__
        return value

    def mark_created(self) -> None:
        """Sets `is_created`."""
        self.is_created = True
        self._wake()

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Has a function called, on any thread, when `is_created` is set, and when the outcome is there."""
        self._waiters[wake] = None

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        """Has the function not called any more."""
        self._waiters.pop(wake, None)

    def resolve(self, value: Any) -> None:
        """Sets the value, unless the entry has failed."""
        self._set((value, None))

    def fail(self, error: Exception) -> None:
        """Sets the error that all waiters get instead of the value, unless the value is set."""
        self._set((None, without_frames(error)))  # whose frames refer to this entry

    def _set(self, outcome: tuple[Any, Exception | None]) -> None:
        self._outcomes.append(outcome)
        del self._outcomes[1:]
        if self._futures:  # `future` looks at the outcome after it has set this
            self._complete(self._futures[0])
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            with contextlib.suppress(KeyError):  # another thread has taken the last one
                self._waiters.popitem()[0]()

    def _complete(self, future: Future[Any]) -> None:
        value, error = self._outcomes[0]
        with contextlib.suppress(InvalidStateError):  # it is complete
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def wait(self, seconds: float, blocking: Callable[[], AbstractContextManager[None]] = nullcontext) -> Any:
        """Waits for the value and returns it; if it is not there, in the context that `blocking` makes.

        Raises ValueTimeoutError if it is not there within these seconds, 0 for no timeout, or the entry's error.
        """
        if self.outcome is None:
            with blocking():
                wait_interruptibly(wait, [self.future], seconds or None)
        if self.outcome is None:
            raise ValueTimeoutError
        return self.value()


@final
@dataclass(frozen=True, slots=True, eq=False)
class AwaitedValue:
    """What a request waits for that names a value: see `Extension.wait_before_run`. Keeps the entry.

    entry: of the value.
    is_needed: whether it waits for the value, and not only for the message that creates it.
    """

    entry: OwnedValue
    is_needed: bool

    @property
    def is_over(self) -> bool:
        """Whether the value, or the message, is there, or never will be."""
        entry = self.entry
        return bool(entry._outcomes) or (entry.is_created and not self.is_needed)

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Has a function called when `is_over` may have changed."""
        self.entry.add_waiter(wake)

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        """Has the function not called any more."""
        self.entry.remove_waiter(wake)


@final
class OwnerTable:
    """The entries of one worker. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent) -> None:
        self._worker = agent.info.wire_id
        self._agent = agent
        self._lock = threading.Lock()
        self._forked: dict[GlobalId, OwnedValue] = {}
        """Entries with forks."""
        self._held: weakref.WeakValueDictionary[GlobalId, OwnedValue] = weakref.WeakValueDictionary()
        """Entries that handles of this worker keep, or that are awaited."""
        self._awaited: weakref.WeakValueDictionary[GlobalId, OwnedValue] = weakref.WeakValueDictionary()
        """Entries that other workers' messages named before the creating message arrived. They are kept by what
        waits for them, and by their forks."""
        self._deleted_early: OrderedDict[GlobalId, None] = OrderedDict()
        """The forks of creations that their creators have deleted before the creating message was looked at. It
        may still be, if the connection on which it arrived broke."""
        self._lost: dict[int, str] = {}
        """The reason of the loss of each lost worker, by id."""

    def __len__(self) -> int:
        """Returns the number of entries with forks."""
        return len(self._forked)

    def awaited_count(self) -> int:
        """Returns the number of entries that wait for their creating message."""
        return len(self._awaited)

    def fork_count(self) -> int:
        """Returns the number of forks of all entries."""
        with self._lock:
            return sum(len(entry.forks) for entry in self._forked.values())

    def forks_by_worker(self) -> Counter[int]:
        """Returns the number of forks that each worker holds, by its id."""
        with self._lock:
            return Counter(worker for entry in self._forked.values() for worker in entry.forks.values())

    def create(self, identifier: GlobalId) -> OwnedValue:
        """Returns a new entry that this worker makes by itself."""
        with self._lock:
            entry = self._held[identifier] = OwnedValue(identifier)
            return entry

    def note_handle(self, entry: OwnedValue) -> None:
        """Notes that a handle of this worker keeps an entry, also without forks."""
        with self._lock:
            self._held[entry.id] = entry

    def get(self, identifier: GlobalId) -> OwnedValue:
        """Returns an entry; a pending one if it is yet to be created, for which its creator is asked.

        Raises RRefError if it never will be.
        """
        entry = self._forked.get(identifier)
        if entry is None:
            with self._lock:
                entry = self._get(identifier)
        if not entry.is_created:
            self.ask_creator(entry)
        return entry

    def is_there(self, identifier: GlobalId) -> bool:
        """Returns whether the value with this id has forks, and is there or has failed; takes no lock."""
        entry = self._forked.get(identifier)
        return entry is not None and bool(entry._outcomes)

    def mark_created(self, entry: OwnedValue) -> None:
        """Notes that the creating message has arrived."""
        with self._lock:
            self._mark_created(entry)

    def begin_creation(self, identifier: GlobalId, fork: GlobalId, holder: int) -> OwnedValue:
        """Notes that the creating message has arrived, and counts its fork. Raises RRefError if it had before."""
        with self._lock:
            known = self._forked.get(identifier) or self._held.get(identifier)
            if known is not None and known.is_created:
                raise RRefError(f"reference {identifier} is in use already")
            if self._deleted_early and self._deleted_early.pop(fork, self) is None:
                raise RRefError(f"reference {identifier} has been deleted")
            entry = self._add_fork(identifier, fork, holder, is_awaited=False)
            self._mark_created(entry)
            return entry

    def add_fork(self, identifier: GlobalId, fork: GlobalId, holder: int) -> OwnedValue:
        """Counts a fork, and returns the entry. Raises RRefError if the holder is lost or another, or as `get`."""
        with self._lock:
            return self._add_fork(identifier, fork, holder)

    def remove_fork(self, identifier: GlobalId, fork: GlobalId, holder: int) -> None:
        """Removes a fork, unless it was with a lost holder, and has the entry deleted with its last one.

        Raises RRefError if another worker holds the fork.
        """
        with self._lock:
            entry = self._forked.get(identifier)  # lives longer than the lock is held: values may have finalizers
            if entry is not None and fork in entry.forks:
                if entry.forks[fork] != holder:
                    raise RRefError(f"fork {fork} of reference {identifier} belongs to another worker")
                self._remove_fork(entry, fork)
            if (entry is None or not entry.is_created) and identifier.worker == fork.worker == holder:
                self._deleted_early[fork] = None
                if len(self._deleted_early) > MAX_DELETED_EARLY:
                    self._deleted_early.popitem(last=False)
        if entry is not None and not entry.forks and entry.may_have_finalizer():
            # Not here: a control message that waited for other workers would hold up calls, and other messages.
            last = [entry]
            del entry
            self._agent.submit(last.clear)

    def forks_made_here(self, holder: int) -> list[tuple[GlobalId, GlobalId]]:
        """Returns the ids of the values and forks that this worker has passed on and that a worker still has."""
        with self._lock:
            return [
                (entry.id, fork)
                for entry in self._forked.values()
                for fork, worker in entry.forks.items()
                if worker == holder and fork.worker == self._worker
            ]

    def ask_creator(self, entry: OwnedValue) -> None:
        """Asks the creator of an awaited value whether its creating message is still to arrive.

        If it is not, the entry fails. The question also makes this worker notice the loss of the creator.
        """
        if entry.is_created or entry.id.worker == self._agent.info.wire_id:
            return
        # In this order, without a lock: `answered` looks at this after it has cleared `is_asked_for`. Two threads
        # may both ask, of which one would do.
        entry.must_ask_again = True
        if entry.is_asked_for:
            return
        entry.is_asked_for = True
        entry.must_ask_again = False
        creator, identifier = self._agent.incarnation(entry.id.worker), entry.id

        def answered(error: Exception | None) -> None:
            entry.is_asked_for = False
            # Mostly the creating message has arrived meanwhile, and the value has been deleted since.
            if isinstance(error, RRefError) and self._fail_awaited(identifier, error):
                log.warning("a message names a value that will not be created: %s", printable_text(error))
            elif entry.must_ask_again:
                self.ask_creator(entry)

        self._agent.control.send(creator, "rref.await", tuple(identifier), answered, expected=(RRefError,))

    def _fail_awaited(self, identifier: GlobalId, error: RRefError) -> bool:
        """Fails an entry whose creating message will not arrive; returns False if it has by now."""
        with self._lock:
            entry = self._awaited.pop(identifier, None)
            if entry is None:
                return False
            entry.forks.clear()
            self._forked.pop(identifier, None)
        entry.fail(error)
        return True

    def remove_worker(self, worker: int, reason: str) -> None:
        """Removes the forks of a lost worker, and fails the entries that it has yet to create."""
        with self._lock:
            self._lost[worker] = reason
            entries = self._entries()
            for identifier in [i for i in list(self._awaited) if i.worker == worker]:
                self._awaited.pop(identifier, None)
            for entry in entries:
                for fork in [fork for fork, holder in entry.forks.items() if holder == worker]:
                    self._remove_fork(entry, fork)
        for entry in entries:
            if entry.id.worker == worker and not entry.is_created:
                entry.fail(RRefError(f"reference {entry.id} was never created: its creator is lost ({reason})"))

    def clear(self, error: Exception) -> None:
        """Removes all entries. Those that are pending fail with the error."""
        with self._lock:
            pending = [entry for entry in self._entries() if entry.outcome is None]
            forked, self._forked = self._forked, {}
            self._awaited.clear()
        forked.clear()  # outside the lock: values may have finalizers
        for entry in pending:
            entry.fail(error)

    # With the lock.

    def _mark_created(self, entry: OwnedValue) -> None:
        self._awaited.pop(entry.id, None)
        entry.mark_created()

    def _add_fork(
        self, identifier: GlobalId, fork: GlobalId, holder: int, *, is_awaited: bool = True
    ) -> OwnedValue:
        if holder in self._lost:
            raise RRefError(f"the worker that holds fork {fork} is lost: {self._lost[holder]}")
        entry = self._get(identifier, is_awaited=is_awaited)
        if entry.forks.setdefault(fork, holder) != holder:
            raise RRefError(f"fork {fork} of reference {identifier} belongs to another worker")
        self._forked[identifier] = entry
        return entry

    def _entries(self) -> list[OwnedValue]:
        """Returns all entries."""
        return list({**self._held, **self._forked}.values())

    def _get(self, identifier: GlobalId, *, is_awaited: bool = True) -> OwnedValue:
        entry = self._forked.get(identifier) or self._held.get(identifier)
        if entry is None:
            if identifier.worker == self._worker:
                raise RRefError(f"reference {identifier} is gone: its owner has deleted the value")
            if identifier.worker in self._lost:
                raise RRefError(
                    f"reference {identifier} is gone: its creator is lost ({self._lost[identifier.worker]})"
                )
            self._check_creator(identifier.worker)
            entry = OwnedValue(identifier)
            if is_awaited:
                self._held[identifier] = self._awaited[identifier] = entry
        return entry

    def _check_creator(self, worker: int) -> None:
        """Raises RRefError if a value of this creator cannot be awaited."""
        if not self._agent.is_member(worker):
            raise RRefError(f"there is no worker {worker} to create a reference")
        if (
            len(self._awaited) >= MAX_AWAITED
            and sum(i.worker == worker for i in list(self._awaited)) >= MAX_AWAITED
        ):
            raise _TooManyAwaitedError(
                f"too many references of worker {worker} are named before they are created",
                f"MAX_AWAITED={MAX_AWAITED}",
            )

    def _remove_fork(self, entry: OwnedValue, fork: GlobalId) -> None:
        del entry.forks[fork]
        if not entry.forks:
            self._forked.pop(entry.id, None)


@final
class ValueServer:
    """Serves the values of one owner to other workers."""

    def __init__(self, agent: RpcAgent, table: OwnerTable) -> None:
        self._agent = agent
        self._table = table

    def awaited_by(self, envelope: agent_pb2.Envelope) -> list[AwaitedValue]:
        """Returns what a request waits for: see `Extension.wait_before_run`.

        That is each value which it needs and which is not there. Of a reference that it passes on, only the
        creating message is: functions may take references to values that come later, or never.
        """
        awaited = []
        for needed in envelope.needed_values:
            identifier = GlobalId((needed.worker_id, needed.number))
            if not self._table.is_there(identifier):
                awaited += self._awaited_value(identifier, is_needed=True)
        me = self._agent.info.wire_id
        for each in envelope.references:
            if each.owner == me:
                awaited += self._awaited_value(GlobalId((each.worker_id, each.number)), is_needed=False)
        return awaited

    def _awaited_value(self, identifier: GlobalId, *, is_needed: bool) -> list[AwaitedValue]:
        """Returns what waits for a value, if that is to come. If there is no such value, the request finds out."""
        try:
            awaited = AwaitedValue(self._table.get(identifier), is_needed)
        except RRefError:
            return []
        return [] if awaited.is_over else [awaited]

    def begin_creation(self, message: Incoming) -> OwnedValue:
        """Returns the entry of the value that an arriving RREF_CREATE message is to make, which must be new."""
        created, source = message.envelope.created, message.source.wire_id
        identifier, fork = GlobalId((created.worker_id, created.number)), GlobalId((source, created.fork))
        if identifier.worker != source or created.owner != self._agent.info.wire_id:
            raise ValueError(f"malformed creation: {identifier} with fork {fork}, sent by worker {source}")
        if source != self._agent.info.wire_id:
            return self._table.begin_creation(identifier, fork, source)
        entry = self._table.get(identifier)
        self._table.mark_created(entry)
        return entry

    def serve_creation(self, message: Incoming, entry: OwnedValue) -> Deferred | Confirmation | None:
        """Runs a call and keeps its result. Answers when the call has ended, successfully or not."""
        try:
            function, args, kwargs = message.value
            result = run_profiled(message, run_function, function, args, kwargs)
        except Exception as error:
            log_failure(message, error)
            message.failure = error
            self.fail(entry, error)
            return None
        except BaseException as error:  # such as SystemExit: it ended the call, not this worker
            log_failure(message, error)
            message.failure = error
            entry.fail(RemoteError(self._agent.info.name, f"{type(error).__name__}: {error}", ""))
            return None
        if not isinstance(result, Deferred):
            # With a profile, the answer has its events.
            can_wait = message.envelope.answer_can_wait and not message.envelope.HasField("profile")
            if can_wait and message.nbytes <= MAX_WAITING_BYTES:
                # The answer first: see `_confirm_creation`.
                return Confirmation(partial(entry.resolve, result))
            entry.resolve(result)
            return None
        has_ended: Future[None] = Future()

        def settle(done: Future[Any]) -> None:
            if isinstance(error := done.exception(), Exception):
                message.failure = error
                self.fail(entry, error)
            else:
                entry.resolve(done.result())
            has_ended.set_result(None)

        result.future.add_done_callback(settle)
        return Deferred(has_ended)

    def serve_fetch(self, message: Incoming) -> Any:
        """Answers with the value, for which the request has waited: the handler of RREF_FETCH."""
        if len(message.envelope.needed_values) != 1:
            raise ValueError("malformed message: it does not name one value")
        needed = message.envelope.needed_values[0]
        entry = self._table.get(GlobalId((needed.worker_id, needed.number)))
        outcome = entry.outcome
        if outcome is None or outcome[1] is None:
            return entry.value()
        return Deferred(entry.future)  # which is done; a raise would add a frame to an error that is kept

    def fail(self, entry: OwnedValue, error: Exception) -> None:
        """Fails an entry with an error of this worker, whose traceback goes with it as text."""
        entry.fail(with_traceback_as_text(error, self._agent.info.name))
