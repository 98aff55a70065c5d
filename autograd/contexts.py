"""The contexts that a worker has a part in."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Set
from typing import final

from ..errors import UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from .context import Context
from .gradients import GradSwapLock

__all__ = ["Contexts"]

REMEMBERED = 4096
"""How many ended contexts a worker remembers, to recognise messages of theirs that come late."""


@final
class Contexts:
    """The contexts that this worker has a part in."""

    def __init__(self, agent: RpcAgent, tell_released: Callable[[int, int, Set[int]], None]) -> None:
        self._agent = agent
        self._tell_released = tell_released
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._loans = GradSwapLock()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def running_count(self) -> int:
        """In how many of them a backward pass runs here."""
        return sum(context.is_running for context in self.all())

    def open(self) -> Context:
        """A new context of this worker."""
        with self._lock:
            self._count += 1
            identifier = self._agent.info.id << 48 | self._count
            context = self._contexts[identifier] = Context(self._agent, identifier, self._loans)
            return context

    def get(self, identifier: int) -> Context:
        """This worker's part of a context. Raises UnknownContextError."""
        context = self._contexts.get(identifier)
        if context is None:
            raise UnknownContextError(identifier, self._agent.info.name)
        return context

    def find(self, identifier: int) -> Context | None:
        """This worker's part of a context, if it has one."""
        return self._contexts.get(identifier)

    def join(self, identifier: int) -> Context | None:
        """This worker's part of a context, made if need be; None if the context has ended already."""
        with self._lock:
            context = self._contexts.get(identifier)
            if context is not None or identifier in self._ended:
                return context
            context = self._contexts[identifier] = Context(self._agent, identifier, self._loans)
        if context.creator != self._agent.info.id:
            # So that this worker learns when the creator is lost, and with it the word that the context ends.
            self._agent.connect(self._agent.worker(context.creator))
        return context

    def release(self, identifier: int, *, sender: int | None = None, told: Set[int] = frozenset()) -> None:
        """The context has ended: forgets it here, and has all workers do so that it reached from here.

        Args:
            identifier: the context.
            sender: the worker that has said so, if this one has not found out by itself.
            told: those that hear it from the context's creator, and need not hear it from here. If the creator is
                lost before it has told them, they end its contexts by themselves.
        """
        with self._lock:
            self._ended[identifier] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            context = self._contexts.pop(identifier, None)
        if context is None:
            return
        reached = context.close()
        to_tell = reached - told - {sender}
        if context.creator == self._agent.info.id:
            told = reached | {context.creator}
        for worker in to_tell:
            self._tell_released(worker, identifier, told)

    def on_worker_lost(self, worker: int, error: Exception) -> None:
        """Ends what a lost worker had begun."""
        for context in self.all():
            context.on_worker_lost(worker, error)
            if context.creator == worker:
                self.release(context.id)

    def all(self) -> list[Context]:
        """All parts."""
        return list(self._contexts.values())

    def clear(self) -> None:
        """Ends all."""
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            context.close()
