"""Traces calls through several workers with OpenTelemetry, where that is turned on."""

from ..errors import RpcError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.options import otel_from_environment

__all__ = ["open_telemetry"]


def open_telemetry(agent: RpcAgent) -> Extension:
    """Returns the extension that makes spans of calls, if the options of an agent want them; else an idle one."""
    wanted = agent.options.otel
    if not (otel_from_environment() if wanted is None else wanted):
        return Extension(agent)
    try:
        from .call_spans import CallSpans
    except ImportError as error:
        raise RpcError(
            f"spans of OpenTelemetry need the package {error.name}: pip install opentelemetry-api, or leave the "
            "option otel and GRADWIRE_OTEL unset"
        ) from error
    return CallSpans(agent)
