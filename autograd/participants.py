"""Which sends, on which workers, take part in a backward pass."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType, Request
from .closure import Closure, SendId
from .context import Context, Exchanged

__all__ = ["all_sends", "by_worker", "complete_closure"]


def complete_closure(agent: RpcAgent, context: Context, closure: Closure) -> Set[SendId]:
    """Returns all sends of a closure (SMART mode). Asks other workers for what was omitted from headers."""
    sends, wanted, asked = set(closure.sends), set(closure.omitted), set[SendId]()
    while wanted:
        asked |= wanted
        wanted_by_worker = by_worker(wanted)
        closures = [context.closure_of_sends(wanted_by_worker.pop(agent.info.wire_id, []))]
        requests = {worker: (context.id, message_ids) for worker, message_ids in wanted_by_worker.items()}
        closures += _ask(agent, MessageType.CLOSURE, requests).values()
        sends.update(*(each.sends for each in closures))
        wanted = set[SendId]().union(*(each.omitted for each in closures)) - asked
    return sends


def all_sends(agent: RpcAgent, context: Context) -> Set[SendId]:
    """Returns all sends of a context (FAST mode). Asks all workers that the context has reached.

    Raises:
        AutogradError: a message has not arrived. The roots cannot depend on it, so its gradients would be waited
            for in vain.
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


def by_worker(sends: Iterable[SendId]) -> dict[int, list[int]]:
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
