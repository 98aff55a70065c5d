"""Runs the functions that other workers call.

TorchScript accepts no RRef but those of torch's own agent. So a TorchScript function that takes references
(`RRef[T]`) is run as a copy that takes, in place of each reference, its value and whatever else the function asks
of the reference.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast, final

import torch

from ...errors import RpcError
from ...torch_internals import AnyFuture, script_function_from_graph
from ..contracts.extension import Extension
from ..contracts.messages import Deferred, Handler, Incoming, MessageType, check_received
from ..execution.futures import as_concurrent_future
from ..functions import ASYNC_MARK
from ..profiling.extension import run_profiled
from ..wire.failures import user_traceback

__all__ = ["Calls", "check_references", "log_failure", "run_function"]

log = logging.getLogger("gradwire.rpc.calls")

USER_CODE_CALLERS = ("run_function",)
"""Tracebacks for users begin below the frames of these functions: see wire/failures.py."""

_VALUE_OPERATORS = frozenset({"aten::local_value", "aten::to_here"})
"""Operators that return the value of a reference."""

_PROPERTY_OPERATORS: dict[str, Callable[[Any], Any]] = {
    "aten::confirmed_by_owner": lambda reference: reference.confirmed_by_owner(),
    "aten::is_owner": lambda reference: reference.is_owner(),
    "aten::owner_name": lambda reference: reference.owner_name(),
}
"""Operators that return something else about a reference, and functions that return the same in Python."""

MAX_CACHED_COPIES = 64
"""Script functions whose copies are cached."""


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
        return _run_script_function(function, args, kwargs)
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


@dataclass(frozen=True, slots=True)
class _ValueFunction:
    """A copy of a script function that takes values instead of references.

    function: the copy. Its arguments are those of the original, with values in place of references, then one for
        each of `properties`.
    positions: which arguments of the original are references.
    properties: for each additional argument, the position of a reference, and the function that returns the
        argument for it.
    """

    function: Any
    positions: Sequence[int]
    properties: Sequence[tuple[int, Callable[[Any], Any]]]


def _run_script_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a TorchScript function, which may take references.

    The value of a reference that another worker owns is fetched before the function runs, within the default
    timeout of calls, whatever timeout the function passes to `to_here`.

    Raises:
        RpcError: see `check_references`.
        TypeError: the arguments do not fit the function.
        Exception: what the function raises, or what fetching a value raises.
    """
    copy = _copy_for_values(function)
    if copy is None:
        return function(*args, **kwargs)
    given = _bind(function, args, kwargs)
    for position in copy.positions:
        if not hasattr(given[position], "to_here"):
            name = function.schema.arguments[position].name
            raise TypeError(f"{name!r} of {function.name} is {given[position]!r}: give an RRef")
    properties = [get(given[position]) for position, get in copy.properties]
    for position in copy.positions:
        given[position] = given[position].to_here()
    return copy.function(*given, *properties)


def check_references(graph: Any) -> None:
    """Checks that a worker can run a function with this inlined graph. Raises RpcError if not."""
    for argument in _references(graph):
        for use in argument.uses():
            if use.user.kind() not in _VALUE_OPERATORS and use.user.kind() not in _PROPERTY_OPERATORS:
                name = argument.debugName().partition(".")[0]
                raise RpcError(
                    f"{name!r}, {argument.type()}, is used by {use.user.kind()} in TorchScript, which knows only "
                    "the references of torch's own agent: use its value, by to_here() or local_value(), or make "
                    "the function one of Python"
                )


@lru_cache(maxsize=MAX_CACHED_COPIES)
def _copy_for_values(function: Any) -> _ValueFunction | None:
    """Returns the copy of a function that takes values; None if it takes no references. Raises RpcError."""
    if not any(argument.type.kind() == "RRefType" for argument in function.schema.arguments):
        return None
    graph = function.inlined_graph.copy()
    check_references(graph)
    positions = []
    properties = []
    for position, argument in enumerate(list(graph.inputs())):
        if argument.type().kind() == "RRefType":
            positions.append(position)
            properties += [(position, get) for get in _replace_by_value(graph, argument)]
    graph.lint()
    return _ValueFunction(script_function_from_graph(function.name, graph), positions, properties)


def _replace_by_value(graph: Any, argument: Any) -> list[Callable[[Any], Any]]:
    """Turns a reference among a graph's inputs into its value.

    Adds an input for each use of another property of the reference; returns what gets the value of each.
    """
    properties = []
    for node in [use.user for use in argument.uses()]:
        replacement = argument
        if (get := _PROPERTY_OPERATORS.get(node.kind())) is not None:
            replacement = graph.addInput()
            replacement.setType(node.output().type())
            properties.append(get)
        node.output().replaceAllUsesWith(replacement)
        node.destroy()
    argument.setType(argument.type().getElementType())
    return properties


def _references(graph: Any) -> list[Any]:
    return [argument for argument in graph.inputs() if argument.type().kind() == "RRefType"]


def _bind(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments of a call by position. Raises TypeError if they do not fit."""
    parameters = function.schema.arguments
    names = [parameter.name for parameter in parameters]
    given = dict(zip(names, args, strict=False))
    doubled = given.keys() & kwargs.keys()
    unknown = kwargs.keys() - set(names)
    given |= kwargs
    missing = [each.name for each in parameters if each.name not in given and not each.has_default_value()]
    if len(args) > len(names) or doubled or unknown or missing:
        raise TypeError(f"the arguments {args} and {dict(kwargs)} do not fit {function.schema}")
    return [given.get(each.name, each.default_value) for each in parameters]
