"""The contexts that a worker has a part in."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Set
from typing import final

import torch

from ..errors import UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from .context import Context
from .gradients import GradSwapLock

__all__ = ["Contexts"]

MAX_REMEMBERED_CONTEXTS = 4096
"""How many ended contexts a worker remembers, to recognise messages of theirs that arrive afterwards."""


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
        self._ended: OrderedDict[int, None] = OrderedDict()
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
        identifier = self._agent.info.id << 48 | next(self._numbers)
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
        """
        if (context := self._contexts.get(identifier)) is not None:
            return context
        with self._lock:
            context = self._contexts.get(identifier)
            if context is not None or identifier in self._ended:
                return context
            context = self._contexts[identifier] = self._make(identifier)
        creator = context.creator
        if creator not in (sender, self._agent.info.id) and creator not in self._connected:
            # Without a connection the loss of the creator would not be noticed, and the part never released.
            self._agent.connect(self._agent.worker(creator))
            self._connected.add(creator)
        return context

    def release(self, identifier: int, *, sender: int | None = None, told: Set[int] = frozenset()) -> None:
        """Ends a context here, and tells the workers that it reached from here.

        Args:
            identifier: the context.
            sender: the id of the worker that has told this one, if one has.
            told: the ids of the workers that the context's creator tells, so that this one need not. If the
                creator is lost before, they end its contexts by themselves.
        """
        with self._lock:
            self._ended[identifier] = None
            while len(self._ended) > MAX_REMEMBERED_CONTEXTS:
                self._ended.popitem(last=False)
            context = self._contexts.pop(identifier, None)
        if context is None:
            return
        reached = context.close()
        to_tell = reached - told - {sender}
        if context.creator == self._agent.info.id:
            told = reached | {context.creator}
        for worker in to_tell:
            self._send_release(worker, identifier, told)

    def on_worker_lost(self, worker: int, error: Exception) -> None:
        """Aborts the passes that need a lost worker, and ends the contexts that it created."""
        for context in self.all():
            context.passes.on_worker_lost(worker, error)
            if context.creator == worker:
                self.release(context.id)

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
