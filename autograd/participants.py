"""Which sends, on which workers, take part in a backward pass."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType, Request
from .closure import Closure, SendId
from .context import Context

__all__ = ["all_sends", "by_worker", "complete_closure"]


def complete_closure(agent: RpcAgent, context: Context, closure: Closure) -> Set[SendId]:
    """Returns all sends of a closure (SMART mode). Asks other workers for what was omitted from headers."""
    if not closure.omitted:
        return closure.sends
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
    """Returns all sends of a context (FAST mode). Asks all workers that the context has reached."""
    me = agent.info.wire_id
    message_ids, reached = context.sends()
    sends = {(me, message_id) for message_id in message_ids}
    wanted, asked = set(reached), {me}
    while wanted := wanted - asked:
        asked |= wanted
        answers = _ask(agent, MessageType.SENDS, dict.fromkeys(wanted, context.id))
        for worker, (message_ids, reached) in answers.items():
            sends.update((worker, message_id) for message_id in message_ids)
            wanted.update(reached)
    return sends


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
        return {worker: future.wait_alone() for worker, future in futures.items()}
