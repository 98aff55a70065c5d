"""Extensions that make gradwire's agent treat errors, parameters and profiles as torch's agent does."""

import logging
import re
import sys
import traceback
from collections.abc import Sequence
from typing import final

import torch

from ..errors import GradwireError
from ..extensions import DEFAULT_EXTENSIONS
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension, ExtensionFactory
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.profiling.extension import Profiling
from ..torch_internals import find_builtin
from .pickling import TorchPicklers

__all__ = ["TORCH_STYLE_EXTENSIONS", "TorchCallStyle", "TorchErrorStyle"]

CALLS_LOGGER = logging.getLogger("gradwire.rpc.calls")
"""Logs exceptions of remote functions at level INFO, on the worker that runs them."""

_WRONG_ARGUMENTS = re.compile(r'received an invalid combination of arguments|required positional arguments?: "')
"""Matches the TypeErrors of torch's operators for wrong arguments; Python's own use single quotes."""


@final
class TorchErrorStyle(Extension):
    """Raises exceptions of remote functions at the caller as torch does, and prints them where they occur."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._handler = _StderrHandler(agent.info)
        self._previous_level = CALLS_LOGGER.level
        CALLS_LOGGER.setLevel(logging.INFO)
        CALLS_LOGGER.addHandler(self._handler)

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:  # noqa: ARG002
        """Returns what torch raises for a remote exception: the same, if its class takes a message alone.

        torch sends the class and the message, and the caller constructs it anew.
        """
        cls = type(error)
        if isinstance(error, GradwireError):
            return error
        # torch turns torch.jit.Error into RuntimeError, although its class could be made from a message.
        converted: Exception = RuntimeError(str(error))
        if cls is TypeError and _WRONG_ARGUMENTS.search(str(error)):
            converted = RuntimeError(
                f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
            )
        elif cls is not torch.jit.Error:
            try:
                cls(str(error))
            except Exception as problem:
                converted = RuntimeError(
                    f"Failed to create original exception type. Error msg was {problem} "
                    f"Original exception on remote side was {cls.__name__}: {error}"
                )
            else:
                return error
        converted.__cause__ = error.__cause__
        return converted

    def close(self) -> None:
        """Stops printing."""
        CALLS_LOGGER.removeHandler(self._handler)
        CALLS_LOGGER.setLevel(self._previous_level)


@final
class TorchCallStyle(Extension):
    """Keeps calls out of torch.profiler's profiles, and detaches Parameters passed to Python functions."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        agent.extension(Profiling).profiles_kineto = False

    def detaches_parameters(self, value: object) -> bool:
        """Returns True unless `value` is a call of one of torch's operators or of a TorchScript function."""
        if not isinstance(value, tuple) or len(value) != 3:
            return True
        function = value[0]
        if isinstance(function, torch.jit.ScriptFunction):
            return False
        return find_builtin(function) is None  # type: ignore[no-untyped-call]


@final
class _StderrHandler(logging.Handler):
    """Prints exceptions of remote functions to the current `sys.stderr`, in torch's format."""

    def __init__(self, worker: WorkerInfo) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            text = "".join(traceback.format_exception(*record.exc_info))
            print(f"On {self._worker}:\n{error!r}\n{text}", file=sys.stderr)


TORCH_STYLE_EXTENSIONS: Sequence[ExtensionFactory] = (
    *DEFAULT_EXTENSIONS,
    TorchErrorStyle,
    TorchCallStyle,
    TorchPicklers,
)
"""The extensions of the agents of the backends TENSORPIPE and FAULTY_TENSORPIPE."""
