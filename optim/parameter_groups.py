"""Parameter groups, on the side of the program that makes an optimizer over them."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ..rpc.contracts.worker import WorkerInfo
from ..rref import RRef

__all__ = [
    "Options",
    "Parameter",
    "ParameterGroup",
    "ParameterGroupOptions",
    "by_owner",
    "options",
    "read_groups",
    "read_parameters",
]

Options = dict[str, Any]
"""Of a parameter group: its learning rate and so on, by name; what torch keeps beside "params"."""


@final
@dataclass(frozen=True, slots=True)
class Parameter:
    """A reference to a parameter, and how the caller names it.

    label: where it stands in what the caller gave, such as `params_rref[3]`.
    """

    label: str
    rref: RRef[torch.Tensor]


@final
@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share options.

    options: those that the caller gave for this group; the optimizer's defaults fill the rest.
    """

    parameters: Sequence[Parameter]
    options: Options


def read_groups(params_rref: Iterable[Any]) -> list[ParameterGroup]:
    """The groups that a caller means by an iterable of RRefs, or of dictionaries as torch.optim takes them.

    Raises:
        TypeError, ValueError: it is something else, or empty.
    """
    given = _as_list(params_rref, "params_rref")
    if given and isinstance(given[0], Mapping):
        groups = [_read_group(group, f"params_rref[{index}]") for index, group in enumerate(given)]
    else:
        groups = [ParameterGroup(_check_all(given, "params_rref"), {})]
    if not any(group.parameters for group in groups):
        raise ValueError("params_rref is empty: there is nothing to optimize")
    return groups


def read_parameters(params_rref: Iterable[Any]) -> list[Parameter]:
    """The parameters that a caller means by an iterable of RRefs. Raises TypeError if it is something else."""
    return _check_all(_as_list(params_rref, "params_rref"), "params_rref")


def by_owner(parameters: Sequence[Parameter]) -> dict[WorkerInfo, list[int]]:
    """The indices of parameters, in their order, by the worker that has them."""
    found: dict[WorkerInfo, list[int]] = {}
    for index, parameter in enumerate(parameters):
        found.setdefault(parameter.rref.owner(), []).append(index)
    return found


def _read_group(group: Any, label: str) -> ParameterGroup:
    if not isinstance(group, Mapping):
        raise TypeError(f"{label} is of type {type(group).__name__}, but params_rref[0] is a parameter group")
    if "params" not in group:
        raise ValueError(f'{label} has no "params": give {{"params": [RRefs], "lr": …}}')
    label = f'{label}["params"]'
    params = group["params"]
    parameters = (
        [Parameter(label, params)] if isinstance(params, RRef) else _check_all(_as_list(params, label), label)
    )
    return ParameterGroup(parameters, {name: value for name, value in group.items() if name != "params"})


def _as_list(given: Any, label: str) -> list[Any]:
    if isinstance(given, RRef | torch.Tensor | Mapping | str | set | frozenset) or not isinstance(given, Iterable):
        raise TypeError(f"{label} is of type {type(given).__name__}: give a list of RRefs to parameters")
    return list(given)


def _check_all(given: Sequence[Any], label: str) -> list[Parameter]:
    for index, rref in enumerate(given):
        if not isinstance(rref, RRef):
            raise TypeError(f"{label}[{index}] is of type {type(rref).__name__}: give an RRef to a parameter")
    return [Parameter(f"{label}[{index}]", rref) for index, rref in enumerate(given)]


@final
class ParameterGroupOptions(torch.optim.Optimizer):
    """The options of all groups, with RRefs for parameters.

    It is an optimizer so that the schedulers of torch can work on it, which read and write options only. It
    updates nothing: what has changed in it goes to the owners with the next request.
    """

    def __init__(self, groups: Sequence[ParameterGroup], defaults: Options) -> None:
        super().__init__([{**group.options, "params": []} for group in groups], defaults)
        for kept, group in zip(self.param_groups, groups, strict=True):
            kept["params"] = [parameter.rref for parameter in group.parameters]
        self._remember()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Schedulers watch this method to see whether a step was made before theirs."""

    def changes(self) -> list[Options]:
        """Of each group, the options that have ever changed here.

        All of them go with every request, so one that fails loses nothing, and those that overtake each other
        do no lasting harm. What has never changed here is left to the owners: some optimizers change it there.
        """
        changes = []
        for group, known, changed in zip(self.param_groups, self._known, self._changed, strict=True):
            changed.update(name for name in options(group) if name not in known or group[name] != known[name])
            changes.append({name: group[name] for name in changed})
        return changes

    def replace(self, groups: Sequence[Options]) -> None:
        """Takes over options that the owners have been given."""
        self.param_groups = [
            {**copy.deepcopy(given), "params": group["params"]}
            for given, group in zip(groups, self.param_groups, strict=True)
        ]
        self._remember()

    def _remember(self) -> None:
        self._known = [copy.deepcopy(options(group)) for group in self.param_groups]
        self._changed: list[set[str]] = [set() for _ in self.param_groups]


def options(group: Mapping[str, Any]) -> Options:
    """A group of torch without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}
