"""What torch's agent does with every message, and gradwire's does not by itself."""

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import final

import torch

from ..extensions import DEFAULT_EXTENSIONS
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.profiling.extension import Profiling
from ..torch_internals import find_builtin
from .errors import as_torch_raises

__all__ = ["TORCH_STYLE_EXTENSIONS", "TorchErrorStyle"]

FAILED_CALLS = logging.getLogger("gradwire.rpc.calls")


@final
class TorchErrorStyle(Extension):
    """Raises and prints what remote functions raise as torch does; leaves torch.profiler's profiles alone.

    And gradients flow back through Parameters only where they do in torch.
    """

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        agent.extension(Profiling).kineto = False
        self._printer = _Printer(agent.info)
        self._level = FAILED_CALLS.level
        FAILED_CALLS.setLevel(logging.INFO)
        FAILED_CALLS.addHandler(self._printer)

    def detaches_parameters(self, value: object) -> bool:
        """Is it anything but a call of one of torch's operators or of a TorchScript function?"""
        if not isinstance(value, tuple) or len(value) != 3:
            return True
        function = value[0]
        if isinstance(function, torch.jit.ScriptFunction):
            return False
        return find_builtin(function) is None  # type: ignore[no-untyped-call]

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:  # noqa: ARG002
        """What the caller of a function gets that has raised an error."""
        return as_torch_raises(error)

    def close(self) -> None:
        """Prints nothing any longer."""
        FAILED_CALLS.removeHandler(self._printer)
        FAILED_CALLS.setLevel(self._level)


@final
class _Printer(logging.Handler):
    """Prints what functions raise that others call, wherever `sys.stderr` leads then."""

    def __init__(self, worker: WorkerInfo) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            text = "".join(traceback.format_exception(*record.exc_info))
            print(f"On {self._worker}:\n{error!r}\n{text}", file=sys.stderr)


TORCH_STYLE_EXTENSIONS: Sequence[type[Extension]] = (*DEFAULT_EXTENSIONS, TorchErrorStyle)
"""The extensions of agents that programs for torch start."""
