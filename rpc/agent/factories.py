"""The parts of an agent that can be exchanged.

Fault injection wraps the network. Tests of the protocols simulate network, threads and time, so that every
schedule can be tried and repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from ..contracts.agent import RpcAgent
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..execution.deadlines import Deadlines
from ..execution.executor import Executor
from ..execution.scheduler import Task
from ..membership.roster_log import RosterLog
from .control import RetryingControlMessages
from .network import Network

__all__ = ["AgentFactories", "DeadlinesFactory"]

DeadlinesFactory = Callable[[Callable[[Any], None], Callable[[Any], bool], Callable[[], int], str], Deadlines[Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFactories:
    """Makes the parts of one GrpcAgent.

    network: carries envelopes; takes the worker, its options, the group's name, the roster of a dynamic group, and
        the executor.
    executor: runs incoming calls; see Executor.
    deadlines: keeps timeouts; see Deadlines.
    control: sends control messages; see RetryingControlMessages.
    """

    network: Callable[[WorkerInfo, RpcBackendOptions, str, RosterLog | None, Executor], Network] = Network
    executor: Callable[[int, str, Task, float], Executor] = Executor
    deadlines: DeadlinesFactory = Deadlines
    control: Callable[[RpcAgent], RetryingControlMessages] = RetryingControlMessages
