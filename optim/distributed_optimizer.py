"""One optimizer over parameters on many workers."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch

from ..autograd import get_gradients
from ..rpc.calls import rpc_async
from ..rpc.worker import WorkerInfo
from ..rref import RRef, remote

__all__ = ["DistributedOptimizer"]

_stepping = threading.Lock()
"""Steps on one worker run one after the other: the optimizers of several trainers may share parameters."""


@final
class DistributedOptimizer:
    """Updates parameters where they are, with the gradients of an autograd context.

    Every owner of parameters gets an ordinary optimizer over those it owns. Trainers that share parameters
    each have a DistributedOptimizer of their own, with its own state (momentum and so on); their steps on
    one owner run one after the other.

    Updates are asynchronous, as in Hogwild! (Niu et al., 2011): a step of one trainer may fall between the
    forward and the backward pass of another, whose backward then sees the newer parameters.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Sequence[RRef[torch.Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes the optimizers on all owners, and waits for them.

        Args:
            optimizer_class: any class of torch.optim.
            params_rref: references to leaf tensors that require grad.
            args: arguments of the optimizer class behind the parameters.
            kwargs: its named arguments.

        Raises:
            TypeError, ValueError: an argument cannot be; also what `optimizer_class` raises.
            WorkerLostError: an owner is gone.
        """
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(f"optimizer_class is {optimizer_class!r}: give a class of torch.optim")
        by_owner: dict[WorkerInfo, list[RRef[torch.Tensor]]] = defaultdict(list)
        for index, parameter in enumerate(params_rref):
            if not isinstance(parameter, RRef):
                raise TypeError(
                    f"params_rref[{index}] is of type {type(parameter).__name__}: give an RRef to a parameter"
                )
            by_owner[parameter.owner()].append(parameter)
        if not by_owner:
            raise ValueError("params_rref is empty: there is nothing to optimize")
        self._optimizers = [
            remote(owner, _LocalOptimizer, (optimizer_class, parameters, args, kwargs))
            for owner, parameters in by_owner.items()
        ]
        for optimizer in self._optimizers:
            optimizer.rpc_sync().ready()

    def step(self, context_id: int) -> None:
        """Updates all parameters that have a gradient in a context, on all owners at once.

        Raises:
            UnknownContextError: no such context on an owner.
            Exception: the first error of any owner; the others have made their step.
        """
        steps = [rpc_async(optimizer.owner(), _step, (optimizer, context_id)) for optimizer in self._optimizers]
        errors = []
        for step in steps:
            try:
                step.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _step(optimizer: "RRef[_LocalOptimizer]", context_id: int) -> None:
    optimizer.local_value().step(context_id)


@final
class _LocalOptimizer:
    """The part on one owner.

    The optimizer works on aliases of the parameters: tensors over the same memory with a `.grad` and a
    version counter of their own. So a step touches nobody's `.grad`, and does not make the backward pass of
    another trainer, which is on its way, fail for a parameter "modified by an inplace operation".
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        parameters: Sequence[RRef[torch.Tensor]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._parameters = [rref.local_value() for rref in parameters]
        for parameter in self._parameters:
            if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf or not parameter.requires_grad:
                raise ValueError(f"{type(parameter).__name__} is no leaf tensor that requires grad")
        self._aliases = [torch.nn.Parameter(parameter.data) for parameter in self._parameters]
        self._optimizer = optimizer_class(self._aliases, *args, **kwargs)

    def ready(self) -> None:
        """Exists, or its construction's error would have been raised."""

    def step(self, context_id: int) -> None:
        gradients = get_gradients(context_id)
        with _stepping:
            for parameter, alias in zip(self._parameters, self._aliases, strict=True):
                if alias.data_ptr() != parameter.data_ptr():  # `module.to(...)` moves parameters
                    alias.data = parameter.data
                alias.grad = gradients.get(parameter)
            try:
                self._optimizer.step()
            finally:
                self._optimizer.zero_grad(set_to_none=True)
