"""The contexts that a worker has a part in."""

import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Set
from typing import final

import torch

from ..errors import AutogradError, LimitReachedError, UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from .context import Context, creator_of
from .gradient_sender import PassId
from .gradients import GradSwapLock

__all__ = ["Contexts"]

MAX_REMEMBERED_CONTEXTS = 4096
"""How many ended contexts of each other worker a worker remembers, to recognise late messages."""

MAX_JOINED_CONTEXTS = 1 << 14
"""Contexts that have not ended and that messages of one other worker have brought to a worker."""


@final
class Contexts:
    """The contexts that this worker has a part in, by id. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent, send_release: Callable[[int, int, Set[int]], None]) -> None:
        """Makes them.

        Args:
            agent: this worker's.
            send_release: tells a worker that a context has ended. Takes the ids of the worker and the context, and
                the workers that the context's creator tells.
        """
        self._agent = agent
        self._send_release = send_release
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._swap_lock = GradSwapLock()
        self._ended: dict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """The contexts that have ended, by creator."""
        self._left: dict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """The contexts of which another worker has told that they have ended, by that worker."""
        self._numbers = itertools.count(1)
        self._connected: set[int] = set()
        """The ids of the creators of contexts that this worker has connected to."""
        with torch.inference_mode(mode=False):
            self._dummy = torch.zeros((), requires_grad=True)

    def __len__(self) -> int:
        return len(self._contexts)

    def running_count(self) -> int:
        """Returns in how many contexts a backward pass runs on this worker."""
        return sum(context.passes.is_running for context in self.all())

    def open(self) -> Context:
        """Returns a new context, created by this worker."""
        identifier = self._agent.info.wire_id << 48 | next(self._numbers)
        context = self._contexts[identifier] = self._make(identifier)
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
        """Returns this worker's part of a context, a new one if need be.

        Args:
            identifier: the context.
            sender: the id of the worker that has sent a message of it.

        Returns:
            The part; None if the context has ended already.

        Raises:
            AutogradError: no worker can have created it.
            LimitReachedError: the sender has brought too many.
        """
        context = self._contexts.get(identifier)
        if context is None:
            if (creator := creator_of(identifier)) == self._agent.info.wire_id:
                return None
            if not self._agent.is_member(creator):
                raise AutogradError(f"there is no worker {creator} to create autograd context {identifier}")
            context = self._join(identifier, creator, sender)
            if context is None:
                return None
            if creator != sender and creator not in self._connected:
                # Without a connection the loss of the creator would not be noticed, and the part never released.
                self._agent.connect(self._agent.incarnation(creator))
                self._connected.add(creator)
            if self._agent.end_of(creator) is not None:  # `on_worker_lost` may have come before
                self.release(identifier)
                return None
        context.senders.add(sender)
        return context

    def _join(self, identifier: int, creator: int, sender: int) -> Context | None:
        with self._lock:
            context = self._contexts.get(identifier)
            if context is not None:
                return context
            if identifier in self._ended[creator] or identifier in self._left[sender]:
                return None
            if len(self._contexts) >= MAX_JOINED_CONTEXTS:
                count = sum(sender in each.senders for each in self._contexts.values())
                if count >= MAX_JOINED_CONTEXTS:
                    raise LimitReachedError(
                        f"{count} autograd contexts of worker {sender} have not ended here",
                        f"MAX_JOINED_CONTEXTS={MAX_JOINED_CONTEXTS}",
                    )
            context = self._contexts[identifier] = self._make(identifier)
            context.senders.add(sender)
            return context

    def release(self, identifier: int, *, sender: int | None = None, told: Set[int] = frozenset()) -> None:
        """Ends a context here, and tells the workers that it reached from here.

        Args:
            identifier: the context.
            sender: the id of the worker that has told this one, if one has.
            told: the ids of the workers that the context's creator tells, so that this one need not. If the
                creator is lost before, they end its contexts by themselves.

        Raises:
            AutogradError: the sender has neither created the context nor sent a message of it.
        """
        creator = creator_of(identifier)
        with self._lock:
            context = self._contexts.get(identifier)
            if sender is not None and sender != creator:
                _remember(self._left[sender], identifier)
                if context is None:
                    return
                if creator == self._agent.info.wire_id or sender not in context.senders:
                    raise AutogradError(f"worker {sender} cannot end autograd context {identifier}")
            _remember(self._ended[creator], identifier)
            self._contexts.pop(identifier, None)
        if context is None:
            return
        reached = context.close()
        to_tell = reached - told - {sender}
        if context.creator == self._agent.info.wire_id:
            told = reached | {context.creator}
        for worker in to_tell:
            self._send_release(worker, identifier, told)

    def on_worker_lost(self, worker: int, error: Exception) -> None:
        """Aborts the passes that need a lost worker, and ends the contexts that it created."""
        for context in self.all():
            context.passes.fail_without(worker, error)
            if context.creator == worker:
                self.release(context.id)
        self._left.pop(worker, None)

    def on_worker_suspect(self, worker: int, error: Exception) -> list[tuple[int, PassId]]:
        """Aborts the passes that need a worker which does not answer.

        Returns:
            The contexts and passes of other workers of which this one has sent gradients to that worker. They may
            not have arrived.
        """
        unsure = []
        for context in self.all():
            context.passes.fail_without(worker, error)
            unsure += [(context.id, pass_id) for pass_id in context.passes.sent_to(worker)]
        return unsure

    def has_ended(self, identifier: int) -> bool:
        """Returns whether this worker had a part in a context, and has ended it."""
        return identifier in self._ended[creator_of(identifier)]

    def _make(self, identifier: int) -> Context:
        return Context(self._agent, identifier, self._dummy, self._swap_lock)

    def all(self) -> list[Context]:
        """Returns all parts."""
        return list(self._contexts.values())

    def clear(self) -> None:
        """Ends all contexts on this worker."""
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            context.close()


def _remember(ended: OrderedDict[int, None], identifier: int) -> None:
    ended[identifier] = None
    while len(ended) > MAX_REMEMBERED_CONTEXTS:
        ended.popitem(last=False)
