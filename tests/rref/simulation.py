"""Workers, their network and time, simulated on one thread, so that every schedule can be tried and repeated.

The agents are real: GrpcAgent, its Packer, ControlMessages, References and the RRefs that users hold. What makes a
program unpredictable is simulated: the network, the threads, and the clock. Everything that can happen next (an
envelope arrives, a thread takes a task, a timer expires, a worker notices that another has died) is known, and a
`Chance` picks what does. A task runs until it ends or waits for a future; only then another one begins or
continues.
"""

import concurrent.futures
import contextlib
import heapq
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from gradwire.c10d import HashStore
from gradwire.errors import LossCause, SendFailedError
from gradwire.extensions import DEFAULT_EXTENSIONS
from gradwire.net.security.audit import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import AgentFactories, GrpcAgent
from gradwire.rpc.channels.payloads import read_inline
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.contracts.options import RpcBackendOptions
from gradwire.rpc.contracts.worker import Member, WorkerEnd, WorkerInfo, WorkerWatcher
from gradwire.rpc.membership.roster import RosterLog
from gradwire.rpc.peers.peer import MessageListener, Peer, PeerParts, Peers

from tests.addresses import address_here
from tests.rref.chance import Chance
from tests.simulated_peers import SilentTransport, bring_back, lose, simulated_links, simulated_parts, suspect

ANSWERS = (MessageType.RESULT, MessageType.ERROR)
REASON = "it was killed"
BROKEN = WorkerEnd(LossCause.DISCONNECTED, "the connection broke")
MAX_STEPS = 20_000
"""Until nothing is left to happen; a hundred times what it takes."""

Task = Callable[[], None]


@dataclass(eq=False)
class Flight:
    """An envelope in flight."""

    source: "Machine"
    target: "Machine"
    envelope: agent_pb2.Envelope


@dataclass(eq=False)
class Machine:
    """One worker: its agent, and the tasks that its threads have yet to run."""

    world: "World"
    info: WorkerInfo
    alive: bool = True
    tasks: deque[partial[None]] = field(default_factory=deque)
    """Those of the executor, in any order."""
    control: deque[Task] = field(default_factory=deque)
    """Those of the scheduler, one after another."""
    waiting: "list[Waiter]" = field(default_factory=list)
    """The threads of tasks that wait for futures."""
    held: list[Any] = field(default_factory=list)
    """The references that the program of this worker holds."""

    def start(self, members: Sequence[Member]) -> None:
        self.agent = GrpcAgent(
            self.info,
            RpcBackendOptions(rpc_timeout=60),
            "simulated",
            RosterLog(HashStore(), "simulated"),
            extensions=DEFAULT_EXTENSIONS,
            factories=AgentFactories(
                network=lambda *_: self.network,
                executor=lambda *_: SimulatedExecutor(self),
                deadlines=lambda expire, is_live, *_: SimulatedDeadlines(self, expire, is_live),
                scheduler=lambda *_: SimulatedScheduler(self),
            ),
        )
        self.agent.listen(address_here())
        self.agent.open(members)

    def peer(self, other: "Machine") -> Peer:
        """Returns another worker, as this one sees it."""
        return self.network.peers.of(other.info)

    def arrived_from(self, other: "Machine") -> list[agent_pb2.Envelope]:
        """Returns the envelopes of another worker that no thread has taken."""
        found = [task.args[:2] for task in self.tasks if len(task.args) > 1]
        return [each for peer, each in found if isinstance(each, agent_pb2.Envelope) and peer.info == other.info]

    def run(self, task: Task) -> None:
        with holder.using(self.agent):
            task()

    def run_waiting(self, task: Task) -> None:
        """Runs a task that may wait for futures, until it does or ends."""
        waiter = idle.pop() if idle else Waiter()
        self._keep_if_waiting(waiter, partial(waiter.begin, self, task))

    def resume(self, waiter: "Waiter") -> None:
        """Continues a task whose future is done."""
        self.waiting.remove(waiter)
        self._keep_if_waiting(waiter, waiter.resume)

    def _keep_if_waiting(self, waiter: "Waiter", run: Task) -> None:
        try:
            run()
        finally:
            (idle if waiter.future is None else self.waiting).append(waiter)

    def __post_init__(self) -> None:
        self.network = SimulatedNetwork(self)


class KilledError(BaseException):
    """Ends the tasks of a worker that dies."""


class Waiter:
    """Runs tasks that may wait for futures, one at a time, on a thread of its own.

    All other threads wait while it runs, so what happens does not depend on the system.
    """

    _mine = threading.local()

    def __init__(self) -> None:
        self.machine: Machine
        self.future: concurrent.futures.Future[Any] | None = None
        """The future that its task waits for."""
        self._task: Task | None = None
        self._error: BaseException | None = None
        self._turn = threading.Semaphore(0)
        self._others_turn = threading.Semaphore(0)
        threading.Thread(target=self._main, daemon=True).start()

    @classmethod
    def wait(cls, future: "concurrent.futures.Future[Any]") -> Any:
        """Lets other tasks run until the future is done. Called by a task."""
        if not future.done():
            waiter: Waiter = cls._mine.waiter
            waiter.future = future
            waiter._others_turn.release()
            waiter._turn.acquire()
            waiter.future = None
            if not waiter.machine.alive:
                raise KilledError
        return future.result()

    def begin(self, machine: Machine, task: Task) -> None:
        """Runs a task until it waits or ends."""
        self.machine, self._task = machine, task
        self.resume()

    def resume(self) -> None:
        """Continues the task until it waits or ends; raises what it raises."""
        self._turn.release()
        self._others_turn.acquire()
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _main(self) -> None:
        self._mine.waiter = self
        while True:
            self._turn.acquire()
            try:
                assert self._task is not None
                self.machine.run(self._task)
            except BaseException as error:
                self._error = error
            self._task = None
            self._others_turn.release()


def wait_for_value(futures: "Sequence[concurrent.futures.Future[Any]]", _seconds: float | None) -> None:
    """Takes the place of `concurrent.futures.wait` where a task waits for a value of its own worker."""
    try:
        Waiter.wait(futures[0])
    except Exception as error:  # which the entry raises
        error.__traceback__ = None  # its frames refer to the entry, which has the error


idle: list[Waiter] = []
"""Threads without a task, shared by all schedules."""


class SimulatedExecutor:
    threads = 0
    is_inherited = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        self._machine.tasks.append(partial(task, *args))

    submit_urgent = submit

    def call_last(self, function: Callable[[], None]) -> None:
        function()

    def wait(self, future: "concurrent.futures.Future[Any]") -> Any:
        return Waiter.wait(future)

    def blocking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class SimulatedDeadlines:
    def __init__(self, machine: Machine, expire: Callable[[int], None], is_live: Callable[[int], bool]) -> None:
        self._machine = machine
        self._expire = expire
        self._is_live = is_live

    def add(self, identifier: int, seconds: float) -> None:
        self._machine.world.call_later(
            self._machine, seconds, partial(self._expire, identifier), partial(self._is_live, identifier)
        )


class SimulatedScheduler:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def submit(self, task: Task, *, urgent: bool = True) -> None:
        self._machine.control.append(task)

    def call_later(self, seconds: float, task: Task) -> None:
        self._machine.world.call_later(self._machine, seconds, partial(self.submit, task))


class SimulatedNetwork:
    """Has what a GrpcAgent needs of its Network."""

    def __init__(self, machine: Machine) -> None:
        self.me = machine.info
        self.peers = Peers(self.me)
        self.fail_next = False
        self.channels = SimpleNamespace(devices=SimpleNamespace(staging=None), broadcasts=None)
        self.audit = Audit(machine.info.name)
        self._machine = machine
        self._parts: PeerParts

    def listen(self, _where: object, messages: MessageListener, watchers: Sequence[WorkerWatcher]) -> str:
        make_transport = partial(SimulatedTransport, self._machine)
        links = simulated_links(watchers, SimulatedExecutor(self._machine))
        self._parts = simulated_parts(make_transport, messages, links)
        self.messages = messages
        return "simulated"

    def open(self, members: Sequence[Member], _control: object) -> None:
        for member in members:
            self.peers.add(Peer(member, self._parts))

    def admit(self) -> None:
        pass

    def call_soon(self, function: Task, *args: Any) -> None:
        self._machine.tasks.append(partial(function, *args))


class SimulatedTransport(SilentTransport):
    """The connection of one worker to another, or to itself."""

    def __init__(self, machine: Machine, peer: Peer, _address: str) -> None:
        self._machine = machine
        self._peer = peer

    @property
    def _target(self) -> Machine:
        return self._machine.world.machines[self._peer.info.id]

    def connect(self) -> None:
        self._machine.world.connect(self._machine, self._target)

    def send(self, envelope: bytes, _attached: object = ()) -> None:
        self._peer.check_present()
        self.connect()
        parsed = agent_pb2.Envelope.FromString(envelope)
        self._machine.world.send(self._machine, self._target, parsed)

    def withdraw(self, beginning: bytes) -> bool:
        return self._machine.world.withdraw(self._machine, self._target, beginning)


class World:
    """All workers, the network and the clock, and counts of what has happened."""

    def __init__(self, size: int, chance: Chance) -> None:
        self.chance = chance
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.flights: list[Flight] = []
        self.killed: set[int] = set()
        self.unwanted: list[agent_pb2.Envelope] = []
        """Answers that no thread had taken when the connection broke that brought them: the calls have failed."""
        self._timers: list[tuple[float, int, Machine, Task, Callable[[], bool]]] = []
        self._order = itertools.count()
        self._links: set[tuple[Machine, Machine]] = set()
        """(a, b): a notices when b dies."""
        self._notices: list[tuple[Machine, Machine]] = []
        """(a, b): b has died, and a has not noticed yet."""
        self._healing: list[tuple[Machine, Machine]] = []
        """(a, b): the connection of a to b broke, and a is going to connect again."""
        self.machines = [Machine(self, WorkerInfo(f"worker{number}", number)) for number in range(size)]
        members = [Member(machine.info, "") for machine in self.machines]
        for machine in self.machines:
            machine.start(members)

    @property
    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.alive]

    # What can happen next.

    def step(self) -> bool:
        """Has one thing happen; returns False if nothing is left to happen."""
        ready: list[Task] = [partial(self._run, m, m.control.popleft) for m in self.alive if m.control]
        for machine in self.alive:
            ready += [
                partial(self._run, machine, partial(_take, machine.tasks, i)) for i in range(len(machine.tasks))
            ]
            ready += [partial(machine.resume, waiter) for waiter in machine.waiting if waiter.future.done()]
        ready += [partial(self._arrive, flight) for flight in self.flights]
        ready += [partial(self._notice, *notice) for notice in self._notices]
        ready += [partial(self._heal, *pair) for pair in self._healing]
        if self._timers and (not ready or self.chance.happens(3)):
            return self._next_timer() or bool(ready)
        if not ready:
            return False
        ready[self.chance.pick(min(len(ready), 256))]()
        return True

    def settle(self) -> None:
        """Has things happen until nothing is left to happen."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError(f"something is left to happen after {MAX_STEPS} steps")

    def _run(self, machine: Machine, take: Callable[[], Task]) -> None:
        task = take()
        # Only a message with references, or a call that names values by their ids, may have to wait.
        if isinstance(task, partial) and any(
            isinstance(a, agent_pb2.Envelope) and (a.references or a.type == MessageType.CALL) for a in task.args
        ):
            machine.run_waiting(task)
        else:
            machine.run(task)

    def _next_timer(self) -> bool:
        while self._timers:
            when, _, machine, task, is_live = heapq.heappop(self._timers)
            if machine.alive and is_live():
                self.now = when
                machine.run(task)
                return True
        return False

    def call_later(
        self, machine: Machine, seconds: float, task: Task, is_live: Callable[[], bool] = lambda: True
    ) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._order), machine, task, is_live))

    # The network.

    def send(self, source: Machine, target: Machine, envelope: agent_pb2.Envelope) -> None:
        if not source.alive:
            return
        # A caller never hears of a failure that cannot be sent, so those are.
        forced, source.network.fail_next = source.network.fail_next, False
        if envelope.type != MessageType.ERROR and (forced or self.chance.happens(2)):
            self.counts["not sent"] += 1
            raise SendFailedError(target.info.name, "the simulation failed it")
        self.counts["sent"] += 1
        if target.alive:
            self.flights.append(Flight(source, target, envelope))

    def withdraw(self, source: Machine, target: Machine, beginning: bytes) -> bool:
        """Takes a message back, if it has not been sent yet: some of those in flight count as not sent."""
        here = [
            flight
            for flight in self.flights
            if flight.source is source
            and flight.target is target
            and flight.envelope.SerializeToString().startswith(beginning)
        ]
        if not here or self.chance.pick(2):
            return False
        self.counts["withdrawn"] += 1
        self.flights.remove(here[0])
        return True

    def _arrive(self, flight: Flight) -> None:
        earlier = self.flights[: self.flights.index(flight)]
        self.flights.remove(flight)
        if any(other.source is flight.source and other.target is flight.target for other in earlier):
            self.counts["reordered"] += 1
        if flight.envelope.HasField("control"):
            self.counts["control messages"] += len(flight.envelope.control.messages)
        if (flight.target, flight.source) in self._healing:
            self._heal(flight.target, flight.source)
        self.connect(flight.target, flight.source)
        envelope = agent_pb2.Envelope()
        envelope.CopyFrom(flight.envelope)
        messages, source = flight.target.network.messages, flight.target.peer(flight.source)
        if envelope.type == MessageType.CONTROL:
            messages.on_message(source, envelope, read_inline, 0, announced=False)
            return
        messages.on_announced(source, envelope)
        refusable = envelope.type != MessageType.CANCEL  # which has nothing to refuse
        if refusable and self.chance.happens(2):
            self.counts["refused"] += 1
            self.dropped(envelope)
            messages.on_rejected(source, envelope, ValueError("the simulation refused it"))
        else:
            messages.on_message(source, envelope, read_inline, 0, announced=True)

    def dropped(self, envelope: agent_pb2.Envelope) -> None:
        """Notes that a message is rejected, or lost."""

    # Broken connections.

    def break_connection(self, one: Machine, other: Machine) -> None:
        """Breaks the connection of two workers: what is in flight is lost, and they connect again."""
        if (one, other) not in self._links or not (one.alive and other.alive):
            return
        self.connect(other, one)
        self.counts["broken"] += 1
        between = [flight for flight in self.flights if {flight.source, flight.target} == {one, other}]
        self.counts["lost"] += len(between)
        for flight in between:
            self.dropped(flight.envelope)
        self.flights = [flight for flight in self.flights if flight not in between]
        for here, there in ((one, other), (other, one)):
            unsent = {
                agent_pb2.Envelope(id=flight.envelope.id, type=flight.envelope.type).SerializeToString()
                for flight in between
                if flight.source is here and flight.envelope.id and self.chance.pick(2)
            }
            if (here, there) not in self._healing:
                self._healing.append((here, there))
            self.unwanted += [each for each in here.arrived_from(there) if each.type in ANSWERS]
            suspect(here.peer(there), BROKEN, unsent, waits=True)

    def _heal(self, here: Machine, there: Machine) -> None:
        self._healing.remove((here, there))
        bring_back(here.peer(there))

    # Death.

    def kill(self, victim: Machine) -> None:
        """Kills a worker. Messages that it has sent may still arrive."""
        victim.alive = False
        self.killed.add(victim.info.id)
        self.flights = [
            flight
            for flight in self.flights
            if flight.target is not victim and (flight.source is not victim or self.chance.pick(2))
        ]
        for knower, known in self._links:
            if known is victim and knower.alive:
                self._notices.append((knower, victim))
        self._notices = [(knower, known) for knower, known in self._notices if knower is not victim]
        self._healing = [pair for pair in self._healing if victim not in pair]
        self._notices.sort(key=lambda notice: (notice[0].info.id, notice[1].info.id))
        victim.held.clear()
        victim.tasks.clear()
        victim.control.clear()
        for waiter in list(victim.waiting):
            victim.resume(waiter)

    def connect(self, knower: Machine, known: Machine) -> None:
        """Connects two workers: the first notices when the second dies, or that it has died."""
        if (knower, known) not in self._links and knower is not known:
            self._links.add((knower, known))
            if not known.alive:
                self._notices.append((knower, known))

    def _notice(self, knower: Machine, dead: Machine) -> None:
        self._notices.remove((knower, dead))
        self.flights = [f for f in self.flights if not (f.source is dead and f.target is knower)]
        end = WorkerEnd(LossCause.DISCONNECTED, REASON)
        lose(knower.peer(dead), end)


def _take(tasks: deque[Task], index: int) -> Task:
    task = tasks[index]
    del tasks[index]
    return task
