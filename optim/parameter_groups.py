"""Parameter groups of a distributed optimizer, in the process that makes it."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ..rpc.contracts.policy import message_value
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future
from ..rref import RRef

__all__ = [
    "Options",
    "Parameter",
    "ParameterGroup",
    "ParameterGroupOptions",
    "indices_by_owner",
    "options_of",
    "parse_groups",
    "parse_parameters",
    "wait_for_owners",
]

Options = dict[str, Any]
"""The options of a parameter group by name, such as "lr": a group of torch without its "params"."""


@message_value
@final
@dataclass(frozen=True, slots=True)
class Parameter:
    """A reference to a parameter, with the label by which errors name it.

    label: its position in the caller's argument, such as `params_rref[3]`.
    """

    label: str
    rref: RRef[torch.Tensor]


@message_value
@final
@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share options.

    options: the options that the caller gave for this group; the optimizer's defaults apply to the others.
    """

    parameters: Sequence[Parameter]
    options: Options


def parse_groups(params_rref: Iterable[Any]) -> list[ParameterGroup]:
    """Returns the parameter groups in an iterable of RRefs (one group) or of dictionaries as in torch.optim.

    Raises TypeError or ValueError if it is something else, or has no parameters.
    """
    items = _as_list(params_rref, "params_rref")
    if items and isinstance(items[0], Mapping):
        groups = [_parse_group(group, f"params_rref[{index}]") for index, group in enumerate(items)]
    else:
        groups = [ParameterGroup(_label(items, "params_rref"), {})]
    if not any(group.parameters for group in groups):
        raise ValueError("params_rref is empty: there is nothing to optimize")
    return groups


def parse_parameters(params_rref: Iterable[Any]) -> list[Parameter]:
    """Returns the parameters in an iterable of RRefs. Raises TypeError if it is something else."""
    return _label(_as_list(params_rref, "params_rref"), "params_rref")


def indices_by_owner(parameters: Sequence[Parameter]) -> dict[WorkerInfo, list[int]]:
    """Returns the indices of each owner's parameters in `parameters`, ascending."""
    indices: dict[WorkerInfo, list[int]] = {}
    for index, parameter in enumerate(parameters):
        indices.setdefault(parameter.rref.owner(), []).append(index)
    return indices


def wait_for_owners(futures: Mapping[WorkerInfo, Future[Any]], activity: str) -> dict[WorkerInfo, Any]:
    """Waits until the request to every owner has succeeded or failed, and returns the results by owner.

    Raises the first failed request's error, in the order of `futures`, with a note that names all workers that
    failed, such as "the step failed on worker 'ps1'" for the activity "the step".
    """
    results = {}
    errors: dict[WorkerInfo, Exception] = {}
    for owner, future in futures.items():
        try:
            results[owner] = future.wait_for_answer()
        except Exception as error:
            errors[owner] = error
    if errors:
        first = next(iter(errors.values()))
        names = ", ".join(repr(owner.name) for owner in errors)
        first.add_note(f"{activity} failed on worker{'s' if len(errors) > 1 else ''} {names}")
        raise first
    return results


def _parse_group(group: Any, label: str) -> ParameterGroup:
    if not isinstance(group, Mapping):
        raise TypeError(f"{label} is of type {type(group).__name__}, but params_rref[0] is a parameter group")
    if "params" not in group:
        raise ValueError(f'{label} has no "params": give {{"params": [RRefs], "lr": …}}')
    label = f'{label}["params"]'
    params = group["params"]
    single = isinstance(params, RRef)
    parameters = [Parameter(label, params)] if single else _label(_as_list(params, label), label)
    return ParameterGroup(parameters, options_of(group))


def _as_list(value: Any, label: str) -> list[Any]:
    if isinstance(value, RRef | torch.Tensor | Mapping | str | set | frozenset) or not isinstance(value, Iterable):
        raise TypeError(f"{label} is of type {type(value).__name__}: give a list of RRefs to parameters")
    return list(value)


def _label(rrefs: Sequence[Any], label: str) -> list[Parameter]:
    """Labels RRefs by their index. Raises TypeError if one is not an RRef."""
    for index, rref in enumerate(rrefs):
        if not isinstance(rref, RRef):
            raise TypeError(f"{label}[{index}] is of type {type(rref).__name__}: give an RRef to a parameter")
    return [Parameter(f"{label}[{index}]", rref) for index, rref in enumerate(rrefs)]


@final
class ParameterGroupOptions(torch.optim.Optimizer):
    """The options of all parameter groups, with RRefs in the place of parameters.

    A torch.optim.Optimizer only so that torch's learning rate schedulers, which read and write options, accept it.
    It updates no parameter. Options that were changed here go to the owners with the next request.
    """

    def __init__(self, groups: Sequence[ParameterGroup], defaults: Options) -> None:
        super().__init__([{**group.options, "params": []} for group in groups], defaults)
        for own_group, group in zip(self.param_groups, groups, strict=True):
            own_group["params"] = [parameter.rref for parameter in group.parameters]
        self._reset_changes()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing. Schedulers check that it was called before their own step."""

    step.hooked = True  # type: ignore[attr-defined] # so torch makes no profiler event of each call

    def changes(self) -> list[Options]:
        """Returns, for each group, all options that have changed since construction or `replace`.

        Every request carries all of them, so none is lost with a request that fails, and a request that arrives
        late is corrected by the next one. Options that never changed here are left out, because some optimizers
        change options on the owners.
        """
        changes = []
        for group, initial, changed in zip(self.param_groups, self._initial, self._changed, strict=True):
            changed.update(
                name for name in options_of(group) if name not in initial or group[name] != initial[name]
            )
            changes.append({name: group[name] for name in changed})
        return changes

    def replace(self, groups: Sequence[Options]) -> None:
        """Sets the options of all groups to those that the owners have loaded."""
        self.param_groups = [
            {**copy.deepcopy(loaded), "params": group["params"]}
            for loaded, group in zip(groups, self.param_groups, strict=True)
        ]
        self._reset_changes()

    def _reset_changes(self) -> None:
        # Copies, since schedulers change tensor options in place.
        self._initial = [copy.deepcopy(options_of(group)) for group in self.param_groups]
        self._changed: list[set[str]] = [set() for _ in self.param_groups]


def options_of(group: Mapping[str, Any]) -> Options:
    """Returns a parameter group of torch without its "params"."""
    return {name: value for name, value in group.items() if name != "params"}
