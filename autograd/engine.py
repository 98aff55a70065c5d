"""Backward passes across workers, on PyTorch's own engine.

A pass over several workers has a part on each of them (part.py). The worker that calls `backward` finds out which
workers take part, has them run their parts by its `PassCoordinator`, and runs its own.
"""

import itertools
import reprlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import (
    AutogradError,
    LimitReachedError,
    PolicyError,
    UnknownContextError,
    WorkerLostError,
    WorkerSuspectError,
)
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Incoming, MessageType, Request, UnwantedMessageError
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future, text_of, without_frames
from . import replicas
from .backward_pass import PassPart
from .contexts import Context, Contexts, Exchanged
from .gradient_sender import (
    AnsweringSender,
    Compressed,
    GradientSender,
    MessageGradients,
    PassId,
    decompress,
    post_gradients,
)
from .graph import Closure, Graph, SendId, start_node
from .part import Part

__all__ = [
    "AnomalyScopes",
    "Engine",
    "Mode",
    "PassCoordinator",
    "check_roots",
]


Mode = Literal["smart", "fast"]

MAX_RUNNING = 256
"""Passes that one worker has another one run at a time: the gates of each wait on a thread, for which there is no
other way in torch's engine."""

_BACKWARD = MessageType.BACKWARD

EXTRA_TIMEOUT_S = 10.0
"""How much longer than the timeout of a pass its coordinator waits for a worker, so that the worker's own
error, which says what it waited for, arrives first."""


@final
class AnomalyScopes:
    """Enters torch's anomaly mode with the first scope that asks for it, and leaves it with the last.

    torch has one mode for the process and all its threads. A worker is in it while it runs a call, or its part of
    a backward pass, for a worker that is in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._first: torch.autograd.set_detect_anomaly | None = None
        """Restores what was set before the first scope."""

    @contextmanager
    def scope(self, check_nan: bool) -> Iterator[None]:
        """Context manager for running what a worker in this mode asks for, with its `check_nan`."""
        with self._lock:
            mode = torch.autograd.set_detect_anomaly(True, check_nan)  # noqa: FBT003 - sets the mode at once
            if self._first is None:
                self._first = mode
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count and self._first is not None:
                    self._first.__exit__()
                    self._first = None


def _complete_closure(agent: RpcAgent, context: Context, closure: Closure) -> Set[SendId]:
    """Returns all sends of a closure (SMART mode). Asks other workers for what was omitted from headers."""
    sends, wanted, asked = set(closure.sends), set(closure.omitted), set[SendId]()
    while wanted:
        asked |= wanted
        wanted_by_worker = _by_worker(wanted)
        closures = [context.closure_of_sends(wanted_by_worker.pop(agent.info.wire_id, []))]
        requests = {worker: (context.id, message_ids) for worker, message_ids in wanted_by_worker.items()}
        closures += _ask(agent, MessageType.CLOSURE, requests).values()
        sends.update(*(each.sends for each in closures))
        wanted = set[SendId]().union(*(each.omitted for each in closures)) - asked
    return sends


def _all_sends(agent: RpcAgent, context: Context) -> Set[SendId]:
    """Returns all sends of a context (FAST mode). Asks all workers that the context has reached.

    Raises AutogradError if a message has not arrived: its gradients would be waited for in vain.
    """
    me = agent.info.wire_id
    answers: dict[int, Exchanged] = {me: context.exchanged()}
    wanted = set(answers[me][2])
    while wanted := wanted - answers.keys():
        found = _ask(agent, MessageType.SENDS, dict.fromkeys(wanted, context.id))
        answers.update(found)
        wanted = {each for _, _, reached in found.values() for each in reached}
    sends = {(worker, number): to for worker, (sent, _, _) in answers.items() for number, to in sent.items()}
    arrived = {(send, worker) for worker, (_, received, _) in answers.items() for send in received}
    if missing := sends.items() - arrived:
        (worker, number), to = min(missing)
        sender, receiver = agent.incarnation(worker).name, agent.incarnation(to).name
        raise AutogradError(
            f"the backward pass of autograd context {context.id} cannot end in FAST mode: message {number} of "
            f"worker {sender!r} to worker {receiver!r} has not arrived there, because its call failed or is still "
            "waited for"
        )
    return sends.keys()


def _by_worker(sends: Iterable[SendId]) -> dict[int, list[int]]:
    """Returns the message ids of sends by sending worker."""
    found: dict[int, list[int]] = defaultdict(list)
    for worker, message_id in sends:
        found[worker].append(message_id)
    return found


def _ask(agent: RpcAgent, kind: MessageType.ValueType, requests: Mapping[int, object]) -> dict[int, Any]:
    """Sends a request to each of several workers at once; returns the answers by worker."""
    futures = {
        worker: agent.request(agent.incarnation(worker), Request(kind, value))
        for worker, value in requests.items()
    }
    with agent.blocking():
        return {worker: future.wait_for_answer() for worker, future in futures.items()}


class _PassRequest(NamedTuple):
    """Asks a worker to run its part of a pass: the body of a BACKWARD message, with gradients for it or None.

    message_ids: the sends of the worker that take part.
    timeout: seconds for which gates wait, 0 for no timeout.
    anomaly: `check_nan` of the anomaly mode of the worker that called `backward`; None if the mode is off.

    It is sent as a plain tuple, which unpickles faster.
    """

    context_id: int
    pass_id: PassId
    message_ids: list[int]
    retain_graph: bool
    timeout: float
    anomaly: bool | None


@final
class PassCoordinator:
    """Has other workers run their parts of a pass, waits for them, and ends the pass everywhere when one fails.

    It is the GradientSender of the caller's part: the request to a worker travels with the first gradients for it.
    """

    def __init__(
        self,
        agent: RpcAgent,
        context: Context,
        identifier: PassId,
        requests: Mapping[int, _PassRequest],
        *,
        one_answer: bool = False,
    ) -> None:
        """Makes the coordinator of a pass, with the parts of the other workers that take part, by their ids.

        `one_answer` is whether there is one other worker, for whose answer the thread that runs the pass waits.
        Then the thread that reads the answer wakes it, and does nothing else.
        """
        self._agent = agent
        self._context = context
        self._id = identifier
        self._workers = list(requests)
        self._not_started = dict(requests)
        self._one_answer = one_answer
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._parts: list[Future[Any]] = []

    def start(self, receives: Sequence[Any]) -> None:
        """Has the workers run their parts, except those to which these `RecvRpc` nodes send gradients soon.

        The request goes with them.
        """
        for worker in self._not_started.keys() - {node.sender for node in receives}:
            self._start(worker, None)

    def send(self, send: SendId, gradients: Compressed, *, is_last: bool) -> None:  # noqa: ARG002
        """Sends the gradients of a message to its sender, with the request if it has not been sent."""
        worker, message_id = send
        if not self._start(worker, (message_id, gradients)):
            post_gradients(self._agent, self._context.id, self._id, send, gradients)

    def flush(self) -> None:
        """Has the workers run their parts that have not been asked yet."""
        for worker in list(self._not_started):
            self._start(worker, None)

    def _start(self, worker: int, gradients: MessageGradients | None) -> bool:
        """Has a worker run its part, unless it has been asked."""
        request = self._not_started.pop(worker, None)
        if request is None:
            return False
        timeout = request.timeout and request.timeout + EXTRA_TIMEOUT_S
        done = self._agent.request(
            self._agent.incarnation(worker),
            Request(_BACKWARD, (tuple(request), gradients), timeout=timeout),
        )
        self._parts.append(done)
        if not self._one_answer:
            done.add_done_callback(partial(self._part_done, worker))
        return True

    def fail(self, error: Exception) -> None:
        """Ends the pass on all workers. Only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._not_started.clear()
        aborted = AutogradError(f"the backward pass was ended by an error elsewhere: {error}")
        self._context.passes.abort(self._id, aborted)
        for worker in self._workers:
            self._agent.control.send(
                self._agent.incarnation(worker), "autograd.abort", (self._context.id, self._id, aborted)
            )

    def fail_for(self, worker: int, error: Exception) -> None:
        """Ends the pass as a worker asks for. Raises AutogradError if that takes no part in it."""
        if worker not in self._workers:
            raise AutogradError(f"worker {worker} takes no part in backward pass {self._id}")
        self.fail(error)

    def collect(self) -> None:
        """Waits for the gradients in the answer of the one other worker; others are passed on as they arrive."""
        if self._one_answer:
            if self._not_started:
                self.flush()
            self._take_gradients(self._workers[0], self._parts[0].wait_for_answer())
            self._parts.clear()

    def wait(self) -> None:
        """Waits until all workers are done; raises the first error."""
        if self._not_started:
            self.flush()
        for part in self._parts:
            try:
                if self._one_answer:
                    part.wait_for_answer()
                else:
                    part.wait()
            except Exception as error:
                self.fail(error)
        if self._error is not None:
            raise self._error

    def _part_done(self, worker: int, part: torch.futures.Future[MessageGradients | None]) -> None:
        """Handles the answer of a worker, which may have gradients for this one."""
        try:
            self._take_gradients(worker, part.value())
        except Exception as error:
            self.fail(without_frames(error))

    def _take_gradients(self, worker: int, answer: MessageGradients | None) -> None:
        """Passes the gradients of an answer to their gate."""
        if answer is not None:
            message_id, gradients = answer
            self._context.set_gradients(worker, self._id, message_id, decompress(gradients))


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises AutogradError, saying which one and why, unless all roots are scalars that require grad."""
    if isinstance(roots, torch.Tensor) or not roots:
        missing = "No tensors provided for gradient computation: " if not isinstance(roots, torch.Tensor) else ""
        raise AutogradError(f"{missing}roots is {roots!r}; give a list of scalar tensors, [loss] for one")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise AutogradError(f"roots[{index}] is {root!r}, which is not a tensor")
        if not root.requires_grad:
            raise AutogradError(
                f"requires_grad not set on roots[{index}]: nothing that it was computed from has it, "
                "or it was computed under torch.no_grad()"
            )
        if root.numel() != 1:
            raise AutogradError(
                f"roots[{index}] has shape {tuple(root.shape)} and is not a scalar, all roots need to be scalar"
            )


@final
class Engine:
    """Runs this worker's backward passes, and its parts of other workers' passes."""

    def __init__(self, agent: RpcAgent, contexts: Contexts, anomaly: AnomalyScopes) -> None:
        self._agent = agent
        self._contexts = contexts
        self._anomaly = anomaly
        self._pass_numbers = itertools.count(1)
        self._coordinators: dict[PassId, PassCoordinator] = {}
        """Those of the passes that this worker has begun and that have not ended."""
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()
        """By worker, the passes that it has this worker run. Guarded by the lock."""
        self.one_root_at_a_time = False
        """Run all graphs as those with nodes on several devices are; for tests on the CPU."""
        agent.control.on("autograd.abort", self._on_abort)
        agent.control.on("autograd.fail", self._on_fail)

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        mode: Mode = "smart",
        timeout: float = 0.0,
    ) -> None:
        """Runs a pass from roots on this worker until it has ended on all. Raises the first error on any."""
        graph = Graph([start_node(root) for root in roots])
        if mode == "fast":
            sends = _all_sends(self._agent, context)
        else:
            closure = graph.closure()
            sends = _complete_closure(self._agent, context, closure) if closure.omitted else closure.sends
        message_ids = _by_worker(sends)
        part = Part(
            context,
            roots,
            graph,
            message_ids.pop(self._agent.info.wire_id, []),
            one_root_at_a_time=self.one_root_at_a_time,
        )
        pass_id = (self._agent.info.wire_id, next(self._pass_numbers))
        anomaly = torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else None
        requests = {}
        for worker, of_worker in message_ids.items():
            requests[worker] = _PassRequest(context.id, pass_id, of_worker, retain_graph, timeout, anomaly)
        coordinator = PassCoordinator(
            self._agent,
            context,
            pass_id,
            requests,
            one_answer=len(message_ids) == 1 and not part.enters_gates and not timeout,
        )
        self._coordinators[pass_id] = coordinator
        try:
            coordinator.start(graph.receives)
            try:
                self._run(context, part, pass_id, coordinator, retain_graph, timeout, coordinator.collect)
            except Exception as error:
                coordinator.fail(error)
            coordinator.wait()
        except BaseException as error:  # such as Ctrl-C: the other workers must not wait for this one's gradients
            reason = f"{type(error).__name__} on worker {self._agent.info.name!r}"
            coordinator.fail(error if isinstance(error, Exception) else AutogradError(reason))
            raise
        finally:
            del self._coordinators[pass_id]

    def _begin_for(self, caller: WorkerInfo) -> None:
        """Counts what a worker has this one run, which holds a thread until others answer; `_end_for` follows."""
        with self._lock:
            if self._running[caller.wire_id] >= MAX_RUNNING:
                raise LimitReachedError(
                    f"worker {caller.name!r} has {MAX_RUNNING} backward passes running here",
                    f"MAX_RUNNING={MAX_RUNNING}",
                )
            self._running[caller.wire_id] += 1

    def _end_for(self, caller: WorkerInfo) -> None:
        """Counts the end of what a worker has had this one run."""
        with self._lock:
            self._running[caller.wire_id] -= 1

    # Handlers of messages.

    def serve_part(self, message: Incoming) -> MessageGradients | None:
        """Runs this worker's part of another worker's pass: the handler of BACKWARD.

        Returns gradients for that worker, if the last ones are.
        """
        request, first = message.value
        context_id, pass_id, message_ids, retain_graph, timeout, anomaly = request
        caller, _ = pass_id
        if caller != message.source.wire_id:
            raise AutogradError(f"{message.source.name!r} asks for a part of a pass of worker {caller}")
        message.tensors.clear()  # whose memory a gradient may take over
        context = self._contexts.get(context_id)
        if first is not None:
            message_id, compressed = first
            context.set_gradients(caller, pass_id, message_id, decompress(compressed))
        sender = AnsweringSender(self._agent, context.id, pass_id, partial(context.passes.note_receiver, pass_id))
        part = Part(
            context,
            [],
            Graph(),
            message_ids,
            one_root_at_a_time=self.one_root_at_a_time,
        )
        self._begin_for(message.source)
        try:
            if anomaly is None:
                self._run(context, part, pass_id, sender, retain_graph, timeout)
            else:
                with self._anomaly.scope(anomaly):
                    self._run(context, part, pass_id, sender, retain_graph, timeout)
        finally:
            self._end_for(message.source)
        return sender.take()

    def serve_gradients(self, message: Incoming) -> None:
        """Passes received gradients to the gate of their message: the handler of GRADIENTS."""
        header, compressed = message.envelope.gradients, message.value
        message.tensors.clear()  # as in `serve_part`
        if (context := self._contexts.find(header.context_id)) is not None:
            pass_id = (header.caller, header.pass_number)
            context.set_gradients(message.source.wire_id, pass_id, header.message_id, decompress(compressed))

    def check_gradients(self, message: Incoming) -> None:
        """Raises an error unless gradients come from the receiver of their message."""
        header = message.envelope.gradients
        if (context := self._contexts.find(header.context_id)) is None:
            raise UnwantedMessageError(f"autograd context {header.context_id} has ended")
        context.check_receiver(message.source.wire_id, header.message_id)
        if not self._agent.is_member(header.caller):
            raise AutogradError(f"there is no worker {header.caller} to begin a backward pass")

    def fail_gradients(self, message: Incoming, error: Exception) -> None:
        """Fails the pass of gradients that cannot be decoded, or do not come: here, and by its caller everywhere.

        Its gate would wait for them until the timeout.
        """
        header = message.envelope.gradients
        if (context := self._contexts.find(header.context_id)) is not None:
            context.check_receiver(message.source.wire_id, header.message_id)
            if not isinstance(error, PolicyError | WorkerLostError | WorkerSuspectError):  # which name the sender
                reader, sender = self._agent.info.name, message.source.name
                problem = f"worker {reader!r} cannot read the gradients that worker {sender!r} has sent"
                error = AutogradError(f"{problem}: {type(error).__name__}: {text_of(error)}")
            context.passes.abort((header.caller, header.pass_number), without_frames(error))

    def serve_closure(self, message: Incoming) -> Closure:
        """Returns the closure of sends of this worker: the handler of CLOSURE."""
        context_id, message_ids = message.value
        return self._contexts.get(context_id).closure_of_sends(message_ids)

    def serve_sends(self, message: Incoming) -> Exchanged:
        """Returns what this worker has sent and received in a context: the handler of SENDS."""
        context = self._contexts.find(message.value)
        if context is not None:
            return context.exchanged()
        if self._contexts.has_ended(message.value):  # else no message of it has arrived
            raise UnknownContextError(message.value, self._agent.info.name)
        return {}, [], []

    def serve_rref_backward(self, message: Incoming) -> None:
        """Runs a backward pass from the value of an RRef that this worker owns: the handler of RREF_BACKWARD."""
        rref, context_id, retain_graph = message.value
        root = rref._value_here()
        if not isinstance(root, torch.Tensor):
            raise AutogradError(
                f"RRef should contain a tensor for .backward(), but {rref} has a {type(root).__name__}"
            )
        context = self._contexts.get(context_id)
        check_roots([root])
        self._begin_for(message.source)
        try:
            with self._agent.blocking():
                self.backward(context, [root], retain_graph=retain_graph)
        finally:
            self._end_for(message.source)

    def _on_abort(self, sender: WorkerInfo, payload: Any) -> None:
        """Ends a pass that has failed on another worker."""
        context_id, pass_id, error = payload
        caller, number = pass_id
        if caller != sender.wire_id or type(number) is not int or not isinstance(error, Exception):
            raise AutogradError(f"{sender.name!r} cannot abort a pass of worker {reprlib.repr(caller)}")
        if (context := self._contexts.find(context_id)) is not None:
            context.passes.abort(pass_id, error)

    def _on_fail(self, sender: WorkerInfo, payload: Any) -> None:
        """Fails a pass that this worker has begun, as one that takes part asks for."""
        _, (caller, number), error = payload
        if caller != self._agent.info.wire_id or type(number) is not int or not isinstance(error, Exception):
            raise AutogradError(f"{sender.name!r} cannot fail a pass of worker {reprlib.repr(caller)}")
        if (coordinator := self._coordinators.get((caller, number))) is not None:
            coordinator.fail_for(sender.wire_id, error)

    # This worker's part.

    def _run(
        self,
        context: Context,
        part: Part,
        pass_id: PassId,
        sender: GradientSender,
        retain_graph: bool,
        timeout: float,
        collect: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs this worker's part of a pass and adds the gradients of leaves to the context; see `Part.run`."""
        graph = part.graph
        replicated = replicas.replicated_modules(graph.leaves) if replicas.may_exist else ()
        running = context.passes.begin(
            pass_id, PassPart(part.awaited, len(graph.receives), timeout, sender, part.partial)
        )
        before = Context.current()
        Context.set_current(context)  # of the hooks
        try:
            nodes, gradients = part.run(running, retain_graph=retain_graph, collect=collect)
            if replicated:
                sender.flush()  # averaging waits for other replicas
            for module in replicated:
                nodes, gradients = self._average(context, module, nodes, gradients)
            context.gradients.accumulate(nodes, gradients, before_hook=sender.flush)
        finally:
            # Not before: hooks would overwrite what another pass of the context has added meanwhile.
            context.passes.end(running)
            Context.set_current(before)

    def _average(
        self,
        context: Context,
        module: DistributedDataParallel,
        nodes: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[list[Any], list[torch.Tensor | None]]:
        """Averages the gradients of a replicated module among its replicas, into the context.

        Returns the accumulation nodes of the other leaves, and their gradients.
        """
        parameters = list(module.parameters())
        replicated = set(parameters)
        found = list(zip(nodes, gradients, strict=True))
        captured = {node.variable: gradient for node, gradient in found if node.variable in replicated}
        try:
            with self._agent.blocking():
                context.gradients.change(parameters, lambda so_far: replicas.average(module, captured, so_far))
        except Exception as error:
            error.add_note(
                f"while DistributedDataParallel averaged the gradients of {type(module.module).__name__} among "
                "replicas: a replica whose own pass has failed does not take part"
            )
            raise
        others = [(node, gradient) for node, gradient in found if node.variable not in captured]
        return [node for node, _ in others], [gradient for _, gradient in others]
