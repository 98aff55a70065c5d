"""The state of all owners in one dictionary, and back.

It has the form of `torch.optim.Optimizer.state_dict()`, with parameters numbered in the order of
`params_rref`. So it does not depend on who owns what, and an optimizer of torch over the same parameters in
one process can load it, and the other way round. Two entries are added, for checks.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .parameter_groups import Options

__all__ = ["StateDict", "check", "pack", "state_of"]

StateDict = dict[str, Any]
"""state: by a parameter's number, what the optimizer keeps of it.
param_groups: the options of each group, and as "params" the numbers of its parameters.
optimizer_class: the optimizer's module and name.
shapes: of each parameter, in their order."""


def pack(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[tuple[Options, int]],
    shapes: Sequence[tuple[int, ...]],
    state: Mapping[int, Any],
) -> StateDict:
    """The dictionary of these groups (options, and how many parameters) and this state."""
    numbers = iter(range(len(shapes)))
    return {
        "state": {number: state[number] for number in sorted(state)},
        "param_groups": [{**given, "params": [next(numbers) for _ in range(size)]} for given, size in groups],
        "optimizer_class": _name(optimizer_class),
        "shapes": list(shapes),
    }


def check(
    state_dict: Any,
    optimizer_class: type[torch.optim.Optimizer],
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Raises ValueError if a dictionary does not fit groups of these sizes over parameters of these shapes."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"state_dict is {_brief(state_dict)}: give what state_dict() of an optimizer returned")
    ours = _name(optimizer_class)
    saved_class = state_dict.get("optimizer_class", ours)
    if saved_class != ours:
        raise ValueError(f"state_dict is of a {saved_class}, but this optimizer is a {ours}")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    if len(saved) != len(sizes):
        raise ValueError(f"state_dict has {len(saved)} parameter groups, but this optimizer has {len(sizes)}")
    for index, (there, here) in enumerate(zip(saved, sizes, strict=True)):
        if there != here:
            raise ValueError(
                f"param_groups[{index}] of state_dict has {there} parameters, but that of this optimizer {here}"
            )
    saved_shapes = state_dict.get("shapes", shapes)
    if len(saved_shapes) != len(shapes):
        raise ValueError(
            f"state_dict has shapes of {len(saved_shapes)} parameters, but this optimizer has {len(shapes)}"
        )
    for number, (was, is_) in enumerate(zip(saved_shapes, shapes, strict=True)):
        if tuple(was) != tuple(is_):
            raise ValueError(
                f"parameter {number} has shape {tuple(was)} in state_dict, but {tuple(is_)} in this optimizer"
            )
    unknown = state_dict["state"].keys() - set(_numbers(state_dict))
    if unknown:
        raise ValueError(f"state_dict has state of {sorted(map(repr, unknown))}, which are in none of its groups")


def state_of(state_dict: StateDict) -> dict[int, Any]:
    """The state by the place of parameters, whatever numbers the dictionary gives them."""
    state = state_dict["state"]
    return {place: state[number] for place, number in enumerate(_numbers(state_dict)) if number in state}


def _numbers(state_dict: Mapping[str, Any]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))


def _name(optimizer_class: type[torch.optim.Optimizer]) -> str:
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {sorted(map(str, value))[:8]}"
    return f"of type {type(value).__name__}"
