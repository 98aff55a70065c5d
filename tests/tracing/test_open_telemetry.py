"""Spans of calls: one trace through several workers, what they say, and what a peer may send."""

import asyncio
import os
import sys

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcError, RpcTimeoutError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.extension import Extension
from gradwire.rpc.contracts.messages import CALL, Request
from gradwire.rpc.contracts.options import otel_from_environment
from gradwire.tracing.call_spans import MAX_FIELDS, MAX_FIELDS_BYTES, add_fields, context_of, read_fields
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator, default_getter, default_setter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler

from tests.remote_functions import add, events, set_event, wait_for, wait_until
from tests.tracing import spans
from tests.tracing.spans import (
    Counter,
    ExposedCounter,
    call_next,
    call_next_later,
    ended,
    exporter,
    fail,
    generate,
    noop,
    scripted,
)

MODULE = spans.__name__
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def traced(workers):
    """Workers whose calls are traced, in a group, with an exporter in the memory of each."""

    def start(count: int, **options):
        started = workers.rpc(count, otel=True, **options)
        for worker in started:
            worker.run(lambda: exporter() and None)
        return started

    return start


def spans_of(worker, count=0, kind=None):
    return [span for span in worker.run(ended, count) if kind in {None, span.kind}]


def began(span):
    return span.began


def traced_call(function, *args):
    """Runs a function inside of a span of the program; returns the id of its trace and its own."""
    with trace.get_tracer("test").start_as_current_span("program") as span:
        function(*args)
    found = span.get_span_context()
    return f"{found.trace_id:032x}", f"{found.span_id:016x}"


def test_nested_calls_are_one_trace(traced):
    a, b, c = traced(3)
    trace_id, program = a.run(traced_call, call_next, "worker1", "worker2")
    client_a, program_a = spans_of(a, 2)
    client_b, server_b = spans_of(b, 2)
    (server_c,) = spans_of(c, 1)
    assert [span.kind for span in (client_a, server_b, client_b, server_c)] == ["CLIENT", "SERVER"] * 2
    assert {each.trace for each in (program_a, client_a, server_b, client_b, server_c)} == {trace_id}
    assert client_a.parent == program
    assert server_b.parent == client_a.id
    assert client_b.parent == server_b.id
    assert server_c.parent == client_b.id


def test_spans_have_the_names_of_the_conventions(traced):
    a, b = traced(2)
    a.run(rpc.rpc_sync, "worker1", noop)
    (client,), (server,) = spans_of(a, 1), spans_of(b, 1)
    assert client.name == server.name == f"{MODULE}.noop"
    assert client.attributes == server.attributes
    assert client.attributes == {
        "rpc.system.name": "gradwire",
        "rpc.method": f"{MODULE}.noop",
        "server.address": "worker1",
        "gradwire.caller": "worker0",
        "gradwire.operation": "call",
    }
    assert not client.is_error
    assert not server.is_error


def test_errors_are_recorded_on_both_sides(traced):
    a, b = traced(2)

    def call():
        with pytest.raises(ValueError, match="as asked"):
            rpc.rpc_sync("worker1", fail)
        with pytest.raises(ValueError, match="as asked"):
            rpc.remote("worker1", fail).to_here()

    a.run(call)
    client, creation, fetch = sorted(spans_of(a, 3), key=began)
    assert client.attributes["error.type"] == "ValueError"
    assert client.attributes["gradwire.outcome"] == "ran"
    assert [each.is_error for each in (client, creation, fetch)] == [True, False, True]
    server, created, fetched = sorted(spans_of(b, 3), key=began)
    assert [each.is_error for each in (server, created, fetched)] == [True, True, True]
    assert server.attributes["error.type"] == created.attributes["error.type"] == "ValueError"
    assert server.events == created.events == ("exception",)


def test_a_call_that_times_out_is_an_error_of_the_caller(traced):
    a, b = traced(2)

    def call():
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", wait_for, ("go",), timeout=0.2)

    a.run(call)
    (client,) = [each for each in spans_of(a, 1) if each.kind == "CLIENT"]
    assert client.attributes["error.type"] == "gradwire.errors.RpcTimeoutError"
    assert client.attributes["gradwire.outcome"] == "unknown"
    b.run(set_event, "go")


def test_async_functions_and_their_callbacks_are_in_the_trace(traced):
    a, b, c = traced(3)
    trace_id, _ = a.run(traced_call, rpc.rpc_sync, "worker1", call_next_later, ("worker2",))
    first, *others = sorted(spans_of(b, 3), key=lambda each: each.kind, reverse=True)
    assert (first.kind, first.name) == ("SERVER", f"{MODULE}.call_next_later")
    assert [(each.kind, each.trace, each.parent) for each in others] == [("CLIENT", trace_id, first.id)] * 2
    assert {each.parent for each in spans_of(c, 2)} == {each.id for each in others}


KINDS_OF_CALLS = {
    "async": (lambda: rpc.rpc_async("worker1", noop).wait(), [f"{MODULE}.noop"]),
    "script": (lambda: rpc.rpc_sync("worker1", scripted, (torch.ones(1),)), [f"{MODULE}.scripted"]),
    "operator": (lambda: rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1)), ["aten::add"]),
    "remote": (lambda: rpc.remote("worker1", noop).to_here(), [f"{MODULE}.noop", "to_here"]),
    "method": (lambda: rpc.remote("worker1", Counter).rpc_sync().add(2), [f"{MODULE}.Counter", "add"]),
    "stream": (lambda: list(rpc.rpc_stream("worker1", generate, ("worker0", 2))), [f"{MODULE}.generate"]),
    "broadcast": (lambda: [each.wait() for each in rpc.broadcast_call(["worker1"], noop)], [f"{MODULE}.noop"]),
    "asyncio": (lambda: asyncio.run(rpc.aio.call("worker1", noop)), [f"{MODULE}.noop"]),
    "idempotent": (lambda: rpc.rpc_sync("worker1", noop, idempotent=True), [f"{MODULE}.noop"]),
    "to itself": (lambda: rpc.rpc_sync("worker0", noop), [f"{MODULE}.noop"]),
}


def call_of(kind):
    KINDS_OF_CALLS[kind][0]()


def test_every_kind_of_call_has_spans(traced):
    a, b = traced(2)
    for kind, (_, names) in KINDS_OF_CALLS.items():
        trace_id, _ = a.run(traced_call, call_of, kind)
        found = []

        def named(name, side, found=found):
            return [each for each in found if each.name == name and each.kind == side]

        def are_all_there(names=names, found=found, named=named):
            found += [*spans_of(a), *spans_of(b)]
            return all(named(name, side) for name in names for side in ("CLIENT", "SERVER"))

        wait_until(are_all_there)  # the answer to a creation may wait for other messages
        for name in names:
            (client,), (server,) = named(name, "CLIENT"), named(name, "SERVER")
            assert client.trace == server.trace == trace_id, kind
            assert server.parent == client.id, kind


def test_what_a_generator_calls_is_in_its_span(traced):
    a, b = traced(2)
    trace_id, _ = a.run(traced_call, lambda: list(rpc.rpc_stream("worker1", generate, ("worker0", 3))))
    (server,) = spans_of(b, 1 + 3, "SERVER")
    calls = spans_of(a, 1 + 1 + 3, "SERVER")
    assert len(calls) == 3
    assert {each.trace for each in calls} == {trace_id}
    assert server.trace == trace_id


def start_call():
    with trace.get_tracer("test").start_as_current_span("program") as span:
        rpc.rpc_async("b", wait_for, ("go",), timeout=60.0, idempotent=True).add_done_callback(lambda _: None)
    return f"{span.get_span_context().trace_id:032x}"


def test_later_attempts_of_a_call_are_in_its_trace(workers, tmp_path):
    url = f"file://{tmp_path / 'dynamic'}"

    def join(name):
        (worker,) = workers(1)
        worker.run(lambda: exporter() and None)
        options = rpc.RpcBackendOptions(init_method=url, otel=True)
        worker.run(lambda: rpc.init_rpc(name, rpc_backend_options=options))
        return worker

    a, first = join("a"), join("b")
    a.run(rpc.rpc_sync, "b", noop)
    a.run(ended)
    trace_id = a.run(start_call)
    first.kill()
    second = join("b")
    second.run(wait_for_call)
    a.run(rpc.rpc_sync, "b", set_event, ("go",))
    servers = []

    def has_ended():
        servers.extend(each for each in spans_of(second) if each.name.endswith("wait_for"))
        return servers

    wait_until(has_ended)
    assert [each.trace for each in servers] == [trace_id]
    attempts = [each for each in spans_of(a) if each.name.endswith("wait_for")]
    assert {each.trace for each in attempts} == {trace_id}
    assert attempts[0].is_error


def wait_for_call():
    wait_until(lambda: "go" in events)


def test_methods_have_their_names_under_a_policy(traced):
    a, b = traced(2, policy=rpc.Policy(accepts="exposed"))
    assert a.run(lambda: rpc.remote("worker1", ExposedCounter).rpc_sync().add(2)) == 2
    assert "add" in {each.name for each in spans_of(b, 2)}


# What a peer may send.


def call_with(**fields):
    """Calls a worker with these fields in the header, which this worker has not made."""

    def fill(envelope):
        for name, value in fields.items():
            envelope.trace.add(name=name, value=value)

    agent = current_agent()
    agent.request(agent.worker("worker1"), Request(CALL, (noop, (), {}), header=fill)).wait()


WITHOUT_PARENT = [
    {},
    {"traceparent": "garbage"},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    {"traceparent": "\x00\u202e" * 9, "tracestate": "\n=,=,;" * 99, "baggage": "%ff=%zz,=" * 99},
    {"traceparent": TRACEPARENT, "baggage": "x" * MAX_FIELDS_BYTES},
    {"traceparent": TRACEPARENT, **{f"f{number}": "" for number in range(MAX_FIELDS)}},
]


def test_what_a_peer_sends_is_read_or_ignored(workers):
    a, b = workers(2)
    b.run(lambda: os.environ.update(GRADWIRE_OTEL="1"))
    b.run(lambda: exporter() and None)
    workers.join_rpc([a, b])
    for fields in ({}, {"tracestate": "vendor=1"}, {"baggage": "user=7"}):
        a.run(lambda fields=fields: call_with(traceparent=TRACEPARENT, **fields))
        (server,) = spans_of(b, 1)
        assert (server.trace, server.parent) == tuple(TRACEPARENT.split("-")[1:3])
    for fields in WITHOUT_PARENT:
        a.run(lambda fields=fields: call_with(**fields))
        (server,) = spans_of(b, 1)
        assert server.parent is None, fields


def test_fields_are_bounded():
    envelope = agent_pb2.Envelope()
    fields = {"traceparent": TRACEPARENT, "baggage": "x" * MAX_FIELDS_BYTES, "tracestate": "vendor=1"}
    add_fields(fields, envelope)
    assert read_fields(envelope.trace) == {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    many = {f"field{number}": "" for number in range(2 * MAX_FIELDS)}
    envelope = agent_pb2.Envelope()
    add_fields(many, envelope)
    assert len(read_fields(envelope.trace)) == MAX_FIELDS


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=80)), max_size=MAX_FIELDS + 2))
def test_any_fields_can_be_read(fields):
    envelope = agent_pb2.Envelope(id=1, trace=[agent_pb2.TraceField(name=n, value=v) for n, v in fields])
    assert len(read_fields(envelope.trace)) <= MAX_FIELDS
    found = context_of(envelope)
    assert found is None or len(found)


# The program's own configuration.


class OneFieldPropagator(TextMapPropagator):
    """Writes a field of its own, and cannot read some."""

    fields = frozenset({"own"})

    def inject(self, carrier, context=None, setter=default_setter):
        setter.set(carrier, "own", str(baggage.get_baggage("user", context)))

    def extract(self, carrier, context=None, getter=default_getter):
        (value,) = getter.get(carrier, "own") or ["0"]
        return baggage.set_baggage("user", int(value), context)


def get_user():
    return baggage.get_baggage("user")


def get_user_of(user):
    token = context.attach(baggage.set_baggage("user", user))
    try:
        return rpc.rpc_sync("worker1", get_user)
    finally:
        context.detach(token)


def test_the_propagator_is_that_of_the_program(traced):
    a, b = traced(2)
    for worker in (a, b):
        worker.run(lambda: propagate.set_global_textmap(OneFieldPropagator()))
    assert a.run(get_user_of, 7) == 7
    assert a.run(get_user_of, "no number") is None  # which the propagator cannot read


class BrokenSampler(Sampler):
    def should_sample(self, *args, **kwargs):
        raise RuntimeError("broken")

    def get_description(self):
        return "broken"


def test_a_broken_sampler_breaks_no_calls(workers):
    a, b = workers.rpc(2, otel=True)
    for worker in (a, b):
        worker.run(lambda: trace.set_tracer_provider(TracerProvider(sampler=BrokenSampler())))
    assert a.run(rpc.rpc_sync, "worker1", add, (1, 2)) == 3


# On and off.


class Envelopes(Extension):
    """Keeps the envelopes of the requests that arrive."""

    def __init__(self, agent):
        super().__init__(agent)
        self.arrived = []

    def on_arrival(self, source, envelope):
        self.arrived.append(envelope)


@pytest.mark.parametrize("otel", [False, True, None])
def test_only_with_the_option_there_is_a_header(agents, otel):
    caller, callee = agents(2, otel=otel)
    callee._extensions.add(envelopes := Envelopes(callee))
    with holder.using(caller):
        exporter()
        rpc.rpc_sync("agent1", noop)
    assert [field.name for field in envelopes.arrived[0].trace] == (["traceparent"] if otel else [])
    assert len(ended()) == (2 if otel else 0)


def test_a_missing_package_is_named(workers):
    (worker,) = workers(1)
    worker.run(lambda: sys.modules.__setitem__("opentelemetry", None))
    with pytest.raises(RpcError, match=r"pip install opentelemetry-api"):
        workers.join_rpc([worker], otel=True)


def test_the_option_is_checked():
    with pytest.raises(TypeError, match="GRADWIRE_OTEL"):
        rpc.RpcBackendOptions(otel="yes")
    with pytest.raises(ValueError, match="'yes': give 1 or 0"):
        otel_from_environment({"GRADWIRE_OTEL": "yes"})
    assert [otel_from_environment({"GRADWIRE_OTEL": text}) for text in ("", "0", "1")] == [False, False, True]
