"""The part of a distributed optimizer on one owner of parameters."""

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ..autograd import get_gradients
from ..rpc.contracts.agent import current_agent
from .parameter_groups import Options, ParameterGroup, options

__all__ = ["Description", "LocalOptimizer", "State", "check_leaves"]

State = dict[int, Any]
"""What an optimizer keeps of parameters (momentum and so on), by their number."""

_stepping = threading.Lock()
"""Steps on one worker run one after the other: the optimizers of several trainers may share parameters."""


@final
@dataclass(frozen=True, slots=True)
class Description:
    """What an owner's optimizer is over.

    defaults: the options that the optimizer class and its arguments give.
    groups: the options of the owner's groups, defaults included.
    shapes: of its parameters, in their order.
    """

    defaults: Options
    groups: Sequence[Options]
    shapes: Sequence[tuple[int, ...]]


@final
class LocalOptimizer:
    """An ordinary optimizer over the parameters of one owner.

    It works on aliases of the parameters: tensors over the same memory with a `.grad` and a version counter of
    their own. So a step touches nobody's `.grad`, and does not make the backward pass of another trainer,
    which is on its way, fail for a parameter "modified by an inplace operation".
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[ParameterGroup],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        parameters = [parameter for group in groups for parameter in group.parameters]
        self._parameters = [parameter.rref.local_value() for parameter in parameters]
        check_leaves(self._parameters, [parameter.label for parameter in parameters])
        self._aliases = [
            torch.nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            for parameter in self._parameters
        ]
        aliases = iter(self._aliases)
        aliased = [{**group.options, "params": [next(aliases) for _ in group.parameters]} for group in groups]
        for group, label in zip(aliased, (group.parameters[0].label for group in groups), strict=True):
            _check_options(optimizer_class, group, label, args, kwargs)
        self._optimizer = optimizer_class(aliased, *args, **kwargs)

    def describe(self) -> Description:
        """What it is over."""
        return Description(
            self._optimizer.defaults,
            [options(group) for group in self._optimizer.param_groups],
            [tuple(parameter.shape) for parameter in self._parameters],
        )

    def step(self, context_id: int, changes: Sequence[Options]) -> None:
        """Updates the parameters that have a gradient in a context, after options of its groups have changed."""
        gradients = get_gradients(context_id)
        with _stepping:
            self._change(changes)
            for parameter, alias in zip(self._parameters, self._aliases, strict=True):
                if alias.data_ptr() != parameter.data_ptr():  # `module.to(...)` moves parameters
                    alias.data = parameter.data
                alias.grad = gradients.get(parameter)
            try:
                self._optimizer.step()
            finally:
                self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self, changes: Sequence[Options]) -> tuple[State, list[Options]]:
        """The state by this owner's numbers, and its groups' options.

        All are copies on the CPU: the next step may come while they are being sent.
        """
        with _stepping:
            self._change(changes)
            saved = self._optimizer.state_dict()
            return _copied(saved["state"]), [_copied(options(group)) for group in saved["param_groups"]]

    def load_state_dict(self, state: State, groups: Sequence[Options]) -> None:
        """Takes over what `state_dict` gave, maybe of other owners."""
        with _stepping:
            numbers = iter(range(len(self._parameters)))
            numbered = [
                {**given, "params": [next(numbers) for _ in group["params"]]}
                for given, group in zip(groups, self._optimizer.param_groups, strict=True)
            ]
            self._optimizer.load_state_dict({"state": state, "param_groups": numbered})

    def _change(self, changes: Sequence[Options]) -> None:
        for group, changed in zip(self._optimizer.param_groups, changes, strict=True):
            group.update(changed)


def check_leaves(leaves: Sequence[Any], labels: Sequence[str]) -> None:
    """Looks at what references to parameters of this worker refer to.

    Raises:
        ValueError: one is no leaf tensor, or two are the same.
    """
    here = current_agent().info.name
    known: dict[torch.Tensor, str] = {}
    for leaf, label in zip(leaves, labels, strict=True):
        name = f"{label} on worker {here!r}"
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(f"{name} is of type {type(leaf).__name__}: give an RRef to a leaf tensor")
        if not leaf.is_leaf:
            raise ValueError(f"{name} is the result of an operation: give an RRef to a leaf tensor")
        if leaf in known:
            raise ValueError(f"{name} is the same parameter as {known[leaf]}: give each once")
        known[leaf] = label


def _check_options(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    label: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Makes an optimizer with a group's options as arguments, since torch checks arguments only."""
    signature = inspect.signature(optimizer_class)
    given = {name: value for name, value in options(group).items() if name in signature.parameters}
    if not given:
        return
    call = signature.bind(group["params"], *args, **kwargs)
    call.arguments.update(given)
    try:
        optimizer_class(*call.args, **call.kwargs)
    except Exception as error:
        error.add_note(f"in the options of the group with {label} on worker {current_agent().info.name!r}")
        raise


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
