"""The OpenTelemetry spans of one worker's calls. Imported only if they are on: it needs opentelemetry-api."""

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, final

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from ..errors import Outcome
from ..proto.v1 import agent_pb2
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import RESULT, Deferred, Handler, Incoming, Outgoing, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import printable_text
from ..view.names import MethodNames

__all__ = ["MAX_FIELDS", "MAX_FIELDS_BYTES", "CallSpans", "add_fields", "context_of", "read_fields"]

SYSTEM = "gradwire"

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The semantic conventions by which the attributes are named."""

MAX_FIELDS = 16

MAX_FIELDS_BYTES = 10 << 10
"""Characters of all names and values: a baggage may have 8,192 bytes by W3C, and others are beside it."""

P = ParamSpec("P")

log = logging.getLogger("gradwire.tracing")


def _logs_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Decorator that logs what a function raises: a sampler or processor of the user must not break calls."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception:
            log.exception("a span cannot be recorded")

    return guarded


def add_fields(fields: Mapping[str, str], envelope: agent_pb2.Envelope) -> None:
    """Adds fields to the envelope of a request, in their order; leaves out those for which there is no room."""
    nbytes = 0
    for name, value in fields.items():
        if len(envelope.trace) == MAX_FIELDS:
            return
        if nbytes + len(name) + len(value) <= MAX_FIELDS_BYTES:
            nbytes += len(name) + len(value)
            envelope.trace.add(name=name, value=value)


def read_fields(trace: Iterable[agent_pb2.TraceField]) -> dict[str, str]:
    """Returns the fields that a request has carried; none if they are too many, or have too many characters."""
    fields: dict[str, str] = {}
    nbytes = 0
    for field in trace:
        nbytes += len(field.name) + len(field.value)
        if len(fields) == MAX_FIELDS or nbytes > MAX_FIELDS_BYTES:
            return {}
        fields[field.name] = field.value
    return fields


def context_of(envelope: agent_pb2.Envelope) -> Context | None:
    """Returns the context that a request has carried; None if there is none that the propagator can read."""
    if envelope.type == RESULT or not envelope.id or not envelope.trace:
        return None
    try:
        return propagate.extract(read_fields(envelope.trace), Context()) or None
    except Exception:  # of a propagator that does not expect what a peer may send
        log.debug("the place of a call in a trace cannot be read", exc_info=True)
        return None


@contextmanager
def _inside(context: Context) -> Iterator[None]:
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


@final
class CallSpans(Extension):
    """Makes the spans of one worker: of kind CLIENT for the calls that it makes, SERVER for those that it runs.

    They go to the tracer provider of the process, and their context travels as its propagator writes it.
    """

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._worker = agent.info.name
        self._tracer = trace.get_tracer(SYSTEM, schema_url=SCHEMA_URL)
        self._names = MethodNames()
        self._in_flight: dict[int, Span] = {}
        """The spans of this worker's calls that have no answer, by id."""

    # The caller.

    @_logs_errors
    def on_request(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Begins the span of a call, inside of the current span of this thread."""
        method = self._names.of(request.kind, request.value)
        attributes = self._attributes(method.name, method.operation, self._worker, worker.name)
        self._in_flight[identifier] = self._tracer.start_span(
            method.name, kind=SpanKind.CLIENT, attributes=attributes
        )

    @_logs_errors
    def on_send(self, message: Outgoing) -> None:
        """Adds the context of a call's span to its message."""
        if message.reply_to is None and (span := self._in_flight.get(message.envelope.id)) is not None:
            fields: dict[str, str] = {}
            propagate.inject(fields, trace.set_span_in_context(span))
            add_fields(fields, message.envelope)

    @_logs_errors
    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        """Notes in a call's span why it has failed."""
        if (span := self._in_flight.get(identifier)) is not None:
            span.set_attribute("gradwire.outcome", outcome.name.lower())
            _set_error(span, error)

    @_logs_errors
    def on_complete(self, identifier: int) -> None:
        """Ends the span of a call."""
        if (span := self._in_flight.pop(identifier, None)) is not None:
            span.end()

    # The callee.

    def on_receive(self, message: Incoming) -> None:
        """Reads the context that a request has carried."""
        if (context := context_of(message.envelope)) is not None:
            message.state[CallSpans] = context

    def scope(self, message: Incoming) -> AbstractContextManager[None] | None:
        """Returns a context manager that makes the context of a request current, or that of its span."""
        context = message.state.get(CallSpans)
        return None if context is None else _inside(context)

    def observe(self, handler: Handler) -> Handler:
        """Returns a handler that runs inside of a span."""
        return replace(handler, run=partial(self._run, handler.run)) if handler.user_values else handler

    def _run(self, run: Callable[[Incoming], Any], message: Incoming) -> Any:
        if not message.envelope.id:  # an item of a stream, which is no call
            return run(message)
        try:
            span, context = self._begin_serving(message, message.state.get(CallSpans) or Context())
        except Exception:
            log.exception("a span cannot be recorded")
            return run(message)
        message.state[CallSpans] = context
        try:
            with _inside(context):
                result = run(message)
        except BaseException as error:
            _end(span, error)
            raise
        if type(result) is Deferred:
            result.future.add_done_callback(partial(_end_later, span, message))
        else:
            _end(span, message.failure)
        return result

    def _begin_serving(self, message: Incoming, parent: Context) -> tuple[Span, Context]:
        method = self._names.of(message.envelope.type, message.value)
        attributes = self._attributes(method.name, method.operation, message.source.name, self._worker)
        span = self._tracer.start_span(method.name, parent, SpanKind.SERVER, attributes)
        return span, trace.set_span_in_context(span, parent)

    def _attributes(self, method: str, operation: str, caller: str, callee: str) -> dict[str, str]:
        return {
            "rpc.system.name": SYSTEM,
            "rpc.method": method,
            "server.address": callee,
            "gradwire.caller": caller,
            "gradwire.operation": operation,
        }


def _end_later(span: Span, message: Incoming, future: "concurrent.futures.Future[Any]") -> None:
    error = concurrent.futures.CancelledError() if future.cancelled() else future.exception()
    _end(span, error or message.failure)


@_logs_errors
def _end(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.record_exception(error)
        _set_error(span, error)
    span.end()


def _set_error(span: Span, error: BaseException) -> None:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    span.set_attribute("error.type", name)
    span.set_status(Status(StatusCode.ERROR, printable_text(error)))
