"""The agent of a worker in the children that the worker forks: nothing there uses it.

A child has none of the agent's threads, and must leave its connections alone. Threads that are gone may hold its
locks. So in a child each agent becomes an `InheritedAgent`, also for the references, streams and contexts that the
program has. Its methods raise an error that says what to do. Control messages, which finalizers and the ends of
`with` blocks send, are dropped.
"""

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn, final

from ...errors import NotInitializedError
from ...net.inheritance import at_fork
from .agent import RpcAgent, agents_here, holder

__all__ = ["InheritedAgent"]


def _refuse(agent: RpcAgent, *_args: Any, **_options: Any) -> NoReturn:
    """Raises NotInitializedError: any method of an inherited agent."""
    raise _error(agent.info.name, os.getppid())


@final
class InheritedAgent(RpcAgent):
    """What an agent is in a forked child. It has the attributes of the agent, whose object it is."""

    is_inherited = True

    dynamic = property(_refuse)
    worker = incarnation = workers = end_of = connect = _refuse
    request = request_all = post = all_gather = _refuse
    encode_failure = decode_failure = _refuse
    serving = submit = blocking = extension = _refuse
    traffic = debug_info = join = _refuse

    def shutdown(self, *, graceful: bool, timeout: float, join: Callable[[], None] | None = None) -> None:
        """Does nothing: the parent leaves the group."""


@final
class _NoControlMessages:
    """Drops control messages, and the tasks of the control thread."""

    def _drop(self, *_args: Any, **_options: Any) -> None:
        pass

    on = send = run = _drop

    def kinds(self) -> Collection[str]:
        return ()

    def pending(self) -> int:
        return 0


def _error(name: str, parent: int) -> NotInitializedError:
    return NotInitializedError(
        f"process {os.getpid()} is a fork of worker {name!r} (process {parent}) and no worker: it has none of the "
        "threads and connections that this needs. Have the worker make the calls, and pass their results on; or "
        "start processes that make calls by 'spawn' or 'forkserver', and call init_rpc in them "
        "(docs/child_processes.md)"
    )


def _leave_to_parent() -> None:
    """Makes the agents of this process, a child, unusable."""
    parent, current = os.getppid(), holder.get()
    for agent in list(agents_here):
        if not agent.is_inherited:
            agent.leave_to_parent(partial(_error, agent.info.name, parent))
            agent.control = _NoControlMessages()
            agent.__class__ = InheritedAgent  # the object stays, to which references and others refer
    if current is not None:
        holder.leave_to_parent(current, partial(_error, current.info.name, parent))


at_fork(in_child=_leave_to_parent)
