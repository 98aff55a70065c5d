"""Workers end, abort and fill nothing but their own contexts and passes, and leave a bounded number of them."""

import threading
from collections import Counter

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd import backward_pass, contexts, engine
from gradwire.autograd.extension import Autograd
from gradwire.errors import AutogradError, LimitReachedError, LossCause, RpcTimeoutError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.contracts.worker import WorkerEnd
from gradwire.rpc.execution.futures import error_of

from tests.remote_functions import identity, wait_until


def tell(sender, receiver, kind: str, payload: object) -> Exception | None:
    """Sends a control message; returns what its receiver says."""
    answered = threading.Event()
    told: list[Exception | None] = []
    sender.control.send(receiver.info, kind, payload, lambda error: (told.append(error), answered.set()))
    assert answered.wait(20)
    return told[0]


def contexts_of(agent) -> contexts.Contexts:
    return agent.extension(Autograd).contexts


def call_in(context_id: int, sender, receiver) -> None:
    """Calls a worker as if in a context."""

    def fill(envelope: agent_pb2.Envelope) -> None:
        envelope.autograd.context_id = context_id

    sender.request(receiver.info, Request(MessageType.CALL, (identity, (1,), {}), header=fill)).wait()


def test_messages_of_contexts_of_nobody_leave_none(agents):
    a, b = agents(2)
    for number in range(50):
        with pytest.raises(AutogradError, match="there is no worker 77"):
            call_in(77 << 48 | number, a, b)
        call_in(b.info.id << 48 | 1000 + number, a, b)  # as if b had created it
    assert len(contexts_of(b)) == 0


def test_contexts_that_a_worker_brings_are_bounded(agents, monkeypatch):
    monkeypatch.setattr(contexts, "MAX_JOINED_CONTEXTS", 3)
    a, b, c = agents(3)
    for number in range(3):
        call_in(a.info.id << 48 | number, a, b)
    with pytest.raises(LimitReachedError, match="3 autograd contexts of worker 0 have not ended here"):
        call_in(a.info.id << 48 | 9, a, b)
    call_in(c.info.id << 48 | 9, c, b)
    assert tell(a, b, "autograd.release", (a.info.id << 48, frozenset(), "")) is None
    call_in(a.info.id << 48 | 9, a, b)
    assert len(contexts_of(b)) == 4


def test_a_context_is_ended_by_those_that_take_part(agents):
    a, b, c = agents(3)
    identifier = a.info.id << 48 | 5
    call_in(identifier, a, b)
    assert isinstance(tell(c, b, "autograd.release", (identifier, frozenset(), "")), AutogradError)
    assert len(contexts_of(b)) == 1
    call_in(identifier, c, b)
    assert tell(c, b, "autograd.release", (identifier, frozenset(), "")) is None
    assert len(contexts_of(b)) == 0
    call_in(identifier, a, b)  # a late message
    assert len(contexts_of(b)) == 0


def test_a_context_that_has_ended_is_never_opened_again(agents):
    """However many others have ended since; and little is remembered of those."""
    a, b, c = agents(3)
    first, kept, later = contexts_of(a).open().id, contexts_of(a).open().id, contexts_of(a).open().id
    call_in(first, a, b)
    for _ in range(6000):
        contexts_of(a).open()
    for identifier in range(later, later + 6001):
        contexts_of(b).release(identifier, sender=c.info.wire_id)  # of which no message has arrived yet
    for identifier in (first, *range(later, later + 6001)):
        contexts_of(a).release(identifier)
        contexts_of(b).release(identifier, sender=a.info.wire_id)
    wait_until(lambda: len(contexts_of(b)._ended) < 2000)
    for identifier in (first, later, later + 6000):
        for sender in (a, c):
            call_in(identifier, sender, b)
            assert len(contexts_of(b)) == 0
    assert contexts_of(b).has_ended(first)
    call_in(kept, c, b)
    assert len(contexts_of(b)) == 1


def test_each_worker_tells_of_its_own_contexts_which_are_open(agents):
    a, b = agents(2)
    for payload in (
        (b.info.wire_id << 48 | 9, frozenset()),
        (a.info.wire_id << 48 | 9, frozenset("1")),
        (a.info.wire_id << 48 | 9, [1]),
        (9,),
        None,
    ):
        assert isinstance(tell(a, b, "autograd.open", payload), ValueError)
    call_in(a.info.wire_id << 48 | 10, a, b)
    assert len(contexts_of(b)) == 1


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "overtaken"])
def test_what_a_creator_tells_may_arrive_in_any_order(reverse):
    known = contexts.EndedContexts(lambda _creator: None)
    for identifier in (5, 7):
        known.add(0, identifier)
    told = [contexts.OpenContexts(20, frozenset({7, 9})), contexts.OpenContexts(20, frozenset({9}))]
    for each in reversed(told) if reverse else told:
        known.learn(0, each)
    assert [known.has_ended(0, identifier) for identifier in (5, 7, 9)] == [True, True, False]


def test_of_too_many_open_contexts_the_oldest_are_told(monkeypatch):
    monkeypatch.setattr(contexts, "MAX_NAMED", 3)
    opened = contexts.OpenContexts.of([9, 1, 5, 7], 20)
    assert [number for number in range(20) if opened.exclude(number)] == [0, 2, 3, 4, 6, 8]


def test_a_context_is_not_ended_for_its_creator(agents):
    a, b = agents(2)
    with holder.using(a), autograd.context() as identifier:
        rpc.rpc_sync(b.info, identity, (1,))
        call_in(identifier, b, a)
        assert isinstance(tell(b, a, "autograd.release", (identifier, frozenset(), "")), AutogradError)
        assert len(contexts_of(a)) == 1


def test_who_ends_contexts_of_others_beforehand_ends_them_for_himself(agents):
    a, b, c = agents(3)
    identifier = a.info.id << 48 | 5
    assert tell(c, b, "autograd.release", (identifier, frozenset(), "")) is None
    call_in(identifier, c, b)
    assert len(contexts_of(b)) == 0
    call_in(identifier, a, b)
    assert len(contexts_of(b)) == 1


def test_little_is_kept_of_how_a_creator_was_lost_for_others(agents, monkeypatch):
    monkeypatch.setattr(contexts, "MAX_REASON_CHARACTERS", 8)
    a, b, c = agents(3)
    identifier = a.info.id << 48 | 5
    call_in(identifier, c, b)
    assert tell(c, b, "autograd.release", (identifier, frozenset(), "x" * 100)) is None
    with pytest.raises(AutogradError, match="is lost: x{8}(?!x)"):
        call_in(identifier, a, b)


def lose(monkeypatch, agent, lost) -> None:
    """Has one agent take another for lost, which the others do not."""
    end = WorkerEnd(LossCause.DISCONNECTED, "its connection broke")
    ends = {lost.info.wire_id: end}
    monkeypatch.setattr(agent, "end_of", ends.get)
    agent.extension(Autograd).on_worker_lost(lost.info, end)


def test_a_call_in_a_context_of_a_lost_worker_fails(agents, monkeypatch):
    """It would run outside of the context, and its gradients would be missing without an error."""
    a, b, c = agents(3)
    identifier = a.info.wire_id << 48 | 5
    call_in(identifier, c, b)
    lose(monkeypatch, b, a)
    for number in (5, 6):
        with pytest.raises(AutogradError, match="has ended on worker 'agent1', .* creator 'agent0' is lost: its"):
            call_in(a.info.wire_id << 48 | number, c, b)
    assert len(contexts_of(b)) == 0


def test_a_call_in_a_context_of_a_worker_that_another_one_has_lost_fails(agents, monkeypatch):
    """That one has told the others that the context has ended, and they do not run the call outside of it."""
    a, b, c = agents(3)
    identifier = a.info.wire_id << 48 | 5
    call_in(identifier, a, c)
    contexts_of(c).get(identifier).reach(b.info.wire_id)
    call_in(identifier, c, b)
    lose(monkeypatch, c, a)
    wait_until(lambda: not len(contexts_of(b)))
    with pytest.raises(AutogradError, match="has ended on worker 'agent1', .* creator 'agent0' is lost: its"):
        call_in(identifier, a, b)
    assert len(contexts_of(b)) == 0
    call_in(identifier + 1, a, b)
    assert len(contexts_of(b)) == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_answer_in_a_context_whose_creator_is_lost_meanwhile_has_gradients_or_fails(
    agents, monkeypatch, requires_grad
):
    a, b, c = agents(3)
    identifier = a.info.wire_id << 48 | 5

    def fill(envelope: agent_pb2.Envelope) -> None:
        envelope.autograd.context_id = identifier

    monkeypatch.setitem(globals(), "during_call", lambda: lose(monkeypatch, b, a))
    answer = c.request(b.info, Request(MessageType.CALL, (leaf_after_loss, (requires_grad,), {}), header=fill))
    if requires_grad:
        with pytest.raises(AutogradError, match="creator 'agent0' is lost"):
            answer.wait()
    else:
        assert torch.equal(answer.wait(), torch.ones(3))
    assert len(contexts_of(b)) == 0


def during_call() -> None:
    """What a call does, for a test."""


def leaf_after_loss(requires_grad: bool) -> torch.Tensor:
    during_call()
    return torch.ones(3, requires_grad=requires_grad)


def test_a_pass_is_aborted_by_its_caller(agents, monkeypatch):
    monkeypatch.setattr(backward_pass, "MAX_PASSES", 3)
    a, b, c = agents(3)
    identifier = a.info.id << 48 | 5
    call_in(identifier, a, b)
    part = contexts_of(b).get(identifier)
    error = ValueError("as the caller says")
    for wrong in ((identifier, (a.info.id, 1), error), (identifier, (c.info.id, 1), 3), (identifier, 3, error)):
        assert isinstance(tell(c, b, "autograd.abort", wrong), Exception)
    assert not part.passes._passes
    for number in range(3):
        assert tell(c, b, "autograd.abort", (identifier, (c.info.id, number), error)) is None
    assert isinstance(tell(c, b, "autograd.abort", (identifier, (c.info.id, 3), error)), LimitReachedError)
    assert tell(a, b, "autograd.abort", (identifier, (a.info.id, 1), error)) is None
    request = ((identifier, (a.info.id, 2), [], False, 0.0, None), None)
    with pytest.raises(AutogradError, match="'agent2' asks for a part of a pass of worker 0"):
        c.request(b.info, Request(MessageType.BACKWARD, request)).wait()


def test_passes_that_wait_on_threads_of_a_worker_are_bounded(agents, monkeypatch):
    monkeypatch.setattr(engine, "MAX_RUNNING", 3)
    a, b = agents(2)
    running = []
    for number in range(4):  # in each of these contexts, b has sent a tensor, and waits for its gradient
        identifier = a.info.id << 48 | number

        def fill(envelope: agent_pb2.Envelope, identifier: int = identifier) -> None:
            envelope.autograd.context_id = identifier

        call = (torch.ones, (3,), {"requires_grad": True})
        a.request(b.info, Request(MessageType.CALL, call, header=fill)).wait()
        request = ((identifier, (a.info.id, 1), [0], False, 0.5, None), None)
        running.append(a.request(b.info, Request(MessageType.BACKWARD, request)))
    for each in running:
        wait_until(each.done)
    assert Counter(type(error_of(each)) for each in running) == {LimitReachedError: 1, RpcTimeoutError: 3}


def test_gradients_come_from_the_receiver_of_the_message(agents):
    a, b, c = agents(3)
    with holder.using(a), autograd.context() as identifier:
        x = torch.ones(3, requires_grad=True)
        y = rpc.rpc_sync(b.info, torch.mul, (x, 2))
        gradients = [torch.full((3,), 99.0)]
        for pass_id in ((a.info.id, 1), (c.info.id, 1)):
            header = agent_pb2.GradientsHeader(context_id=identifier, caller=pass_id[0], pass_number=pass_id[1])
            c.post(
                a.info,
                MessageType.GRADIENTS,
                gradients,
                header=lambda envelope, header=header: envelope.gradients.CopyFrom(header),
            )
            request = ((identifier, pass_id, [0], False, 1.0, None), (0, gradients))
            with pytest.raises(AutogradError, match=r"asks for a part|has not received message 0"):
                c.request(a.info, Request(MessageType.BACKWARD, request)).wait()
        assert not contexts_of(a).get(identifier).passes._passes
        autograd.backward(identifier, [y.sum()])
        assert autograd.get_gradients(identifier)[x].tolist() == [2.0, 2.0, 2.0]


def test_a_message_that_was_not_sent_has_no_receiver(agents):
    a, b = agents(2)
    with holder.using(a), autograd.context() as identifier:
        context = contexts_of(a).get(identifier)
        message_id, _ = context.add_send([torch.ones(3, requires_grad=True)], b.info.id)
        context.check_receiver(b.info.id, message_id)
        context.drop_send(message_id)
        with pytest.raises(AutogradError, match="has not received message"):
            context.check_receiver(b.info.id, message_id)


def test_only_the_creator_is_told_who_has_a_part_in_a_context(agents):
    a, b = agents(2)
    for wrong in ("1", b.info.id << 48 | 1):
        assert isinstance(tell(b, a, "autograd.joined", wrong), ValueError | AutogradError)
