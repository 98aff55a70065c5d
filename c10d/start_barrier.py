"""Where the members of a group wait for each other at start, and learn together why it cannot be made.

Everything is in the store. The members register: who has claimed a rank, or said another world size, is found
there. Then each leaves a record and waits for one key, `settled`. Whoever finds all records sets it to "all are
here", whoever finds a contradiction to a text, which all raise. It is set once, by compare-and-set, so all read
the same.

A store may serve several groups one after the other, and attempts that failed. They are rounds, counted from 0: a
round that is settled is over. What a contradiction has ended is still told to each process that comes to it late.
"""

import json
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final, NoReturn, Self, final

from ..errors import RendezvousError
from .addresses import format_address, is_loopback
from .stores.file import FileStore
from .stores.tcp import TCPStore
from .stores.torch_store import wait as wait_for_keys
from .torch_types import TorchStore, TorchTCPStore
from .waiting import wait_with_warnings

__all__ = ["Claim", "Purpose", "StartBarrier", "describe_store", "innermost"]

LINGER_SECONDS = 1.0
"""How long the host of the store stays after a group has failed, for others to read there why."""

NOBODY: Final = "nobody"
"""No claim; what a compare-and-set of it finds is left as it is."""

STALE: Final = (
    ". If that was an earlier run, this store is left over from it: use a new one (another file, port or prefix)"
)


@cache
def _process_id(_pid: int) -> str:
    """Names this process (not its forks), differently from all others that ever were."""
    return uuid.uuid4().hex


@final
@dataclass(frozen=True, slots=True)
class Purpose:
    """What kind of group meets; groups of different kinds may meet at one store without disturbing each other.

    key: of this kind in the store; may be empty.
    consent: how the caller allows addresses that are not loopback ones, for messages.
    """

    key: str = ""
    consent: str = "pass insecure=True"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a process says of itself when it registers.

    name: of the worker; empty if it has none. rank, world_size: -1 if it has not said any.
    process: unique among all processes that ever were. shown: of the process, for people.
    """

    name: str = ""
    rank: int
    world_size: int
    process: str = field(default_factory=lambda: _process_id(os.getpid()))
    shown: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")

    def __str__(self) -> str:
        return (
            f"{self.name!r} (rank {self.rank}, {self.shown})" if self.name else f"rank {self.rank} ({self.shown})"
        )

    @property
    def without_rank(self) -> str:
        """Who this is, where the rank has been said."""
        return f"{self.name!r} ({self.shown})" if self.name else self.shown

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Of what `to_json` made. Raises RendezvousError if it is something else."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            raise RendezvousError(
                f"the store has {text[:80]!r} where a worker says who it is: install the same gradwire everywhere"
            ) from None


@final
class StartBarrier:
    """One member's side of the barrier: `register`, then `wait`, as often as the members exchange records."""

    def __init__(self, store: TorchStore, claim: Claim, purpose: Purpose = Purpose()) -> None:
        self._store = store
        self._claim = claim
        self._prefix = "/".join(filter(None, ("gradwire/rendezvous", purpose.key)))
        self._round = 0
        self._largest = claim.world_size
        self._hosts = False
        self._claimed: set[str] = set()

    @property
    def claim(self) -> Claim:
        """Who this member is."""
        return self._claim

    def register(self) -> None:
        """Says who this is.

        Raises:
            RendezvousError: another process contradicts; all who wait here, or come later, raise the same.
        """
        me = self._claim
        if me.world_size != -1:
            self._begin_round()
        # Before the claims: who contradicts one looks here whether its process is about to start.
        self._store.set(self._key("present", me.process), "")
        size = self._claim_key(self._key("world_size"))
        self._largest = max(me.world_size, size.world_size)
        if -1 in (me.world_size, size.world_size) and me.world_size != size.world_size:
            self._contradict(
                size,
                "RPC group mixes statically and dynamically initialized members which is not supported: "
                f"{size} was started {_with(size.world_size)}, {me} {_with(me.world_size)}",
            )
        if me.world_size != size.world_size:
            self._contradict(
                size,
                f"{size} was started with world_size={size.world_size} and {me} with "
                f"world_size={me.world_size}: give all workers of a group the same",
            )
        if me.world_size == -1:
            return  # a dynamic group itself sees to it that ranks do not clash
        holder = self._claim_key(self._rank_key(me.rank))
        if holder.process != me.process:
            self._contradict(holder, self._two_of_one_rank(holder))
        self._hosts = me.rank == 0

    def check_rival(self) -> None:
        """Contradicts who has this member's rank already, if there is one; else does nothing."""
        holder = self._holder(self._claim.rank)
        if holder is not None and holder.process != self._claim.process:
            self._begin_round()
            self._contradict(holder, self._two_of_one_rank(holder))

    def wait(self, record: str, seconds: float, check: Callable[[list[bytes]], str] = lambda _: "") -> list[bytes]:
        """Leaves a record, and waits until all members have.

        Args:
            record: for the others.
            seconds: how long they may take.
            check: what contradicts in the records of all members; "" if nothing does.

        Returns:
            The records by rank.

        Raises:
            RendezvousError: they did not come, or a contradiction was found; all raise the same.
        """
        keys = [self._key("record", rank) for rank in range(self._claim.world_size)]
        try:
            self._store.set(keys[self._claim.rank], record)
            if not self._settle_if_all(keys, check):
                came = wait_with_warnings(
                    lambda left: self._is_settled(left) or self._settle_if_all(keys, check),
                    seconds,
                    lambda: f"{self._claim} waits for {self._missing(keys)} at {describe_store(self._store)}",
                )
                if not came:
                    self._settle(self._too_late(keys, seconds), lasting=False)
            outcome = self._outcome()
            if outcome["error"]:
                self._hear(**outcome)
            records = self._read(keys)
        except RendezvousError:
            raise
        except RuntimeError as error:
            raise RendezvousError(
                f"{self._claim} waited for the others at {describe_store(self._store)}, which fails: "
                f"{str(error).splitlines()[0]}. If another member hosts it, that one has ended, and says why"
            ) from error
        except BaseException as error:
            with suppress(RuntimeError):
                self._settle(f"{self._claim} does not wait any longer: {type(error).__name__}", lasting=False)
                self._withdraw()
            raise
        self._round += 1
        return records

    def take_name(self, name: str) -> Claim:
        """Claims a name in this round; who has it, which is this member if the name was free."""
        return self._claim_key(self._key("name", name))

    def fail(self, problem: str) -> NoReturn:
        """Ends the round for everybody. Raises RendezvousError, of the first problem if others have found any."""
        self.tell(problem)
        self._hear(self._outcome()["error"] or problem)

    def tell(self, problem: str) -> None:
        """Ends the round for the others, with this problem; raises nothing of its own."""
        self._settle(problem + STALE, lasting=True)

    # The rounds.

    def _begin_round(self) -> None:
        """Finds the round that is open. Raises why one before was ended, if this process has not heard it yet."""
        counter = f"{self._prefix}/round"
        self._round = self._store.add(counter, 0)
        while self._store.check([self._key("settled")]):
            outcome = self._outcome()
            if outcome["lasting"] and not self._store.check([self._key("told", self._claim.process)]):
                self._hear(outcome["error"])
            after = str(self._round + 1)
            self._round = int(self._store.compare_set(counter, str(self._round), after))

    def _settle(self, error: str, *, lasting: bool) -> None:
        """Ends the round, unless it has ended before."""
        self._store.compare_set(self._key("settled"), "", json.dumps({"error": error, "lasting": lasting}))

    def _outcome(self) -> dict[str, Any]:
        """What `_settle` was called with: why the round has failed, empty if it went well."""
        outcome: dict[str, Any] = json.loads(self._store.get(self._key("settled")))
        return outcome

    def _is_settled(self, seconds: float) -> bool:
        return wait_for_keys(self._store, [self._key("settled")], seconds)

    def _settle_if_all(self, keys: Sequence[str], check: Callable[[list[bytes]], str]) -> bool:
        """Settles the round if all records are there."""
        if not self._store.check(list(keys)):
            return False
        problem = check(self._read(keys))
        self._settle(problem and problem + STALE, lasting=bool(problem))
        return True

    def _hear(self, error: str, *, lasting: bool = True) -> NoReturn:
        """Notes that this member knows why the round has failed, and raises it."""
        with suppress(RuntimeError):  # the host may have given up waiting
            self._store.set(self._key("told", self._claim.process), "")
            self._store.set(self._key("heard", self._claim.rank), "")
            self._withdraw()
        under = innermost(self._store)
        if isinstance(under, FileStore):
            if lasting:
                under.keep_until([self._key("heard", rank) for rank in range(self._largest)])
        elif self._hosts and isinstance(under, TCPStore | TorchTCPStore):
            with suppress(RuntimeError):  # the others are not coming
                ranks = range(1, self._claim.world_size)
                # Who comes after a contradiction is to hear it; who comes after a timeout begins the next round.
                there = [rank for rank in ranks if lasting or self._store.check([self._key("record", rank)])]
                wait_for_keys(self._store, [self._key("heard", rank) for rank in there], LINGER_SECONDS)
        raise RendezvousError(error)

    def _withdraw(self) -> None:
        """So that another attempt through this store does not find this one's claims."""
        while self._claimed:
            self._store.delete_key(self._claimed.pop())

    # What is in the store.

    def _key(self, *parts: object) -> str:
        """Of this round."""
        return "/".join((self._prefix, str(self._round), *map(str, parts)))

    def _rank_key(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"

    def _claim_key(self, key: str) -> Claim:
        """Claims a key; who has it."""
        holder = Claim.from_json(self._store.compare_set(key, "", self._claim.to_json()))
        if holder.process == self._claim.process:
            self._claimed.add(key)
        return holder

    def _holder(self, rank: int) -> Claim | None:
        """Who has claimed a rank. Claims are withdrawn at any time, so `check` and `get` would wait for those."""
        text = self._store.compare_set(self._rank_key(rank), NOBODY, NOBODY)
        return None if text == NOBODY.encode() else Claim.from_json(text)

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        store: Any = self._store  # torch's stubs lack these two
        return list(store.multi_get(list(keys))) if store.has_extended_api() else [store.get(key) for key in keys]

    def _contradict(self, other: Claim, problem: str) -> NoReturn:
        """Raises a contradiction to another process, everywhere if that one is about to start as well."""
        # A group that runs already goes on, and hears nothing of who comes too late.
        if other.world_size != -1 and not self._store.check([self._key("present", other.process)]):
            raise RendezvousError(problem + STALE)
        self.fail(problem)

    # For people.

    def _two_of_one_rank(self, holder: Claim) -> str:
        me = self._claim
        shown = f"{holder.without_rank} and {me.without_rank}"
        if holder.without_rank == me.without_rank:
            shown += " (of another container with this host name)"
        return f"two workers have rank {me.rank}: {shown}; give each its own"

    def _missing(self, keys: Sequence[str]) -> str:
        """The members whose records are not there."""
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        shown = [str(rank) for rank in missing[:32]] + ["…"] * (len(missing) > 32)
        text = f"rank{'s' * (len(missing) != 1)} {', '.join(shown)} of {len(keys)}"
        claims = list(filter(None, map(self._holder, missing[:32])))
        return text + (f" ({', '.join(map(str, claims))} has registered, but is not ready)" if claims else "")

    def _too_late(self, keys: Sequence[str], seconds: float) -> str:
        missing = self._missing(keys)
        there = [rank for rank, key in enumerate(keys) if self._store.check([key])][:32]
        claims = filter(None, map(self._holder, there))
        return (
            f"{missing} did not join within {seconds:g} s at {describe_store(self._store)}; "
            f"there were {', '.join(map(str, claims))}"
        )


def innermost(store: Any) -> Any:
    """The store under whatever prefixes there are."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def describe_store(store: TorchStore) -> str:
    """Where members meet, for messages; of an address that only this host can reach, it says so."""
    under = innermost(store)
    if isinstance(under, FileStore):
        return f"the file {under.path}"
    if isinstance(under, TCPStore | TorchTCPStore):
        where = f"the TCPStore at {format_address(under.host, under.port)}"
        with suppress(RuntimeError):
            if is_loopback(under.host):
                return f"{where}, a loopback address, which only processes of this host can reach"
        return where
    return f"a {type(under).__name__}"


def _with(world_size: int) -> str:
    return "without a world_size" if world_size == -1 else f"with world_size={world_size}"
