"""Extensions that make gradwire's agent treat errors, parameters, profiles and picklers as torch's agent does.

Picklers are what programs give to torch: `torch.distributed.rpc.api._use_rpc_pickler`, and reducers by class.
As in torch, the pickler in use, one for the whole process, pickles the calls of functions written in Python, and
`torch.distributed.rpc.internal.deserialize` unpickles them on the called worker. What the pickler returns, a
pickle and a list of tensors, becomes the value of a message of gradwire. So tensors travel beside the pickle, with
their gradients, and references are counted.
"""

import importlib
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from ..errors import GradwireError, RRefError
from ..extensions import DEFAULT_EXTENSIONS
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension, ExtensionFactory
from ..rpc.contracts.messages import CALL, MessageType
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.profiling.extension import Profiling
from ..rref.rref import RRef
from ..torch_internals import find_builtin, rpc_class_reducers, rpc_pickler_in_use

__all__ = ["TORCH_STYLE_EXTENSIONS", "SentReference"]

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

CALLS_LOGGER = logging.getLogger("gradwire.rpc.calls")
"""Logs exceptions of remote functions at level INFO, on the worker that runs them."""

_WRONG_ARGUMENTS = re.compile(r'received an invalid combination of arguments|required positional arguments?: "')
"""Matches the TypeErrors of torch's operators for wrong arguments; Python's own use single quotes."""


@final
class SentReference:
    """What `RRef._serialize` returns, and `RRef._deserialize` takes: stands for a reference in a pickle."""

    __slots__ = ("reference",)

    def __init__(self, reference: RRef[Any]) -> None:
        self.reference = reference

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how a pickler of torch's pickles it, into a call. gradwire's has reducers of _TorchPicklers."""
        if (references := _tables.sent) is None:
            raise RRefError(
                f"{self.reference} cannot be serialized outside a call: pass it as an argument, or return it"
            )
        references.append(self.reference)
        return _received, (len(references) - 1,)


@final
class _TorchPicklers(Extension):
    """Has the calls of one agent pickled as torch's settings say."""

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """Returns how gradwire's pickler pickles what stands for references, and calls that are pickled."""
        return {
            SentReference: lambda sent: (SentReference, (sent.reference,)),
            _PickledCall: lambda call: (_load_call, (call.data, call.tensors, call.references)),
        }

    def find_reducer(self, kind: type) -> Callable[[Any], Any] | None:
        """Returns the reducer that the program has registered with torch's pickler for a class."""
        return rpc_class_reducers().get(kind)

    def encode_request(self, kind: MessageType.ValueType, value: Any) -> Any:
        """Returns a call of a Python function as the pickler in use pickles it."""
        if (pickler := rpc_pickler_in_use()) is None or kind not in (CALL, MessageType.RREF_CREATE):
            return value
        function = value[0]
        builtin = find_builtin(function)  # type: ignore[no-untyped-call]
        is_python = builtin is None and not isinstance(function, torch.jit.ScriptFunction)
        return _pickle(pickler, value) if is_python else value


@final
class _PickledCall:
    """A call that a pickler of the program has pickled."""

    def __init__(self, data: bytes, tensors: list[torch.Tensor], references: list[RRef[Any]]) -> None:
        self.data = data
        self.tensors = tensors
        self.references = references


@final
class _Tables(threading.local):
    """The references of the call that this thread pickles or unpickles."""

    sent: list[RRef[Any]] | None = None
    received: Sequence[RRef[Any]] = ()


_tables = _Tables()


def _pickle(pickler: Any, call: Call) -> _PickledCall:
    references: list[RRef[Any]] = []
    before, _tables.sent = _tables.sent, references
    try:
        pickled = pickler.serialize(_internal().PythonUDF(*call))
    finally:
        _tables.sent = before
    if not (isinstance(pickled, tuple) and [*map(type, pickled)] == [bytes, list]):
        raise TypeError(
            f"serialize of {type(pickler).__name__} has returned {type(pickled).__name__!r}: return bytes and a "
            "list of tensors, as torch's _InternalRPCPickler does"
        )
    data, tensors = pickled
    return _PickledCall(data, tensors, references)


def _load_call(data: bytes, tensors: list[torch.Tensor], references: Sequence[RRef[Any]]) -> Call:
    """Unpickles a call on the called worker."""
    before, _tables.received = _tables.received, references
    try:
        call = _internal().deserialize(data, tensors)
    finally:
        _tables.received = before
    if isinstance(call, AttributeError):  # which torch raises where the call runs
        raise call
    function, args, kwargs = call
    return function, tuple(args), dict(kwargs)


def _internal() -> Any:
    """Returns the module of torch that has its pickler; not imported here, since not every torch has RPC."""
    return importlib.import_module("torch.distributed.rpc.internal")


def _received(index: int) -> SentReference:
    return SentReference(_tables.received[index])


@final
class _TorchErrorStyle(Extension):
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
class _TorchCallStyle(Extension):
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
    _TorchErrorStyle,
    _TorchCallStyle,
    _TorchPicklers,
)
"""The extensions of the agents of the backends TENSORPIPE and FAULTY_TENSORPIPE."""
