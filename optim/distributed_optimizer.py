"""DistributedOptimizer: one optimizer over parameters that many workers own, and its state dictionaries.

State dictionaries have the form of `torch.optim.Optimizer.state_dict()`, with parameters numbered in the order of
`params_rref`, and do not name any worker. So one can be loaded with other owners, or by a torch optimizer over the
same parameters in one process, and the other way round. Two entries are added, to check that a dictionary fits.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch

from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future
from ..rref import RRef
from ..rref.rref import remote_needing
from .local_optimizer import LocalOptimizer, OptimizerDescription, ParameterState
from .parameter_groups import (
    Options,
    ParameterGroup,
    ParameterGroupOptions,
    indices_by_owner,
    options_of,
    parse_groups,
    wait_for_owners,
)

__all__ = ["DistributedOptimizer", "check_class", "qualified_name"]

StateDict = dict[str, Any]
"""The entries of a state dictionary:

state: the optimizer's state of each parameter, such as its momentum, by the parameter's index.
param_groups: the options of each group, with the indices of its parameters as "params".
optimizer_class: the qualified name of the optimizer's class; only gradwire's have it.
shapes: the shape of each parameter, by index; only gradwire's have it.
"""


def _build_state_dict(
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


def _check_state_dict(
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


def _state_by_index(state_dict: StateDict) -> dict[int, Any]:
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


@final
@dataclass(frozen=True, slots=True)
class _Shard:
    """The parameters of one owner.

    optimizer: the owner's optimizer over them.
    groups: the indices of the parameter groups that they belong to, ascending.
    parameters: their indices among all parameters, ascending.
    """

    optimizer: RRef[LocalOptimizer]
    groups: tuple[int, ...]
    parameters: tuple[int, ...]


@final
class DistributedOptimizer:
    """Updates parameters on the workers that own them, with the gradients of an autograd context.

        optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs, lr=0.01)
        with autograd.context() as context_id:
            ...
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Every owner gets a torch optimizer over the parameters it owns. Trainers that share parameters each have a
    DistributedOptimizer of their own, with its own state, such as momentum. Steps on one owner run one after the
    other.

    Updates are asynchronous, as in Hogwild! (Niu et al., 2011): one trainer's step may run between the forward and
    the backward pass of another trainer, whose backward pass then uses the updated parameters.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[RRef[torch.Tensor]] | Iterable[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes an optimizer on every owner, and waits until all are made.

        Args:
            optimizer_class: a class of torch.optim, or one with the same interface. Its `step` must not need a
                closure.
            params_rref: references to leaf tensors, owned by any workers; or parameter groups: dictionaries with
                such references as "params", and options such as "lr".
            args: positional arguments of the optimizer class after the parameters.
            kwargs: its keyword arguments.

        Raises:
            TypeError, ValueError: an argument is invalid; also what `optimizer_class` raises.
            WorkerLostError: an owner is lost.
        """
        _check_class(optimizer_class)
        groups = parse_groups(params_rref)
        self._optimizer_class = optimizer_class
        self._group_sizes = [len(group.parameters) for group in groups]
        self._shards = _make_shards(optimizer_class, groups, args, kwargs)
        descriptions: dict[WorkerInfo, OptimizerDescription] = self._request(
            f"making the {optimizer_class.__name__}", lambda shard: shard.optimizer.rpc_async().describe()
        )
        self._options = self._collect_options(groups, descriptions)
        self._shapes = self._collect_shapes(descriptions)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as in torch: their options, and the RRefs as "params".

        Options that are set here apply from the next step on. Parameters cannot be added.
        """
        return self._options.param_groups

    def step(self, context_id: int) -> None:
        """Updates all parameters that have a gradient in an autograd context, on all owners concurrently.

        Args:
            context_id: the id that `autograd.context()` yielded.

        Raises:
            UnknownContextError: an owner has no such context.
            Exception: the first error of any owner, with a note that names the owners that failed. The other
                owners have made their step.
        """
        changes = self._options.changes()
        self._request(
            "the step",
            lambda shard: shard.optimizer.rpc_async().step(context_id, [changes[group] for group in shard.groups]),
        )
        self._options.step()

    def state_dict(self) -> StateDict:
        """Returns the state of all owners' optimizers, for `load_state_dict` and `torch.save`.

        It has the form of torch's, for one optimizer over all parameters in the order of `params_rref`, and two
        more entries, `optimizer_class` and `shapes`. All tensors are copies on the CPU of this worker. The owners
        are not recorded.

        Raises:
            TypeError: the optimizer keeps state that belongs to no parameter.
            Exception: the first error of any owner.
        """
        changes = self._options.changes()
        answers: dict[WorkerInfo, tuple[ParameterState, list[Options]]] = self._request(
            "saving the optimizer",
            lambda shard: shard.optimizer.rpc_async().state_dict([changes[group] for group in shard.groups]),
        )
        state = {}
        for owner, shard in self._shards.items():
            for index, saved in answers[owner][0].items():
                if not isinstance(index, int):
                    raise TypeError(
                        f"{self._optimizer_class.__name__} keeps the state {index!r}, which belongs to no "
                        "parameter: it cannot be saved for other owners"
                    )
                state[shard.parameters[index]] = saved
        saved_groups = self._options_by_group({owner: options for owner, (_, options) in answers.items()})
        groups = [saved_groups.get(index, options_of(group)) for index, group in enumerate(self.param_groups)]
        sized_groups = list(zip(groups, self._group_sizes, strict=True))
        return _build_state_dict(self._optimizer_class, sized_groups, self._shapes, state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the state and the options of all owners' optimizers.

        The owners may differ from those at the time of saving, but the order of the parameters must be the same.

        Args:
            state_dict: the result of `state_dict`, or of a torch optimizer's.

        Raises:
            ValueError: it is of another optimizer class, or the number, grouping or shape of its parameters
                differs. Nothing has changed.
            Exception: the first error of any owner. The other owners have loaded their part.
        """
        _check_state_dict(state_dict, self._optimizer_class, self._group_sizes, self._shapes)
        state = _state_by_index(state_dict)
        groups = [options_of(group) for group in state_dict["param_groups"]]

        def load(shard: _Shard) -> Future[None]:
            local_state = {local: state[index] for local, index in enumerate(shard.parameters) if index in state}
            loaded: Future[None] = shard.optimizer.rpc_async().load_state_dict(
                local_state, [groups[index] for index in shard.groups]
            )
            return loaded

        self._request("loading the optimizer", load)
        self._options.replace(groups)

    def _request(self, activity: str, send: Callable[[_Shard], Future[Any]]) -> dict[WorkerInfo, Any]:
        """Sends a request to every owner with `send`, and waits for all results."""
        return wait_for_owners({owner: send(shard) for owner, shard in self._shards.items()}, activity)

    def _collect_options(
        self, groups: Sequence[ParameterGroup], descriptions: Mapping[WorkerInfo, OptimizerDescription]
    ) -> ParameterGroupOptions:
        """Returns the options of all groups, with the defaults that the owners have filled in."""
        complete = self._options_by_group({owner: each.groups for owner, each in descriptions.items()})
        return ParameterGroupOptions(
            [
                ParameterGroup(group.parameters, complete.get(index, group.options))
                for index, group in enumerate(groups)
            ],
            next(iter(descriptions.values())).defaults,
        )

    def _collect_shapes(self, descriptions: Mapping[WorkerInfo, OptimizerDescription]) -> list[tuple[int, ...]]:
        """Returns the shapes of all parameters, by index."""
        shapes = {
            index: shape
            for owner, shard in self._shards.items()
            for index, shape in zip(shard.parameters, descriptions[owner].shapes, strict=True)
        }
        return [shapes[index] for index in range(len(shapes))]

    def _options_by_group(self, owner_groups: Mapping[WorkerInfo, Iterable[Options]]) -> dict[int, Options]:
        """Returns the options of each group that any owner has parameters of, as the first such owner has them."""
        options: dict[int, Options] = {}
        for owner, shard in self._shards.items():
            for index, group in zip(shard.groups, owner_groups[owner], strict=True):
                options.setdefault(index, group)
        return options


def _make_shards(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[ParameterGroup],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> dict[WorkerInfo, _Shard]:
    """Starts making an optimizer on every owner, without waiting for it."""
    parameters = [parameter for group in groups for parameter in group.parameters]
    group_of = [index for index, group in enumerate(groups) for _ in group.parameters]
    shards = {}
    for owner, indices in indices_by_owner(parameters).items():
        present = sorted({group_of[index] for index in indices})
        local_groups = [
            ParameterGroup([parameters[i] for i in indices if group_of[i] == group], groups[group].options)
            for group in present
        ]
        needed = [parameter.rref for group in local_groups for parameter in group.parameters]
        optimizer = remote_needing(needed, owner, LocalOptimizer, (optimizer_class, local_groups, args, kwargs))
        shards[owner] = _Shard(optimizer, tuple(present), tuple(indices))
    return shards


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class is {optimizer_class!r}: give a class of torch.optim")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer_class is {optimizer_class.__name__}, whose step calls a closure to evaluate the loss "
            "again, which a distributed step cannot do: give a class whose step needs no closure"
        )
