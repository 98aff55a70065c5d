"""One optimizer over parameters on many workers."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from ..rpc.contracts.worker import WorkerInfo
from ..rref import RRef, remote
from .checkpoint import StateDict, check, pack, state_of
from .local_optimizer import Description, LocalOptimizer
from .owners import wait_for_owners
from .parameter_groups import Options, ParameterGroup, ParameterGroupOptions, by_owner, options, read_groups

__all__ = ["DistributedOptimizer"]


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """What one owner has.

    groups: the indices of the groups that it has parameters of.
    parameters: the numbers of its parameters, in its order.
    """

    optimizer: RRef[LocalOptimizer]
    groups: tuple[int, ...]
    parameters: tuple[int, ...]


@final
class DistributedOptimizer:
    """Updates parameters where they are, with the gradients of an autograd context.

        optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs, lr=0.01)
        with autograd.context() as context_id:
            ...
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Every owner of parameters gets an ordinary optimizer over those it owns. Trainers that share parameters
    each have a DistributedOptimizer of their own, with its own state (momentum and so on); their steps on
    one owner run one after the other.

    Updates are asynchronous, as in Hogwild! (Niu et al., 2011): a step of one trainer may fall between the
    forward and the backward pass of another, whose backward then sees the newer parameters.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[RRef[torch.Tensor]] | Iterable[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes the optimizers on all owners, and waits for them.

        Args:
            optimizer_class: a class of torch.optim, or one like them whose `step` needs no closure.
            params_rref: references to leaf tensors, on any workers; or parameter groups, which are
                dictionaries of such references as "params" and options for them, such as "lr".
            args: arguments of the optimizer class behind the parameters.
            kwargs: its named arguments.

        Raises:
            TypeError, ValueError: an argument cannot be; also what `optimizer_class` raises.
            WorkerLostError: an owner is gone.
        """
        _check_class(optimizer_class)
        groups = read_groups(params_rref)
        self._optimizer_class = optimizer_class
        self._sizes = [len(group.parameters) for group in groups]
        group_of = [index for index, size in enumerate(self._sizes) for _ in range(size)]
        parameters = [parameter for group in groups for parameter in group.parameters]
        self._parts: dict[WorkerInfo, _Part] = {}
        for owner, numbers in by_owner(parameters).items():
            present = sorted({group_of[number] for number in numbers})
            local = [
                ParameterGroup([parameters[n] for n in numbers if group_of[n] == index], groups[index].options)
                for index in present
            ]
            optimizer = remote(owner, LocalOptimizer, (optimizer_class, local, args, kwargs))
            self._parts[owner] = _Part(optimizer, tuple(present), tuple(numbers))
        described: dict[WorkerInfo, Description] = self._ask(
            f"making the {optimizer_class.__name__}", lambda part: part.optimizer.rpc_async().describe()
        )
        defaults = next(iter(described.values())).defaults
        known = self._by_group({owner: description.groups for owner, description in described.items()})
        self._options = ParameterGroupOptions(
            [ParameterGroup(g.parameters, known.get(index, g.options)) for index, g in enumerate(groups)], defaults
        )
        shapes = {
            number: shape
            for owner, part in self._parts.items()
            for number, shape in zip(part.parameters, described[owner].shapes, strict=True)
        }
        self._shapes = [shapes[number] for number in range(len(shapes))]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as in torch: their options, and as "params" the RRefs.

        An option that is set here holds from the next step on. Parameters cannot be added.
        """
        return self._options.param_groups

    def step(self, context_id: int) -> None:
        """Updates all parameters that have a gradient in a context, on all owners at once.

        Raises:
            UnknownContextError: no such context on an owner.
            Exception: the first error of any owner, with a note that names those that failed; the others
                have made their step.
        """
        changes = self._options.changes()
        self._ask(
            "the step",
            lambda part: part.optimizer.rpc_async().step(context_id, [changes[group] for group in part.groups]),
        )
        self._options.step()

    def state_dict(self) -> StateDict:
        """The state of all owners, from which `load_state_dict` resumes, in a form that torch.save takes.

        It is the one that an optimizer of torch over the same parameters, in the order of `params_rref`, would
        give, with all tensors copied to the CPU of this worker, and two more entries: `optimizer_class` and
        `shapes`. Who owns which parameter is not in it.

        Raises:
            TypeError: the optimizer keeps state that belongs to no parameter.
            Exception: the first error of any owner.
        """
        changes = self._options.changes()
        answers: dict[WorkerInfo, tuple[dict[int, Any], list[Options]]] = self._ask(
            "saving the optimizer",
            lambda part: part.optimizer.rpc_async().state_dict([changes[group] for group in part.groups]),
        )
        state = {}
        for owner, part in self._parts.items():
            for number, kept in answers[owner][0].items():
                if not isinstance(number, int):
                    raise TypeError(
                        f"{self._optimizer_class.__name__} keeps the state {number!r}, which belongs to no "
                        "parameter: it cannot be saved for other owners"
                    )
                state[part.parameters[number]] = kept
        saved = self._by_group({owner: groups for owner, (_, groups) in answers.items()})
        groups = [saved.get(index, options(group)) for index, group in enumerate(self.param_groups)]
        return pack(self._optimizer_class, list(zip(groups, self._sizes, strict=True)), self._shapes, state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Resumes from a saved state; options become those of the state.

        The parameters may have other owners than when it was saved, but must be given in the same order.
        What an ordinary optimizer of torch has saved can be loaded too.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            ValueError: it is of another class of optimizer, or of parameters in another number, grouping or
                shape. Nothing has changed.
            Exception: the first error of any owner; the others have loaded their part.
        """
        check(state_dict, self._optimizer_class, self._sizes, self._shapes)
        state = state_of(state_dict)
        groups = [options(group) for group in state_dict["param_groups"]]

        def load(part: _Part) -> torch.futures.Future[None]:
            local = {place: state[number] for place, number in enumerate(part.parameters) if number in state}
            loaded: torch.futures.Future[None] = part.optimizer.rpc_async().load_state_dict(
                local, [groups[index] for index in part.groups]
            )
            return loaded

        self._ask("loading the optimizer", load)
        self._options.replace(groups)

    def _ask(self, doing: str, request: Callable[[_Part], torch.futures.Future[Any]]) -> dict[WorkerInfo, Any]:
        return wait_for_owners({owner: request(part) for owner, part in self._parts.items()}, doing)

    def _by_group(self, known: Mapping[WorkerInfo, Iterable[Options]]) -> dict[int, Options]:
        """The options of groups, each from the first owner that has it."""
        found: dict[int, Options] = {}
        for owner, part in self._parts.items():
            for index, given in zip(part.groups, known[owner], strict=True):
                found.setdefault(index, given)
        return found


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class is {optimizer_class!r}: give a class of torch.optim")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer_class is {optimizer_class.__name__}, whose step evaluates the loss again through a "
            "closure: a distributed step cannot, so give a class whose step needs none"
        )
