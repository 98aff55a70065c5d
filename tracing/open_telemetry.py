"""Traces calls through workers with OpenTelemetry, where that is turned on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ..errors import Outcome, RpcError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, Outgoing, Request
from ..rpc.contracts.options import otel_from_environment
from ..rpc.contracts.worker import WorkerInfo

if TYPE_CHECKING:
    from .call_spans import CallSpans

__all__ = ["OpenTelemetry"]


@final
class OpenTelemetry(Extension):
    """The spans of one agent's calls, if its options want them."""

    _spans: "CallSpans"

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        wanted = agent.options.otel
        self.is_on = otel_from_environment() if wanted is None else wanted
        if self.is_on:
            try:
                from .call_spans import CallSpans
            except ImportError as error:
                raise RpcError(
                    f"spans of OpenTelemetry need the package {error.name}: pip install opentelemetry-api, or "
                    "leave the option otel and GRADWIRE_OTEL unset"
                ) from error
            self._spans = CallSpans(agent.info.name)

    def on_request(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Begins the span of a call."""
        self._spans.begin_call(identifier, worker, request)

    def on_send(self, message: Outgoing) -> None:
        """Adds the context of a call's span to its message."""
        self._spans.add_context(message)

    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        """Notes in a call's span why it has failed."""
        if self.is_on:
            self._spans.fail_call(identifier, error, outcome)

    def on_complete(self, identifier: int) -> None:
        """Ends the span of a call."""
        self._spans.end_call(identifier)

    def on_receive(self, message: Incoming) -> None:
        """Reads the context that a request has carried."""
        if (context := self._spans.context_of(message.envelope)) is not None:
            message.state[OpenTelemetry] = context

    def scope(self, message: Incoming) -> AbstractContextManager[None] | None:
        """Returns a context manager that makes the context of a request current, or that of its span."""
        context = message.state.get(OpenTelemetry)
        return None if context is None else self._spans.inside(context)

    def observe(self, handler: Handler) -> Handler:
        """Returns a handler that runs inside of a span."""
        return replace(handler, run=partial(self._run, handler.run)) if handler.user_values else handler

    def _run(self, run: Callable[[Incoming], Any], message: Incoming) -> Any:
        if not message.envelope.id:  # an item of a stream, which is no call
            return run(message)
        return self._spans.run(run, message, OpenTelemetry)
