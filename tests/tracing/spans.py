"""OpenTelemetry on the workers of a test: the spans that they have ended, and functions that call each other."""

import functools
from typing import Any, NamedTuple

import torch
from gradwire import rpc
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.remote_functions import wait_until


class Ended(NamedTuple):
    """What a test looks at of a span. Ids are in hexadecimal, the time at which it began in nanoseconds."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str | None
    attributes: dict[str, Any]
    is_error: bool
    events: tuple[str, ...]
    began: int


@functools.cache
def exporter() -> InMemorySpanExporter:
    """The exporter of this process; the first call makes it, and the tracer provider."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


def ended(count: int = 0) -> list[Ended]:
    """Returns the spans of this process that have ended, in this order, and forgets them.

    Waits until there are `count`: the span of a call to `remote` ends with its confirmation, which may come
    after the value.
    """
    wait_until(lambda: len(exporter().get_finished_spans()) >= count)
    spans = exporter().get_finished_spans()
    exporter().clear()
    return [_ended(span) for span in spans]


def _ended(span: ReadableSpan) -> Ended:
    return Ended(
        span.name,
        span.kind.name,
        f"{span.context.trace_id:032x}",
        f"{span.context.span_id:016x}",
        None if span.parent is None else f"{span.parent.span_id:016x}",
        dict(span.attributes or {}),
        span.status.status_code is StatusCode.ERROR,
        tuple(event.name for event in span.events),
        span.start_time or 0,
    )


def noop() -> None:
    pass


def fail() -> None:
    raise ValueError("as asked")


def call_next(*workers: str) -> None:
    """Calls the first worker, which calls the next one, and so on."""
    if workers:
        rpc.rpc_sync(workers[0], call_next, workers[1:])


@rpc.functions.async_execution
def call_next_later(worker: str) -> torch.futures.Future[Any]:
    """Answers when two calls of a worker have: the second is made by a callback of the first."""
    done: torch.futures.Future[Any] = torch.futures.Future()

    def then(_: object) -> None:
        rpc.rpc_async(worker, noop).add_done_callback(lambda _: done.set_result(None))

    rpc.rpc_async(worker, noop).add_done_callback(then)
    return done


def generate(worker: str, count: int):
    for _ in range(count):
        rpc.rpc_sync(worker, noop)
        yield 1


class Counter:
    """A value that references name."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


@rpc.expose
class ExposedCounter(Counter):
    """The same for workers with a policy."""


@torch.jit.script
def scripted(number: torch.Tensor) -> torch.Tensor:
    return number + 1
