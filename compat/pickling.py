"""Picklers that programs give to torch: `torch.distributed.rpc.api._use_rpc_pickler`, and reducers by class.

As in torch, the pickler in use, one for the whole process, pickles the calls of functions written in Python, and
`torch.distributed.rpc.internal.deserialize` unpickles them on the called worker. What the pickler returns, a
pickle and a list of tensors, becomes the value of a message of gradwire. So tensors travel beside the pickle, with
their gradients, and references are counted.
"""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from ..errors import RRefError
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import CALL, MessageType
from ..rref.rref import RRef
from ..torch_internals import find_builtin, rpc_class_reducers, rpc_pickler_in_use

__all__ = ["SentReference", "TorchPicklers"]

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


@final
class SentReference:
    """What `RRef._serialize` returns, and `RRef._deserialize` takes: stands for a reference in a pickle."""

    __slots__ = ("reference",)

    def __init__(self, reference: RRef[Any]) -> None:
        self.reference = reference

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how a pickler of torch's pickles it, into a call. gradwire's has reducers of TorchPicklers."""
        if (references := _tables.sent) is None:
            raise RRefError(
                f"{self.reference} cannot be serialized outside a call: pass it as an argument, or return it"
            )
        references.append(self.reference)
        return _received, (len(references) - 1,)


@final
class TorchPicklers(Extension):
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
