"""Learning rates that follow a schedule, on all owners of parameters."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, final

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from .distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedLRScheduler"]


@final
class DistributedLRScheduler:
    """Has a scheduler of torch set the options of a DistributedOptimizer.

        scheduler = DistributedLRScheduler(torch.optim.lr_scheduler.StepLR, optimizer, step_size=30, gamma=0.1)
        for epoch in range(100):
            train(optimizer)
            scheduler.step()

    The schedule is computed once, where this object is, and its results (learning rates, and momentum for
    those schedulers that cycle it) go to all owners with the next step of the optimizer: owners cannot
    disagree, no extra messages are sent, and functions in the schedule need not be importable elsewhere.
    """

    def __init__(
        self,
        scheduler_class: Callable[..., LRScheduler],
        optimizer: DistributedOptimizer,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes the scheduler, which sets the first learning rates.

        Args:
            scheduler_class: any class of torch.optim.lr_scheduler, or a function that takes a torch optimizer
                and returns such a scheduler for it, made of several maybe.
            optimizer: whose options to set.
            args: arguments behind the optimizer. Where torch takes schedulers (SequentialLR, ChainedScheduler),
                give DistributedLRSchedulers of the same optimizer.
            kwargs: named arguments.

        Raises:
            TypeError: an argument cannot be.
            Exception: what `scheduler_class` raises.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(f"optimizer is of type {type(optimizer).__name__}: give a DistributedOptimizer")
        if not callable(scheduler_class):
            raise TypeError(f"scheduler_class is {scheduler_class!r}: give a class of torch.optim.lr_scheduler")
        if scheduler_class is ChainedScheduler:
            scheduler_class = _chain
        made: object = scheduler_class(
            optimizer._options,
            *[_plain(value) for value in args],
            **{name: _plain(value) for name, value in kwargs.items()},
        )
        if not isinstance(made, LRScheduler):
            raise TypeError(
                f"scheduler_class made a {type(made).__name__}: give a class of torch.optim.lr_scheduler, or a "
                "function that returns an instance of one"
            )
        if made.optimizer is not optimizer._options:
            raise TypeError(
                "scheduler_class made a scheduler that works on another optimizer: give a function that makes one "
                "for its argument"
            )
        self._scheduler = made

    def step(self, metrics: SupportsFloat | None = None, *, epoch: float | None = None) -> None:
        """Goes on to the next learning rates, which hold from the optimizer's next step on.

        Args:
            metrics: what ReduceLROnPlateau watches, such as a validation loss; for it alone.
            epoch: go to this epoch instead; what CosineAnnealingWarmRestarts calls fractions of.

        Raises:
            ValueError: ReduceLROnPlateau needs metrics, or another scheduler takes none.
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
        """The learning rate of each parameter group: a float, or a tensor where the optimizer was given one."""
        return self._scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the scheduler's state in torch's form, and the entry `scheduler_class` for checks.

        As in torch it has no functions of LambdaLR and the like in it, but the attributes of callable objects.
        """
        state = copy.deepcopy(self._scheduler.state_dict())
        return {**state, "scheduler_class": _name(self._scheduler)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from a saved state. Load the optimizer's too: it has the learning rates.

        Args:
            state_dict: what `state_dict` returned, or that of torch's scheduler.

        Raises:
            ValueError: it is of another class of scheduler. Nothing has changed.
        """
        state = copy.deepcopy(dict(state_dict))
        ours = _name(self._scheduler)
        saved = state.pop("scheduler_class", ours)
        if saved != ours:
            raise ValueError(f"state_dict is of a {saved}, but this scheduler is a {ours}")
        self._scheduler.load_state_dict(state)


def _chain(optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]) -> LRScheduler:
    """ChainedScheduler, with its arguments in the order of all others."""
    return ChainedScheduler(schedulers, optimizer)


def _plain(value: Any) -> Any:
    """An argument for torch's scheduler."""
    if isinstance(value, DistributedLRScheduler):
        return value._scheduler
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _name(scheduler: LRScheduler) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
