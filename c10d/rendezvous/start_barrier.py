"""The barrier at which the members of a static group wait for each other, or learn why the group cannot form.

Everything goes through the store. Each member registers: that shows whether two processes have one rank, or were
given different world sizes. Then each member writes a record and waits for the outcome of the round. Whoever finds
all records, or finds a conflict, publishes the outcome.

One store may serve several groups, one after the other, and failed attempts. Each attempt is a round, counted from
0. A round ends with an outcome, which is published once, by compare-and-set, so that all processes read the same:
success, a failure, or a conflict between two processes. A conflict is also reported to every process that arrives
after it.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn, Self, final

from ...errors import RendezvousError
from ...net.exchanged_values import parse_dict, parse_list, unexpected_value
from ...net.host_identity import network_id
from ...net.security import printable, printable_lines
from ...net.waiting import wait_with_warnings
from ..stores.file import FileStore
from ..stores.tcp import TCPStore
from ..stores.views import describe_store, innermost_store, wait_for_keys
from ..torch_types import TorchStore, TorchTCPStore

__all__ = ["GroupKind", "Outcome", "Registration", "StartBarrier"]

HOST_LINGER_S = 1.0
"""Seconds for which the store's host stays after a failure, so that the other members can read the reason."""

MAX_NAMED_RANKS = 32

MAX_ERROR_CHARACTERS = 16 * 1024
"""Characters that are shown of why a round has failed, which may name many members."""

TOLD_WITHIN_S, POLLED_WITHIN_S, ANSWERED_WITHIN_S = 0.01, 0.02, 0.002
"""Seconds in which a member learns what another one has written: from a store that tells those who wait, from one
that they look at again and again; and the seconds that the store takes for one of them, on a busy host."""

log = logging.getLogger(__name__)

_NONE: Final = "nobody"
"""No registration. A compare-and-set from it to itself reads a key without waiting."""

_STALE_HINT: Final = (
    ". If that was an earlier run, this store is left over from it: use a new one (another file, port or prefix)"
)


@final
@dataclass(frozen=True, slots=True)
class GroupKind:
    """The kind of a group that forms. Groups of different kinds can use one store independently.

    key: part of the store's keys; may be empty.
    how_to_allow: how the caller allows addresses that are not loopback addresses, for messages.
    may_rejoin: whether a process may have the rank of one that was in a group which has formed. It is not
        registered then: the caller finds out what has become of the other one.
    """

    key: str = ""
    how_to_allow: str = "pass insecure=True"
    may_rejoin: bool = False


_DEFAULT_KIND: Final = GroupKind()


@cache
def _process_id(_pid: int) -> str:
    """Returns a random id of this process, different in its forks."""
    return uuid.uuid4().hex


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Who a process is in the group that it joins.

    name: of the worker; empty if it has none.
    rank: -1 if not given.
    world_size: -1 if not given, for a dynamic group.
    process: a random id, different for all processes.
    description: of the process, for messages.
    """

    name: str = ""
    rank: int
    world_size: int
    process: str = field(default_factory=lambda: _process_id(os.getpid()))
    description: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")

    def __str__(self) -> str:
        if self.name:
            return f"{self.name!r} (rank {self.rank}, {self.description})"
        return f"rank {self.rank} ({self.description})"

    @property
    def without_rank(self) -> str:
        """The worker's name and process, for messages that have its rank already."""
        return f"{self.name!r} ({self.description})" if self.name else self.description

    def to_json(self) -> str:
        """Returns the value for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads the result of `to_json`. Raises RendezvousError if `text` is something else."""
        kinds = {"name": str, "rank": int, "world_size": int, "process": str, "description": str}
        try:
            found = parse_dict(text, kinds)
        except ValueError:
            raise RendezvousError(unexpected_value(text, "a worker's registration")) from None
        return cls(**{**found, "name": printable(found["name"]), "description": printable(found["description"])})


class Outcome(NamedTuple):
    """How a round has ended.

    error: why no group can form; empty if all members have arrived.
    is_conflict: whether later processes must hear of the error too. A timeout concerns only those that waited.
    """

    error: str
    is_conflict: bool = True

    @classmethod
    def from_json(cls, text: bytes | str) -> "Outcome":
        """Reads an outcome from the store. Raises RendezvousError if `text` is something else."""
        try:
            error, is_conflict = parse_list(text, str, bool)
        except ValueError:
            raise RendezvousError(unexpected_value(text, "the outcome of a rendezvous")) from None
        return cls(printable_lines(error, MAX_ERROR_CHARACTERS), is_conflict)


@final
class StartBarrier:
    """One member's side of the barrier: call `register`, then `wait` for each exchange of records."""

    def __init__(self, store: TorchStore, registration: Registration, kind: GroupKind = _DEFAULT_KIND) -> None:
        self._store = store
        self.registration: Final = registration
        self._prefix = "/".join(filter(None, ("gradwire/rendezvous", kind.key)))
        self._round = 0
        self._max_world_size = registration.world_size
        self._hosts_store = False
        self._own_keys: set[str] = set()

    def predecessor(self) -> Registration | None:
        """Returns the process that had this member's rank in a group that has formed; None without one."""
        self._begin_round()
        holder = self._registered_rank(self.registration.rank)
        if holder is None or holder.process == self.registration.process:
            return None
        return None if self._store.check([self._key("present", holder.process)]) else holder

    def former_records(self) -> Iterator[list[bytes]]:
        """Yields the records of earlier rounds that were successful, by rank; those of the latest round first."""
        size = self.registration.world_size
        for number in reversed(range(self._round)):
            keys = [self._key("record", rank, number=number) for rank in range(size + 1)]
            outcome = self._key("outcome", number=number)
            if not self._store.check([*keys[:size], outcome]) or self._store.check([keys[size]]):
                continue  # nobody, or a group of another size
            if not Outcome.from_json(self._store.get(outcome)).error:
                yield self._read(keys[:size])

    def succeed(self, predecessor: Registration) -> None:
        """Registers this member for its rank in the place of a process that has ended, if that still has it."""
        key = self._rank_key(self.registration.rank)
        text = self._store.compare_set(key, _NONE, _NONE).decode()
        if text != _NONE and Registration.from_json(text).process == predecessor.process:
            self._store.compare_set(key, text, self.registration.to_json())
            self._own_keys.add(key)

    def register(self) -> None:
        """Registers this member.

        Raises RendezvousError if another process conflicts with this one; so do all members that wait here, or
        arrive later.
        """
        me = self.registration
        is_dynamic = me.world_size == -1
        if not is_dynamic:
            self._begin_round()
        # Before the other keys: a process in conflict with this one looks here whether this one is about to start.
        self._store.set(self._key("present", me.process), "")
        self._check_world_size(self._register_key(self._key("world_size")))
        if is_dynamic:
            return  # a dynamic group itself keeps ranks unique
        holder = self._register_key(self._rank_key(me.rank))
        if holder.process != me.process:
            self._report_conflict(holder, self._duplicate_rank(holder))
        self._hosts_store = me.rank == 0

    def check_rank_conflict(self) -> None:
        """Raises RendezvousError, on all members, if another process has registered this member's rank."""
        holder = self._registered_rank(self.registration.rank)
        if holder is not None and holder.process != self.registration.process:
            self._begin_round()
            self._report_conflict(holder, self._duplicate_rank(holder))

    def register_name(self, name: str) -> Registration:
        """Registers a name for this round. Returns who has it: this member if the name was free."""
        return self._register_key(self._key("name", name))

    def wait(self, record: str, seconds: float, check: Callable[[list[bytes]], str] = lambda _: "") -> list[bytes]:
        """Writes a record, and waits until all members have.

        Returns the records, by rank. Raises RendezvousError if members are missing after some seconds, or if
        `check` returns what conflicts in the records; all members raise the same.
        """
        keys = [self._key("record", rank) for rank in range(self.registration.world_size)]
        try:
            self._store.set(keys[self.registration.rank], record)
            if not self._publish_if_complete(keys, check):
                arrived = wait_with_warnings(
                    lambda left: self._has_outcome(left) or self._publish_if_complete(keys, check),
                    seconds,
                    lambda: (
                        f"{self.registration} waits for {self._missing(keys)} at {describe_store(self._store)}"
                    ),
                )
                if not arrived:
                    self._publish(Outcome(self._timeout_message(keys, seconds), is_conflict=False))
            outcome = self._outcome()
            if outcome.error:
                self._raise_outcome(outcome)
            records = self._read(keys)
        except RendezvousError:
            raise
        except RuntimeError as error:
            raise RendezvousError(
                f"{self.registration} was waiting for the other members, but {describe_store(self._store)} "
                f"failed: {str(error).splitlines()[0]}. If another member hosts it, see why that member has ended"
            ) from error
        except BaseException as error:
            with suppress(RuntimeError):
                text = f"{self.registration} stopped waiting: {type(error).__name__}"
                self._publish(Outcome(text, is_conflict=False))
                self._unregister()
            raise
        self._round += 1
        return records

    def go_on_together(self, seconds: float) -> None:
        """Returns on all members at nearly the same time, when all of them have called it after their last `wait`.

        The last one tells the others a moment that is about to come, which those on its host wait for by the clock
        that they share: however the news travels, no member goes on long before another one. After some seconds it
        returns in any case, as one of them may have ended.
        """
        size, number = self.registration.world_size, self._round - 1
        ready, go = self._key("ready", number=number), self._key("go", number=number)
        is_told_at_once = isinstance(innermost_store(self._store), TCPStore | TorchTCPStore)
        notice = (TOLD_WITHIN_S if is_told_at_once else POLLED_WITHIN_S) + min(size * ANSWERED_WITHIN_S, 0.1)
        try:
            if self._store.add(ready, 1) >= size:
                self._store.set(go, json.dumps([network_id(), time.monotonic() + notice]))
            elif not wait_for_keys(self._store, [go], seconds):
                log.warning("%s does not wait any longer for the others to be ready", self.registration)
                return
            host, moment = parse_list(self._store.get(go), str, float)
        except (RuntimeError, ValueError) as error:  # who hosts the store may have ended
            log.warning("%s does not wait for the others to be ready: %s", self.registration, error)
            return
        if host == network_id():
            time.sleep(min(notice, max(0.0, moment - time.monotonic())))

    def fail(self, problem: str) -> NoReturn:
        """Ends the round for all members. Raises `problem`, or the error that another one reported before."""
        self.report_failure(problem)
        self._raise_outcome(Outcome(self._outcome().error or problem))

    def report_failure(self, problem: str) -> None:
        """Ends the round for the other members with this problem. Does not raise it."""
        self._publish(Outcome(problem + _STALE_HINT))

    # The round.

    def _begin_round(self) -> None:
        """Enters the open round. Raises an earlier round's conflict that this process has not seen yet."""
        counter, process = f"{self._prefix}/round", self.registration.process
        self._round = self._store.add(counter, 0)
        while self._store.check([self._key("outcome")]):
            outcome = self._outcome()
            if outcome.is_conflict and not self._store.check([self._key("seen_by", process)]):
                self._raise_outcome(outcome)
            following = str(self._round + 1)
            self._round = int(self._store.compare_set(counter, str(self._round), following))

    def _publish(self, outcome: Outcome) -> None:
        self._store.compare_set(self._key("outcome"), "", json.dumps(outcome))

    def _outcome(self) -> Outcome:
        return Outcome.from_json(self._store.get(self._key("outcome")))

    def _has_outcome(self, timeout_s: float) -> bool:
        return wait_for_keys(self._store, [self._key("outcome")], timeout_s)

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        store: Any = self._store  # torch's stubs lack these two methods
        return list(store.multi_get(list(keys))) if store.has_extended_api() else [store.get(key) for key in keys]

    def _key(self, *parts: object, number: int | None = None) -> str:
        return "/".join((self._prefix, str(self._round if number is None else number), *map(str, parts)))

    def _seen_keys(self, ranks: Iterable[int]) -> list[str]:
        """Returns the keys that are set once these ranks have read the outcome."""
        return [self._key("seen_by_rank", rank) for rank in ranks]

    def _check_world_size(self, first: Registration) -> None:
        """Compares this member's world size with that of the first member that registered."""
        me = self.registration
        self._max_world_size = max(me.world_size, first.world_size)
        if me.world_size == first.world_size:
            return
        text = f"{first} was started {_world_size_text(first)} and {me} {_world_size_text(me)}"
        if -1 in (me.world_size, first.world_size):
            mixed = "RPC group mixes statically and dynamically initialized members which is not supported"
            self._report_conflict(first, f"{mixed}: {text}")
        self._report_conflict(first, f"{text}: give all workers of a group the same")

    def _publish_if_complete(self, keys: Sequence[str], check: Callable[[list[bytes]], str]) -> bool:
        """Publishes the outcome if all records are there; returns whether they are."""
        if not self._store.check(list(keys)):
            return False
        problem = check(self._read(keys))
        self._publish(Outcome(problem and problem + _STALE_HINT, is_conflict=bool(problem)))
        return True

    def _report_conflict(self, other: Registration, problem: str) -> NoReturn:
        """Raises a conflict with another process; on all members, if the other process is about to start too."""
        # A group that is running already goes on, undisturbed by a process that arrives later.
        if other.world_size != -1 and not self._store.check([self._key("present", other.process)]):
            raise RendezvousError(problem + _STALE_HINT)
        self.fail(problem)

    def _raise_outcome(self, outcome: Outcome) -> NoReturn:
        """Records that this member has seen the outcome, keeps the store for the other members, and raises."""
        with suppress(RuntimeError):  # the store's host may have ended
            self._store.set(self._key("seen_by", self.registration.process), "")
            self._store.set(self._key("seen_by_rank", self.registration.rank), "")
            self._unregister()
        under = innermost_store(self._store)
        if isinstance(under, FileStore):
            if outcome.is_conflict:
                under.keep_file_until(self._seen_keys(range(self._max_world_size)))
        elif self._hosts_store and isinstance(under, TCPStore | TorchTCPStore):
            self._linger(outcome)
        raise RendezvousError(outcome.error)

    def _linger(self, outcome: Outcome) -> None:
        """Waits, on the store's host, until the other members have read the outcome, for at most HOST_LINGER_S."""
        with suppress(RuntimeError):  # they may never come
            ranks = range(1, self.registration.world_size)
            # Members that arrive after a conflict must hear of it; after a timeout they begin the next round.
            readers = [
                rank for rank in ranks if outcome.is_conflict or self._store.check([self._key("record", rank)])
            ]
            wait_for_keys(self._store, self._seen_keys(readers), HOST_LINGER_S)

    # Registrations.

    def _rank_key(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"

    def _register_key(self, key: str) -> Registration:
        """Writes this member's registration to a key, if it has none. Returns the registration there."""
        holder = Registration.from_json(self._store.compare_set(key, "", self.registration.to_json()))
        if holder.process == self.registration.process:
            self._own_keys.add(key)
        return holder

    def _registered_rank(self, rank: int) -> Registration | None:
        # Not by `check` and `get`: the key may be deleted between the two, and `get` would wait for it.
        text = self._store.compare_set(self._rank_key(rank), _NONE, _NONE)
        return None if text == _NONE.encode() else Registration.from_json(text)

    def _unregister(self) -> None:
        """Deletes this member's registrations, so that another attempt through this store does not find them."""
        while self._own_keys:
            self._store.delete_key(self._own_keys.pop())

    # Messages.

    def _duplicate_rank(self, holder: Registration) -> str:
        me = self.registration
        both = f"{holder.without_rank} and {me.without_rank}"
        if holder.without_rank == me.without_rank:
            both += " (of another container with this host name)"
        return f"two workers have rank {me.rank}: {both}; give each its own"

    def _missing(self, keys: Sequence[str]) -> str:
        """Names the members without a record, and says which of them have registered."""
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        named = [str(rank) for rank in missing[:MAX_NAMED_RANKS]] + ["…"] * (len(missing) > MAX_NAMED_RANKS)
        text = f"rank{'s' * (len(missing) != 1)} {', '.join(named)} of {len(keys)}"
        registered = list(filter(None, map(self._registered_rank, missing[:MAX_NAMED_RANKS])))
        if registered:
            text += f" ({', '.join(map(str, registered))} has registered, but is not ready)"
        return text

    def _timeout_message(self, keys: Sequence[str], seconds: float) -> str:
        missing = self._missing(keys)
        arrived = [rank for rank, key in enumerate(keys) if self._store.check([key])][:MAX_NAMED_RANKS]
        registered = filter(None, map(self._registered_rank, arrived))
        return (
            f"{missing} did not join within {seconds:g} s at {describe_store(self._store)}; "
            f"these joined: {', '.join(map(str, registered))}"
        )


def _world_size_text(registration: Registration) -> str:
    return (
        "without a world_size" if registration.world_size == -1 else f"with world_size={registration.world_size}"
    )
