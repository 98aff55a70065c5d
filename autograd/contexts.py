"""The distributed autograd contexts that a worker has a part in.

A context is everything that belongs to one forward pass and its backward passes: the messages between workers, and
the gradients. The worker that opens it gives it its id; every worker that a message of the context reaches keeps a
part of its own, until the one that opened the context ends it. Which contexts have ended is remembered, so that a
late message does not open one again.

A worker creates contexts with ascending ids. So it can say which of its contexts have ended, however many, by the
next id and the few that are open: all others below have. Another worker remembers the ends that it learns of one
by one, and after every `ASK_AFTER` of them asks the creator, whose answer replaces what was remembered.
"""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch

from ..errors import AutogradError, LimitReachedError, UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from .backward_pass import Passes
from .gradient_sender import PassId, TensorGradients
from .gradients import GradSwapLock, LeafGradients
from .graph import NOTHING, Closure, Graph, RecvRpc, SendId, SendRpc, apply_with_grad, follower_of, small_closure

__all__ = [
    "Context",
    "Contexts",
    "EndedContexts",
    "Exchanged",
    "OpenContexts",
    "inside",
]

Exchanged = tuple[dict[int, int], list[SendId], list[int]]
"""What one worker has exchanged with others in a context: the receivers of the messages that it has sent, by
message id; the messages that have arrived there; and the ids of the workers that it has sent any messages."""


_current: "ContextVar[Context | None]" = ContextVar("gradwire.autograd.contexts", default=None)
"""That of a thread, or of an asyncio task. Callbacks and tasks that are made inside take it along. If it has ended
when they run, their calls belong to no context."""

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


def _creator_of(identifier: int) -> int:
    """Returns the id of the worker that has created the context with this id."""
    return identifier >> 48


@final
class inside:  # noqa: N801 - a context manager, used like a function
    """Context manager that makes a context the current one of this thread, or of this asyncio task."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._before: Context | None = None

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)


NewSend = tuple[int, Closure | None]
"""The number of a message in its sender's part of the context, and its closure, None if that is too large for a
header."""


@final
class Context:
    """This worker's part of one context. Safe to use from any thread."""

    current: "Callable[[], Context | None]" = staticmethod(_current.get)
    """Returns the context that the calls of this thread, or of this asyncio task, belong to."""

    set_current: "Callable[[Context | None], object]" = staticmethod(_current.set)
    """Sets the context that the calls of this thread, or of this asyncio task, belong to."""

    def __init__(
        self, agent: RpcAgent, identifier: int, creator: int, dummy: torch.Tensor, swap_lock: GradSwapLock
    ) -> None:
        """Makes a part without messages. All parts of a worker share the dummy and the lock."""
        self.agent = agent
        self.id = identifier
        self.creator = creator
        self.since = time.time()
        """When this worker has got its part, in seconds since 1970."""
        self.senders: set[int] = set()
        """The ids of the workers from which messages of the context have come."""
        self.dummy = dummy
        """A scalar leaf on the CPU, to which all `RecvRpc` nodes lead."""
        self.gradients = LeafGradients(swap_lock)
        """The gradients of leaves of this worker."""
        self.passes = Passes(agent, identifier, self._clear)
        """The backward passes on this worker."""
        self.running_pass = self.passes.running
        """Returns the backward pass that runs on this worker. Raises AutogradError if none does."""
        self._lock = threading.Lock()
        self._is_released = False
        self._reached: set[int] = set()
        self.message_count = 0
        """How many messages got a gate so far; their ids are the numbers below."""
        self._gates: dict[int, torch.Tensor] = {}
        """By message id."""
        self._destinations: dict[int, int] = {}
        """The receiver of each message with a gate."""
        self._receives: dict[tuple[int, int], Any] = {}
        """The node of each received message, by sender and message id."""
        self._closures: dict[Any, Closure | None] = {}
        """The closures of the nodes that sends lead to, see `small_closure`."""

    # Messages.

    def reach(self, worker: int) -> bool:
        """Notes that a message of the context is about to be sent to a worker; False if the context has ended."""
        with self._lock:
            if not self._is_released and worker != self.agent.info.wire_id:
                self._reached.add(worker)
            return not self._is_released

    def add_send(self, tensors: list[torch.Tensor], destination: int) -> NewSend | None:
        """Makes the gate of a message for its tensors that require grad.

        Returns the contents of the header; None if the context has ended.
        """
        closure: Closure | None = NOTHING
        followers = []  # kept for `SendRpc`
        for tensor in tensors:
            if tensor.grad_fn is None:
                followers.append(follower_of(tensor))
        if self._receives:
            closure = small_closure(tensors, self._closures)
        with self._lock:
            if self._is_released:
                return None
            if destination != self.agent.info.wire_id:
                self._reached.add(destination)
            message_id = self.message_count
            self.message_count += 1
            self._gates[message_id] = apply_with_grad(SendRpc, self, message_id, *tensors)
            self._destinations[message_id] = destination
            return message_id, closure

    def drop_send(self, message_id: int) -> None:
        """Drops the gate of a message that could not be sent."""
        with self._lock:
            gate = self._gates.pop(message_id, None)
            self._destinations.pop(message_id, None)
        del gate  # without the lock: the end of a graph may run code of the program

    def add_receive(
        self, sender: int, message_id: int, closure: Closure, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of a received message, as part of this worker's graph."""
        received: tuple[torch.Tensor, ...] = apply_with_grad(
            RecvRpc, self.dummy, self, sender, message_id, closure, tensors
        )
        with self._lock:
            if not self._is_released:
                self._receives[sender, message_id] = received[0].grad_fn
        return received

    def exchanged(self) -> Exchanged:
        """Returns all messages with gates, and all that have arrived."""
        with self._lock:
            sends = {number: self._destinations[number] for number in self._gates}
            return sends, list(self._receives), list(self._reached)

    @property
    def send_nodes(self) -> dict[tuple[int, int], Any]:
        """The `SendRpc` node of each message that this worker sent, by receiver and message id."""
        with self._lock:
            return {(self._destinations[number], number): gate.grad_fn for number, gate in self._gates.items()}

    @property
    def receive_nodes(self) -> dict[tuple[int, int], Any]:
        """The `RecvRpc` node of each message that this worker received, by sender and message id."""
        with self._lock:
            return dict(self._receives)

    # Backward.

    def find_send(self, message_id: int) -> tuple[torch.Tensor, int]:
        """Returns the gate of a message, and the id of its receiver. Raises AutogradError if there is none."""
        try:
            return self._gates[message_id], self._destinations[message_id]
        except KeyError:
            raise AutogradError(
                f"worker {self.agent.info.name!r} sent no message {message_id} in context {self.id}"
            ) from None

    def set_gradients(self, sender: int, pass_id: PassId, message_id: int, gradients: TensorGradients) -> None:
        """Passes the gradients of a message to its gate. Raises AutogradError unless they are of its receiver."""
        if self._destinations.get(message_id) != sender:
            self.check_receiver(sender, message_id)
        self.passes.set_gradients(pass_id, message_id, gradients)

    def check_receiver(self, worker: int, message_id: int) -> None:
        """Raises AutogradError unless this worker has sent that message to the other one."""
        if self._destinations.get(message_id) != worker:
            raise AutogradError(f"worker {worker} has not received message {message_id} of context {self.id}")

    def closure_of_sends(self, message_ids: Sequence[int]) -> Closure:
        """Returns all sends that get a gradient if these sends of this worker do."""
        return Graph([self.find_send(message_id)[0].grad_fn for message_id in message_ids]).closure()

    def close(self) -> set[int]:
        """Ends the context here: aborts the running pass, then releases the graph.

        The graph refers to the context through C++, where Python's garbage collector does not look, so it would
        never be freed otherwise. Returns the ids of the workers that it has reached from here.
        """
        with self._lock:
            self._is_released = True
        self.passes.close()
        return self._reached

    def _clear(self) -> None:
        """Releases the graph and the gradients. Runs once the context has ended and no pass uses them."""
        with self._lock:
            self._gates.clear()
            self._destinations.clear()
            self._receives.clear()
            self._closures.clear()
            self.gradients.clear()


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
            case (int(below), frozenset(ids)) if len(ids) <= MAX_NAMED and _creator_of(below) == sender:
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
            for identifier in [each for each in ended if _creator_of(each) == creator and told.exclude(each)]:
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
            if (creator := _creator_of(identifier)) == self._agent.info.wire_id:
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
        creator = _creator_of(identifier)
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
        if (creator := _creator_of(identifier)) == self._agent.info.wire_id:
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
        if _creator_of(payload) != self._agent.info.wire_id:
            raise AutogradError(f"worker {self._agent.info.name!r} has not created autograd context {payload}")
        context = self._contexts.get(payload)
        if context is None or not context.reach(sender.wire_id):
            self._send(sender.wire_id, "autograd.release", (payload, frozenset(), ""))

    def _on_ask_open(self, sender: WorkerInfo, _payload: Any) -> None:
        me = self._agent.info.wire_id
        with self._lock:
            opened = OpenContexts.of([each for each in self._contexts if _creator_of(each) == me], self._next)
        self._send(sender.wire_id, "autograd.open", (opened.below, opened.ids))

    def _on_open(self, sender: WorkerInfo, payload: Any) -> None:
        """Learns which contexts of a worker are open. Late messages of others open none of them again."""
        opened = OpenContexts.from_payload(payload, sender.wire_id)
        with self._lock:
            self._ended.learn(sender.wire_id, opened)
