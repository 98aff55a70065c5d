"""The parts of an agent that can be exchanged.

Fault injection wraps the network. Tests of the protocols simulate network, threads and time, so that every
schedule can be tried and repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ..contracts.control import ControlValues
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..execution.deadlines import Deadlines, DeadlinesFactory
from ..execution.executor import Executor
from ..execution.scheduler import Scheduler, SerialThread, Task
from ..membership.roster_log import RosterLog
from ..peers.control import ControlStreams
from ..peers.peers import Peers
from .network import Network

__all__ = ["AgentFactories"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFactories:
    """Makes the parts of one GrpcAgent.

    network: carries envelopes; takes the worker, its options, the group's name, the log of its members, and
        the executor.
    executor: runs incoming calls; see Executor.
    deadlines: keeps timeouts; see Deadlines.
    scheduler: runs tasks on the control thread, given its name and a task to run first; see Scheduler.
    control: sends control messages; see ControlStreams.
    """

    network: Callable[[WorkerInfo, RpcBackendOptions, str, RosterLog, Executor], Network] = Network
    executor: Callable[[int, str, Task, float], Executor] = Executor
    deadlines: DeadlinesFactory = Deadlines
    scheduler: Callable[[str, Task], Scheduler] = SerialThread
    control: Callable[[Peers, ControlValues, Scheduler], ControlStreams] = ControlStreams
