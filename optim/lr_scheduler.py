"""Learning rate schedules for a DistributedOptimizer."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, final

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from ..torch_internals import tree_map_only
from .distributed_optimizer import DistributedOptimizer, check_class, qualified_name

__all__ = ["DistributedLRScheduler"]


@final
class DistributedLRScheduler:
    """Applies one of torch's learning rate schedulers to a DistributedOptimizer.

        scheduler = DistributedLRScheduler(torch.optim.lr_scheduler.StepLR, optimizer, step_size=30, gamma=0.1)
        for epoch in range(100):
            train(optimizer)
            scheduler.step()

    The schedule is computed in this process only. Its results, learning rates and for some schedulers momentum, go
    to all owners with the next step of the optimizer. So all owners use the same values, no extra messages are
    sent, and functions in the schedule need not be importable on the owners.
    """

    def __init__(
        self,
        scheduler_class: Callable[..., LRScheduler],
        optimizer: DistributedOptimizer,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes the scheduler, which sets the initial learning rates.

        Args:
            scheduler_class: a class of torch.optim.lr_scheduler, or a function that takes a torch optimizer and
                returns a scheduler for it, for example one made of several.
            optimizer: the optimizer whose options the schedule sets.
            args: positional arguments of `scheduler_class` after the optimizer. Where torch takes schedulers
                (SequentialLR, ChainedScheduler), give DistributedLRSchedulers of the same optimizer.
            kwargs: its keyword arguments.

        Raises:
            TypeError: `optimizer` or `scheduler_class` is of the wrong type, or `scheduler_class` returned
                something else than a scheduler for its argument.
            Exception: what `scheduler_class` raises.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(f"optimizer is of type {type(optimizer).__name__}: give a DistributedOptimizer")
        if not callable(scheduler_class):
            raise TypeError(f"scheduler_class is {scheduler_class!r}: give a class of torch.optim.lr_scheduler")
        if scheduler_class is ChainedScheduler:
            scheduler_class = _chain
        args, kwargs = tree_map_only(DistributedLRScheduler, lambda each: each._scheduler, (args, kwargs))
        scheduler: object = scheduler_class(optimizer._options, *args, **kwargs)
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"scheduler_class made a {type(scheduler).__name__}: give a class of torch.optim.lr_scheduler, "
                "or a function that returns an instance of one"
            )
        if scheduler.optimizer is not optimizer._options:
            raise TypeError(
                "scheduler_class made a scheduler that works on another optimizer: give a function that makes one "
                "for its argument"
            )
        self._scheduler = scheduler

    def step(self, metrics: SupportsFloat | None = None, *, epoch: float | None = None) -> None:
        """Computes the next learning rates, which apply from the optimizer's next step on.

        Args:
            metrics: the value that ReduceLROnPlateau monitors, such as a validation loss; only for that class.
            epoch: the epoch to compute the learning rates for, instead of the next one. It may be a fraction for
                CosineAnnealingWarmRestarts.

        Raises:
            ValueError: `metrics` is missing for ReduceLROnPlateau, or is given for another class.
        """
        name = type(self._scheduler).__name__
        if isinstance(self._scheduler, ReduceLROnPlateau):
            if metrics is None:
                raise ValueError(f"{name} needs metrics: call step(validation_loss)")
            self._scheduler.step(metrics)
        elif metrics is not None:
            raise ValueError(f"metrics is {metrics!r}, but {name} takes none: call step(), or step(epoch=…)")
        elif epoch is not None:
            self._scheduler.step(epoch)  # type: ignore[arg-type]
        else:
            self._scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """Returns the learning rate of each group: a float, or a tensor if the optimizer was given one."""
        return self._scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the scheduler's state in torch's form, with `scheduler_class` as an additional entry.

        As in torch, functions such as LambdaLR's are left out; of callable objects the attributes are saved.
        """
        state = copy.deepcopy(self._scheduler.state_dict())
        return {**state, "scheduler_class": qualified_name(type(self._scheduler))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state. The learning rates themselves are in the optimizer's state: restore that, too.

        Args:
            state_dict: the result of `state_dict`, or of a torch scheduler's.

        Raises:
            ValueError: it is of another scheduler class. Nothing has changed.
        """
        state = copy.deepcopy(dict(state_dict))
        check_class(state, "scheduler", type(self._scheduler))
        state.pop("scheduler_class", None)
        self._scheduler.load_state_dict(state)


def _chain(optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]) -> LRScheduler:
    """Makes a ChainedScheduler; unlike all other schedulers, it takes the optimizer last."""
    return ChainedScheduler(schedulers, optimizer)
