"""The contexts that a worker has a part in, and which have ended, so that a late message does not open one again.

A worker creates contexts with ascending ids. So it can say which of its contexts have ended, however many, by the
next id and the few that are open: all others below have. Another worker remembers the ends that it learns of one
by one, and after every `ASK_AFTER` of them asks the creator, whose answer replaces what was remembered.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch

from ..errors import AutogradError, LimitReachedError, UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from .context import Context, creator_of
from .gradient_sender import PassId
from .gradients import GradSwapLock

__all__ = ["ASK_AFTER", "Contexts", "EndedContexts", "OpenContexts"]

T = TypeVar("T")

ASK_AFTER = 1024
"""Ends of contexts of one creator after which it is asked."""

MAX_NAMED = 1 << 14
"""Open contexts that a creator names in one answer. The oldest: it tells nothing about those after them."""

MAX_ENDED = 1 << 16
"""Ends that are remembered of the contexts of one creator, for as long as it does not answer."""

MAX_LEFT = 4096
"""The same of contexts of which a worker that has not created them has told that they have ended."""

MAX_JOINED_CONTEXTS = 1 << 14
"""Contexts that have not ended and that messages of one other worker have brought to a worker."""

MAX_REASON_CHARACTERS = 1024
"""Characters that are kept of how a creator was lost for another worker, which has told it."""


@final
@dataclass(frozen=True, slots=True)
class OpenContexts:
    """What a creator tells about its contexts: those with ids below one, except for some, have ended."""

    below: int
    ids: Set[int]

    @classmethod
    def of(cls, ids: Collection[int], following: int) -> "OpenContexts":
        """Makes it from the ids of all open contexts, and the id of the next one."""
        ascending = sorted(ids)
        below = ascending[MAX_NAMED] if len(ascending) > MAX_NAMED else following
        return cls(below, frozenset(ascending[:MAX_NAMED]))

    @classmethod
    def from_payload(cls, payload: object, sender: int) -> "OpenContexts":
        """Returns what a worker has sent. Raises ValueError if it is malformed, or not about its own contexts."""
        match payload:
            case (int(below), frozenset(ids)) if len(ids) <= MAX_NAMED and creator_of(below) == sender:
                if all(type(each) is int for each in ids):
                    return cls(below, ids)
        raise ValueError("malformed message: it does not tell which contexts are open")

    def exclude(self, identifier: int) -> bool:
        """Returns whether a context of the creator has ended."""
        return identifier < self.below and identifier not in self.ids


@dataclass(slots=True)
class _OfCreator:
    told: OpenContexts
    """What the creator has told last."""
    ended: OrderedDict[int, str | None] = field(default_factory=OrderedDict)
    """The contexts that have ended besides; and why, if another worker has lost the creator."""
    ends: int = 0
    """How many ends this worker has learnt of."""


@final
class EndedContexts:
    """The contexts that have ended on one worker. Used by one thread at a time."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """Args: ask: has a worker tell which of its contexts are open: see `learn`. Must not block."""
        self._ask = ask
        self._creators: dict[int, _OfCreator] = {}
        self._left: dict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """The contexts that have ended for another worker, which has not created them, by that worker."""

    def __len__(self) -> int:
        """The number of ends that are remembered one by one."""
        return sum(len(each.ended) for each in self._creators.values()) + sum(map(len, self._left.values()))

    def has_ended(self, creator: int, identifier: int) -> bool:
        """Returns whether a context of this creator has ended."""
        of = self._creators.get(creator)
        return of is not None and (identifier in of.ended or of.told.exclude(identifier))

    def has_left(self, worker: int, identifier: int) -> bool:
        """Returns whether a context has ended for another worker, which may not have created it."""
        return worker in self._left and identifier in self._left[worker]

    def add(self, creator: int, identifier: int, why: str | None = None) -> None:
        """Notes that a context of this creator has ended; and why, if the creator is lost for another worker."""
        of = self._of(creator)
        if (why or identifier not in of.ended) and not of.told.exclude(identifier):
            _remember(of.ended, identifier, MAX_ENDED, why)
        self._count(of, creator)

    def leave(self, worker: int, creator: int, identifier: int) -> None:
        """Notes that a context has ended for another worker, which has not created it."""
        if self.has_ended(creator, identifier):
            return
        _remember(self._left[worker], identifier, MAX_LEFT, None)
        if (of := self._creators.get(creator)) is not None:
            self._count(of, creator)

    def why(self, creator: int, identifier: int) -> str | None:
        """Returns why a context of this creator has ended, if `add` has noted that."""
        of = self._creators.get(creator)
        return None if of is None else of.ended.get(identifier)

    def know(self, creator: int) -> None:
        """Notes that a worker creates contexts of which messages come."""
        if creator not in self._creators:
            self._of(creator)

    def discard(self, worker: int) -> None:
        """Discards which contexts have ended for a worker that is lost."""
        self._left.pop(worker, None)

    def learn(self, creator: int, told: OpenContexts) -> None:
        """Takes what a creator tells about its contexts in the place of what was remembered."""
        of = self._of(creator)
        if told.below < of.told.below:
            return  # it was sent before
        if told.below == of.told.below:  # this one, or the last one, may be the older: no context opens again
            told = OpenContexts(told.below, told.ids & of.told.ids)
        of.told = told
        remembered: tuple[OrderedDict[int, Any], ...] = (of.ended, *self._left.values())
        for ended in remembered:
            for identifier in [each for each in ended if creator_of(each) == creator and told.exclude(each)]:
                del ended[identifier]

    def _of(self, creator: int) -> _OfCreator:
        if creator not in self._creators:
            self._creators[creator] = _OfCreator(OpenContexts(0, frozenset()))
        return self._creators[creator]

    def _count(self, of: _OfCreator, creator: int) -> None:
        of.ends += 1
        if of.ends % ASK_AFTER == 0:
            self._ask(creator)


def _remember(ended: OrderedDict[int, T], identifier: int, limit: int, note: T) -> None:
    ended[identifier] = note
    while len(ended) > limit:
        ended.popitem(last=False)


@final
class Contexts:
    """The contexts that this worker has a part in, by id. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._swap_lock = GradSwapLock()
        self._ended = EndedContexts(lambda creator: self._send(creator, "autograd.ask_open", None))
        """Those of others. Used with the lock."""
        self._next = agent.info.wire_id << 48 | 1
        """The id of the next context."""
        self._connected: set[int] = set()
        """The ids of the creators of contexts that this worker has connected to."""
        with torch.inference_mode(mode=False):
            self._dummy = torch.zeros((), requires_grad=True)
        agent.control.on("autograd.release", self._on_release)
        agent.control.on("autograd.joined", self._on_joined)
        agent.control.on("autograd.ask_open", self._on_ask_open)
        agent.control.on("autograd.open", self._on_open)

    def __len__(self) -> int:
        return len(self._contexts)

    def running_count(self) -> int:
        """Returns in how many contexts a backward pass runs on this worker."""
        return sum(context.passes.is_running for context in self.all())

    def open(self) -> Context:
        """Returns a new context, created by this worker."""
        with self._lock:
            context = self._contexts[self._next] = Context(
                self._agent, self._next, self._agent.info.wire_id, self._dummy, self._swap_lock
            )
            self._next += 1
        return context

    def get(self, identifier: int) -> Context:
        """Returns this worker's part of a context. Raises UnknownContextError if it has none."""
        context = self._contexts.get(identifier)
        if context is None:
            raise UnknownContextError(identifier, self._agent.info.name)
        return context

    def find(self, identifier: int) -> Context | None:
        """Returns this worker's part of a context, None if it has none."""
        return self._contexts.get(identifier)

    def join(self, identifier: int, sender: int) -> Context | None:
        """Returns this worker's part of a context of which a message has come; None if the context has ended.

        Raises:
            AutogradError: no worker can have created it, or the one that has is lost.
            LimitReachedError: the sender has brought too many.
        """
        context = self._contexts.get(identifier)
        if context is None:
            if (creator := creator_of(identifier)) == self._agent.info.wire_id:
                return None
            if not self._agent.is_member(creator):
                raise AutogradError(f"there is no worker {creator} to create autograd context {identifier}")
            self.check_creator(identifier, creator)
            context = self._join(identifier, creator, sender)
            if context is None:
                return None
            if creator != sender and creator not in self._connected:
                # Without a connection the loss of the creator would not be noticed, and the part never released.
                self._agent.connect(self._agent.incarnation(creator))
                self._connected.add(creator)
            if (end := self._agent.end_of(creator)) is not None:  # `on_worker_lost` may have come before
                self.release(identifier, lost="" if end.orderly else end.reason)
                self.check_creator(identifier, creator)
                return None
            if creator != sender and self._agent.end_of(sender) is not None:
                self._send(creator, "autograd.joined", identifier)  # as in `on_worker_lost`, which has come before
        context.senders.add(sender)
        return context

    def check_creator(self, identifier: int, creator: int) -> None:
        """Raises AutogradError if a context has ended here because its creator is lost, here or for who told it.

        Unless it has left, other workers may not have lost it. What ran here without the context would be missing
        in the gradients that they compute, and nobody would notice.
        """
        end = self._agent.end_of(creator)
        reason = end.reason if end is not None and not end.orderly else self._ended.why(creator, identifier)
        if reason is not None:
            name = self._agent.incarnation(creator).name
            raise AutogradError(
                f"autograd context {identifier} has ended on worker {self._agent.info.name!r}, for which its "
                f"creator {name!r} is lost: {reason}"
            )

    def _join(self, identifier: int, creator: int, sender: int) -> Context | None:
        with self._lock:
            context = self._contexts.get(identifier)
            if context is not None:
                return context
            if self._ended.has_ended(creator, identifier) or self._ended.has_left(sender, identifier):
                return None
            if len(self._contexts) >= MAX_JOINED_CONTEXTS:
                count = sum(sender in each.senders for each in self._contexts.values())
                if count >= MAX_JOINED_CONTEXTS:
                    raise LimitReachedError(
                        f"{count} autograd contexts of worker {sender} have not ended here",
                        f"MAX_JOINED_CONTEXTS={MAX_JOINED_CONTEXTS}",
                    )
            context = self._contexts[identifier] = Context(
                self._agent, identifier, creator, self._dummy, self._swap_lock
            )
            context.senders.add(sender)
            self._ended.know(creator)
            return context

    def release(
        self, identifier: int, *, sender: int | None = None, told: Set[int] = frozenset(), lost: str = ""
    ) -> None:
        """Ends a context here, and tells the workers that it reached from here.

        Args:
            identifier: the context.
            sender: the id of the worker that has told this one, if one has.
            told: the ids of the workers that the context's creator tells, so that this one need not. If the
                creator is lost before, they end its contexts by themselves.
            lost: how the creator was lost for the sender, if that is why. Then later calls in the context fail.

        Raises:
            AutogradError: the sender has neither created the context nor sent a message of it.
        """
        creator = creator_of(identifier)
        with self._lock:
            context = self._contexts.get(identifier)
            if sender is not None and sender != creator:
                if creator != self._agent.info.wire_id:
                    self._ended.leave(sender, creator, identifier)
                if context is None:
                    return
                if creator == self._agent.info.wire_id or sender not in context.senders:
                    raise AutogradError(f"worker {sender} cannot end autograd context {identifier}")
            if creator != self._agent.info.wire_id:
                is_told = sender not in (None, creator)
                self._ended.add(creator, identifier, lost if lost and is_told else None)
            self._contexts.pop(identifier, None)
        if context is None:
            return
        reached = context.close()
        to_tell = reached - told - {sender}
        if context.creator == self._agent.info.wire_id:
            told = reached | {context.creator}
        for worker in to_tell:
            self._send(worker, "autograd.release", (identifier, told, lost))

    def on_worker_lost(self, worker: int, end: WorkerEnd, error: Exception) -> None:
        """Aborts the passes that need a lost worker, and ends the contexts that it created.

        A worker ends a context on those that it has reached. So the creators of contexts that the lost worker has
        brought here are told that this one has a part in them.
        """
        me = self._agent.info.wire_id
        for context in self.all():
            context.passes.fail_without(worker, error)
            if context.creator == worker:
                self.release(context.id, lost="" if end.orderly else end.reason)
            elif worker in context.senders and context.creator != me:
                self._send(context.creator, "autograd.joined", context.id)
        with self._lock:
            self._ended.discard(worker)

    def on_worker_suspect(self, worker: int, error: Exception) -> list[tuple[int, PassId]]:
        """Aborts the passes that need a worker which does not answer.

        Returns the contexts and passes of other workers of which this one has sent it gradients: they may be lost.
        """
        unsure = []
        for context in self.all():
            context.passes.fail_without(worker, error)
            unsure += [(context.id, pass_id) for pass_id in context.passes.sent_to(worker)]
        return unsure

    def has_ended(self, identifier: int) -> bool:
        """Returns whether this worker had a part in a context, and has ended it."""
        if (creator := creator_of(identifier)) == self._agent.info.wire_id:
            return identifier < self._next and identifier not in self._contexts
        with self._lock:
            return self._ended.has_ended(creator, identifier)

    def all(self) -> list[Context]:
        """Returns all parts."""
        return list(self._contexts.values())

    def leave_to_parent(self) -> None:
        """In a forked child, forgets all contexts, which the parent ends."""
        self._lock = threading.Lock()
        self._parents, self._contexts = self._contexts, {}  # kept, for their graphs are not to be freed here

    def clear(self) -> None:
        """Ends all contexts on this worker."""
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            context.close()

    # Control messages.

    def _send(self, worker: int, kind: str, payload: object) -> None:
        # An error of the receiver is expected: none of this worker's messages of a context may have arrived.
        receiver = self._agent.incarnation(worker)
        self._agent.control.send(receiver, kind, payload, expected=(AutogradError,), urgent=False)

    def _on_release(self, sender: WorkerInfo, payload: Any) -> None:
        context_id, told, lost = payload
        if type(context_id) is not int or not isinstance(told, frozenset | set) or type(lost) is not str:
            raise ValueError("malformed message: it ends no context")
        self.release(context_id, sender=sender.wire_id, told=told, lost=lost[:MAX_REASON_CHARACTERS])

    def _on_joined(self, sender: WorkerInfo, payload: Any) -> None:
        """Ends a context of this worker on another one that has a part in it: now, if it has ended, or with it."""
        if type(payload) is not int:
            raise ValueError("malformed message: it names no context")
        if creator_of(payload) != self._agent.info.wire_id:
            raise AutogradError(f"worker {self._agent.info.name!r} has not created autograd context {payload}")
        context = self._contexts.get(payload)
        if context is None or not context.reach(sender.wire_id):
            self._send(sender.wire_id, "autograd.release", (payload, frozenset(), ""))

    def _on_ask_open(self, sender: WorkerInfo, _payload: Any) -> None:
        me = self._agent.info.wire_id
        with self._lock:
            opened = OpenContexts.of([each for each in self._contexts if creator_of(each) == me], self._next)
        self._send(sender.wire_id, "autograd.open", (opened.below, opened.ids))

    def _on_open(self, sender: WorkerInfo, payload: Any) -> None:
        """Learns which contexts of a worker are open. Late messages of others open none of them again."""
        opened = OpenContexts.from_payload(payload, sender.wire_id)
        with self._lock:
            self._ended.learn(sender.wire_id, opened)
