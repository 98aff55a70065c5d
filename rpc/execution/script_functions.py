"""References as arguments of TorchScript functions.

TorchScript takes no object for an RRef but one of torch's own agent. A function that another worker calls is run
as a copy of itself that takes, for each reference, the value and whatever else the function asks of the reference.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...errors import RpcError
from ...torch_internals import function_of_graph

__all__ = ["check_references", "run_script_function"]

_VALUE = frozenset({"aten::local_value", "aten::to_here"})
_FACTS: dict[str, Callable[[Any], Any]] = {
    "aten::confirmed_by_owner": lambda reference: reference.confirmed_by_owner(),
    "aten::is_owner": lambda reference: reference.is_owner(),
    "aten::owner_name": lambda reference: reference.owner_name(),
}
"""Operators on a reference that give something other than its value, and what gives the same in Python."""

MAX_REWRITTEN = 64
"""Script functions whose copies are kept."""


@dataclass(frozen=True, slots=True)
class _OnValues:
    """A copy of a script function that takes no references.

    function: the copy. Its arguments are those of the original, with values in the place of references, then one
        for each of `facts`.
    positions: which arguments of the original are references.
    facts: position of a reference, and the function of that reference that gives the additional argument.
    """

    function: Any
    positions: Sequence[int]
    facts: Sequence[tuple[int, Callable[[Any], Any]]]


def run_script_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a TorchScript function, which may take references (`RRef[T]`).

    The value of a reference that another worker owns is fetched before the function runs, within the timeout that
    calls have by default, whatever timeout the function gives `to_here`.

    Raises:
        RpcError: the function does something else with a reference than ask for its value, its owner's name,
            or whether it is the owner's, or confirmed.
        TypeError: the arguments do not fit.
        Exception: what the function raises, or what kept a value from coming.
    """
    copy = _on_values(function)
    if copy is None:
        return function(*args, **kwargs)
    given = _bind(function, args, kwargs)
    for position in copy.positions:
        if not hasattr(given[position], "to_here"):
            name = function.schema.arguments[position].name
            raise TypeError(f"{name!r} of {function.name} is {given[position]!r}: give an RRef")
    facts = [fact(given[position]) for position, fact in copy.facts]
    for position in copy.positions:
        given[position] = given[position].to_here()
    return copy.function(*given, *facts)


def check_references(graph: Any) -> None:
    """Checks that `run_script_function` can run a function of this inlined graph. Raises RpcError."""
    for argument in _references(graph):
        for use in argument.uses():
            if use.user.kind() not in _VALUE and use.user.kind() not in _FACTS:
                name = argument.debugName().partition(".")[0]
                raise RpcError(
                    f"{name!r}, {argument.type()}, is used by {use.user.kind()} in TorchScript, which knows only "
                    "the references of torch's own agent: use its value, by to_here() or local_value(), or make "
                    "the function one of Python"
                )


@lru_cache(maxsize=MAX_REWRITTEN)
def _on_values(function: Any) -> _OnValues | None:
    """The copy that takes no references; None if the function takes none itself. Raises RpcError."""
    if not any(argument.type.kind() == "RRefType" for argument in function.schema.arguments):
        return None
    graph = function.inlined_graph.copy()
    check_references(graph)
    positions = []
    facts = []
    for position, argument in enumerate(list(graph.inputs())):
        if argument.type().kind() != "RRefType":
            continue
        positions.append(position)
        nodes = [use.user for use in argument.uses()]
        for node in nodes:
            replacement = argument
            if (fact := _FACTS.get(node.kind())) is not None:
                replacement = graph.addInput()
                replacement.setType(node.output().type())
                facts.append((position, fact))
            node.output().replaceAllUsesWith(replacement)
            node.destroy()
        argument.setType(argument.type().getElementType())
    graph.lint()
    return _OnValues(function_of_graph(function.name, graph), positions, facts)


def _references(graph: Any) -> list[Any]:
    return [argument for argument in graph.inputs() if argument.type().kind() == "RRefType"]


def _bind(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call by position. Raises TypeError."""
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
