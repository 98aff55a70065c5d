"""Runs the functions that other workers call."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import torch

from ...errors import RpcError
from ...torch_internals import AnyFuture
from ..contracts.extension import Extension
from ..contracts.messages import Deferred, Handler, Incoming, MessageType, check_received
from ..execution.futures import as_concurrent_future
from ..execution.script_functions import run_script_function
from ..functions import ASYNC_MARK
from ..profiling.extension import run_profiled
from ..wire.failures import user_traceback

__all__ = ["Calls", "log_failure", "run_function"]

log = logging.getLogger("gradwire.rpc.calls")

USER_CODE_CALLERS = ("run_function",)
"""Tracebacks for users begin below the frames of these functions: see wire/failures.py."""


@final
class Calls(Extension):
    """Handles CALL messages."""

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handler of CALL."""
        return {
            MessageType.CALL: Handler(
                self._run,
                user_values=True,
                cancellable=True,
                operation="rpc_async",
                description="a call to worker",
            )
        }

    def _run(self, message: Incoming) -> Any:
        try:
            function, args, kwargs = message.value
            if message.state:
                return run_profiled(message, run_function, function, args, kwargs)
            return run_function(function, args, kwargs)
        except BaseException as error:
            log_failure(message, error)
            raise


def log_failure(message: Incoming, error: BaseException) -> None:
    """Logs the exception of a function that another worker calls."""
    if log.isEnabledFor(logging.INFO):
        trace = (type(error), error, user_traceback(error))
        log.info("a call from worker %s failed", message.source.name, exc_info=trace)


def run_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function for another worker; returns its result, or a Deferred if it answers later.

    Raises:
        RpcError: the function is marked with `async_execution` and returned no future.
        TypeError: these are no arguments.
        Exception: what the function raises.
    """
    if type(args) is not tuple:
        check_received(args)
    if isinstance(function, torch.jit.ScriptFunction):
        return run_script_function(function, args, kwargs)
    result = function(*args, **kwargs)
    if not hasattr(function, ASYNC_MARK):
        return result
    if not isinstance(result, AnyFuture):  # what `then` returns is no torch.futures.Future
        name = getattr(function, "__qualname__", function)
        raise RpcError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {name} returned a {type(result).__name__}"
        )
    return Deferred(as_concurrent_future(cast(torch.futures.Future[Any], result)))
