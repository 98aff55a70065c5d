"""The parts of an agent that can be exchanged.

Fault injection wraps the network. Tests of the protocols simulate network, threads and time, so that every
schedule can be tried and repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ..contracts.agent import RpcAgent
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..execution.deadlines import Deadlines, DeadlinesFactory
from ..execution.executor import Executor
from ..execution.scheduler import Task
from ..membership.roster_log import RosterLog
from ..peers.control import RetryingControlMessages
from ..peers.network import Network

__all__ = ["AgentFactories"]


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
