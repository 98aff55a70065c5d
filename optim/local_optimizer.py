"""The torch optimizer that runs on one owner of parameters, as a part of a distributed optimizer."""

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ..autograd import get_gradients
from ..rpc.contracts.agent import current_agent
from ..rpc.contracts.policy import expose, message_value
from ..torch_internals import tree_map_only
from .parameter_groups import Options, ParameterGroup, options_of

__all__ = ["LocalOptimizer", "OptimizerDescription", "ParameterState", "check_leaves"]

ParameterState = dict[int, Any]
"""The optimizer's state of parameters, such as momentum, by the parameter's index on this owner."""

_step_lock = threading.Lock()
"""Serializes the steps of all optimizers on this worker: those of several trainers may share parameters."""


@message_value
@final
@dataclass(frozen=True, slots=True)
class OptimizerDescription:
    """The options and shapes of one owner's optimizer.

    defaults: the options that the optimizer class and its arguments give.
    groups: the options of each of the owner's groups, defaults included.
    shapes: the shape of each parameter, by its index on this owner.
    """

    defaults: Options
    groups: Sequence[Options]
    shapes: Sequence[tuple[int, ...]]


@expose
@final
class LocalOptimizer:
    """A torch optimizer over the parameters of one owner.

    It works on aliases of the parameters: tensors that share their memory but have a `.grad` and a version counter
    of their own. So a step does not touch the `.grad` of the parameters, and does not make another trainer's
    backward pass fail with "modified by an inplace operation".
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[ParameterGroup],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Makes the optimizer for the groups that have parameters on this owner, with these parameters only.

        Raises:
            ValueError: a reference is not to a leaf tensor, or two are to the same.
            Exception: what the class raises for its arguments, or for the options of a group.
        """
        parameters = [parameter for group in groups for parameter in group.parameters]
        self._parameters = [parameter.rref._value_here() for parameter in parameters]
        check_leaves(self._parameters, [parameter.label for parameter in parameters])
        self._aliases = [
            torch.nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            for parameter in self._parameters
        ]
        aliases = iter(self._aliases)
        alias_groups = [{**group.options, "params": [next(aliases) for _ in group.parameters]} for group in groups]
        for alias_group, group in zip(alias_groups, groups, strict=True):
            _check_options(optimizer_class, alias_group, group.parameters[0].label, args, kwargs)
        self._optimizer = optimizer_class(alias_groups, *args, **kwargs)

    def describe(self) -> OptimizerDescription:
        """Returns the options and shapes, for the trainer that made this optimizer."""
        return OptimizerDescription(
            self._optimizer.defaults,
            [options_of(group) for group in self._optimizer.param_groups],
            [tuple(parameter.shape) for parameter in self._parameters],
        )

    def step(self, context_id: int, changes: Sequence[Options]) -> None:
        """Updates the parameters that have a gradient in a context, after setting some options of each group."""
        gradients = get_gradients(context_id)
        with _step_lock:
            self._set_options(changes)
            for parameter, alias in zip(self._parameters, self._aliases, strict=True):
                if alias.data_ptr() != parameter.data_ptr():  # `module.to(...)` replaces a parameter's memory
                    alias.data = parameter.data
                alias.grad = gradients.get(parameter)
            try:
                self._optimizer.step()
            finally:
                for alias in self._aliases:
                    alias.grad = None

    def state_dict(self, changes: Sequence[Options]) -> tuple[ParameterState, list[Options]]:
        """Returns the parameters' state and the groups' options, after setting options as `step` does.

        Tensors are copied to the CPU, because the next step may run while they are being sent.
        """
        with _step_lock:
            self._set_options(changes)
            saved = self._optimizer.state_dict()
            found = saved["state"], [options_of(each) for each in saved["param_groups"]]
            copies: tuple[ParameterState, list[Options]] = tree_map_only(
                torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), found
            )
            return copies

    def load_state_dict(self, state: ParameterState, groups: Sequence[Options]) -> None:
        """Sets the parameters' state and the groups' options; both may come from other owners."""
        with _step_lock:
            indices = iter(range(len(self._parameters)))
            indexed_groups = [
                {**options, "params": [next(indices) for _ in group["params"]]}
                for options, group in zip(groups, self._optimizer.param_groups, strict=True)
            ]
            self._optimizer.load_state_dict({"state": state, "param_groups": indexed_groups})

    def _set_options(self, changes: Sequence[Options]) -> None:
        for group, changed in zip(self._optimizer.param_groups, changes, strict=True):
            group.update(changed)


def check_leaves(leaves: Sequence[Any], labels: Sequence[str]) -> None:
    """Raises ValueError, with the label of the value, unless values of this worker are distinct leaf tensors."""
    worker = current_agent().info.name
    seen: dict[torch.Tensor, str] = {}
    for leaf, label in zip(leaves, labels, strict=True):
        name = f"{label} on worker {worker!r}"
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(f"{name} is of type {type(leaf).__name__}: give an RRef to a leaf tensor")
        if not leaf.is_leaf:
            raise ValueError(f"{name} is the result of an operation: give an RRef to a leaf tensor")
        if leaf in seen:
            raise ValueError(f"{name} is the same parameter as {seen[leaf]}: give each once")
        seen[leaf] = label


def _check_options(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    label: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Checks a group's options by making an optimizer that has them as arguments: torch checks only arguments."""
    signature = inspect.signature(optimizer_class)
    checked = {name: value for name, value in options_of(group).items() if name in signature.parameters}
    if not checked:
        return
    call = signature.bind(group["params"], *args, **kwargs)
    call.arguments.update(checked)
    try:
        optimizer_class(*call.args, **call.kwargs)
    except Exception as error:
        error.add_note(f"in the options of the group with {label} on worker {current_agent().info.name!r}")
        raise
