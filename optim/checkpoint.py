"""State dictionaries of distributed optimizers.

They have the form of `torch.optim.Optimizer.state_dict()`, with parameters numbered in the order of `params_rref`,
and do not name any worker. So a state dictionary can be loaded with other owners, by a torch optimizer over the
same parameters in one process, and the other way round. Two entries are added, to check that a dictionary fits.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .parameter_groups import Options

__all__ = ["StateDict", "build_state_dict", "check_class", "check_state_dict", "qualified_name", "state_by_index"]

StateDict = dict[str, Any]
"""The entries of a state dictionary:

state: the optimizer's state of each parameter, such as its momentum, by the parameter's index.
param_groups: the options of each group, with the indices of its parameters as "params".
optimizer_class: the qualified name of the optimizer's class; only gradwire's have it.
shapes: the shape of each parameter, by index; only gradwire's have it.
"""


def build_state_dict(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[tuple[Options, int]],
    shapes: Sequence[tuple[int, ...]],
    state: Mapping[int, Any],
) -> StateDict:
    """Returns a state dictionary, given the options and the number of parameters of each group."""
    indices = iter(range(len(shapes)))
    return {
        "state": {index: state[index] for index in sorted(state)},
        "param_groups": [{**options, "params": [next(indices) for _ in range(size)]} for options, size in groups],
        "optimizer_class": qualified_name(optimizer_class),
        "shapes": list(shapes),
    }


def check_state_dict(
    state_dict: Any,
    optimizer_class: type[torch.optim.Optimizer],
    group_sizes: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Raises ValueError if a state dictionary, of gradwire or of torch, does not fit an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"state_dict is {_describe(state_dict)}: give what state_dict() of an optimizer returned")
    check_class(state_dict, "optimizer", optimizer_class)
    _check_group_sizes([len(group["params"]) for group in state_dict["param_groups"]], group_sizes)
    _check_shapes(state_dict.get("shapes", shapes), shapes)
    unknown = state_dict["state"].keys() - set(_indices(state_dict))
    if unknown:
        raise ValueError(f"state_dict has state of {sorted(map(repr, unknown))}, which are in none of its groups")


def check_class(state_dict: Mapping[str, Any], kind: str, own: type) -> None:
    """Raises ValueError if a state dictionary says that it is of another class."""
    own_class = qualified_name(own)
    saved_class = state_dict.get(f"{kind}_class", own_class)
    if saved_class != own_class:
        raise ValueError(f"state_dict is of a {saved_class}, but this {kind} is a {own_class}")


def qualified_name(kind: type) -> str:
    """Returns by what name a state dictionary tells a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def state_by_index(state_dict: StateDict) -> dict[int, Any]:
    """Returns the parameters' state by their index in the order of the groups, however they are numbered."""
    state = state_dict["state"]
    return {index: state[saved] for index, saved in enumerate(_indices(state_dict)) if saved in state}


def _check_group_sizes(saved: Sequence[int], own: Sequence[int]) -> None:
    if len(saved) != len(own):
        raise ValueError(f"state_dict has {len(saved)} parameter groups, but this optimizer has {len(own)}")
    for index, (saved_size, own_size) in enumerate(zip(saved, own, strict=True)):
        if saved_size != own_size:
            raise ValueError(
                f"param_groups[{index}] of state_dict has {saved_size} parameters, but that of this optimizer "
                f"has {own_size}"
            )


def _check_shapes(saved: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> None:
    if len(saved) != len(own):
        raise ValueError(
            f"state_dict has shapes of {len(saved)} parameters, but this optimizer has {len(own)} parameters"
        )
    for index, (saved_shape, own_shape) in enumerate(zip(saved, own, strict=True)):
        if tuple(saved_shape) != tuple(own_shape):
            raise ValueError(
                f"parameter {index} has shape {tuple(saved_shape)} in state_dict, but {tuple(own_shape)} in this "
                "optimizer"
            )


def _indices(state_dict: Mapping[str, Any]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))


def _describe(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {sorted(map(str, value))[:8]}"
    return f"of type {type(value).__name__}"
