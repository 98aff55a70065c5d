"""Schedules of learning rates for optimizers over several workers."""

from typing import Any

import pytest
import torch
from gradwire.optim import DistributedLRScheduler, DistributedOptimizer
from torch.optim import lr_scheduler

from tests.optim.models import Layer, assert_same_weights, local_step, parameters_of, spread, train_step

STEPS = 9


def halve(epoch: int) -> float:
    return 0.5**epoch


class Decay:
    """A callable object, whose attributes torch saves."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


SCHEDULERS: list[tuple[Any, dict[str, Any]]] = [
    (lr_scheduler.ConstantLR, {"factor": 0.5, "total_iters": 3}),
    (lr_scheduler.CosineAnnealingLR, {"T_max": 5, "eta_min": 0.001}),
    (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 2, "T_mult": 2}),
    (lr_scheduler.CyclicLR, {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}),
    (lr_scheduler.ExponentialLR, {"gamma": 0.8}),
    (lr_scheduler.LambdaLR, {"lr_lambda": lambda epoch: 1 / (1 + epoch)}),
    (lr_scheduler.LambdaLR, {"lr_lambda": [Decay(0.9), halve]}),
    (lr_scheduler.LinearLR, {"start_factor": 0.2, "total_iters": 4}),
    (lr_scheduler.MultiplicativeLR, {"lr_lambda": halve}),
    (lr_scheduler.MultiStepLR, {"milestones": [2, 5], "gamma": 0.3}),
    (lr_scheduler.OneCycleLR, {"max_lr": [0.1, 0.2], "total_steps": STEPS + 1}),
    (lr_scheduler.PolynomialLR, {"total_iters": 6, "power": 2.0}),
    (lr_scheduler.ReduceLROnPlateau, {"patience": 1, "factor": 0.5}),
    (lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.5}),
]
LOSSES = [5.0, 4.0, 4.5, 4.2, 4.1, 3.0, 3.5, 3.6, 3.7]
"""The metrics for ReduceLROnPlateau."""


def groups_of(first: list[Any], second: list[Any]) -> list[dict[str, Any]]:
    return [{"params": first}, {"params": second, "lr": 0.02, "momentum": 0.5}]


def make_both() -> tuple[list[Any], DistributedOptimizer, list[Layer], torch.optim.Optimizer]:
    """Makes the same models and optimizer on other workers and in this process."""
    models, local = spread(Layer, "worker1", "worker2"), [Layer(0), Layer(1)]
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = DistributedOptimizer(
        torch.optim.SGD, groups_of(parameters_of(models[:1]), parameters_of(models[1:])), **options
    )
    reference = torch.optim.SGD(groups_of(*(list(layer.parameters()) for layer in local)), **options)
    return models, optimizer, local, reference


def step(scheduler: Any, number: int) -> None:
    plain = getattr(scheduler, "_scheduler", scheduler)
    if isinstance(plain, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(LOSSES[number])
    else:
        scheduler.step()


def test_no_scheduler_of_torch_is_left_out():
    classes = {
        kind
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    composed = {lr_scheduler.ChainedScheduler, lr_scheduler.SequentialLR}
    assert classes - {lr_scheduler.LRScheduler} == {kind for kind, _ in SCHEDULERS} | composed


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS, ids=[kind.__name__ for kind, _ in SCHEDULERS])
def test_learning_rates_equal_those_of_one_process(three_workers, tmp_path, kind, options):
    def check() -> None:
        models, optimizer, local, reference = make_both()
        scheduler, expected = DistributedLRScheduler(kind, optimizer, **options), kind(reference, **options)
        rates = []
        for number in range(STEPS):
            train_step(models, optimizer, number)
            local_step(local, reference, number)
            step(scheduler, number)
            step(expected, number)
            rates.append(scheduler.get_last_lr())
            assert rates[-1] == expected.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
            if number == 3:
                saved = {"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved, tmp_path / "saved")
        assert_same_weights(models, local)  # so the owners have had these rates, and momentum where it is cycled

        # A new one goes on from the saved state.
        saved = torch.load(tmp_path / "saved", weights_only=True)
        _, optimizer, _, _ = make_both()
        resumed = DistributedLRScheduler(kind, optimizer, **options)
        optimizer.load_state_dict(saved["optimizer"])
        resumed.load_state_dict(saved["scheduler"])
        for number in range(4, STEPS):
            step(resumed, number)
            assert resumed.get_last_lr() == rates[number]

    three_workers[0].run(check)


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Combines schedulers as in a program for torch."""
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])


def chain(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, step_size=2)
    return lr_scheduler.ChainedScheduler(parts)


def wrapped_sequence(optimizer: DistributedOptimizer) -> DistributedLRScheduler:
    """Combines the same schedulers as DistributedLRSchedulers."""
    warmup = DistributedLRScheduler(lr_scheduler.LinearLR, optimizer, 0.1, total_iters=3)
    decay = DistributedLRScheduler(lr_scheduler.ExponentialLR, optimizer, 0.9)
    return DistributedLRScheduler(lr_scheduler.SequentialLR, optimizer, [warmup, decay], milestones=[3])


def wrapped_chain(optimizer: DistributedOptimizer) -> DistributedLRScheduler:
    decay = DistributedLRScheduler(lr_scheduler.ExponentialLR, optimizer, 0.9)
    steps = DistributedLRScheduler(lr_scheduler.StepLR, optimizer, step_size=2)
    return DistributedLRScheduler(lr_scheduler.ChainedScheduler, optimizer, schedulers=(decay, steps))


@pytest.mark.parametrize(
    ("make", "compose"),
    [
        (wrapped_sequence, sequence),
        (wrapped_chain, chain),
        (lambda optimizer: DistributedLRScheduler(sequence, optimizer), sequence),
        (lambda optimizer: DistributedLRScheduler(chain, optimizer), chain),
    ],
    ids=["wrapped sequence", "wrapped chain", "sequence", "chain"],
)
def test_schedulers_made_of_others(three_workers, make, compose):
    def check() -> None:
        _, optimizer, _, reference = make_both()
        scheduler, expected = make(optimizer), compose(reference)
        rates = []
        for number in range(STEPS):
            if number == 4:
                state = scheduler.state_dict()
            scheduler.step()
            expected.step()
            rates.append(scheduler.get_last_lr())
            assert rates[-1] == expected.get_last_lr()
        _, optimizer, _, _ = make_both()
        resumed = make(optimizer)
        resumed.load_state_dict(state)
        assert resumed.get_last_lr() == rates[3]
        for group, rate in zip(optimizer.param_groups, rates[3], strict=True):
            group["lr"] = rate
        for number in range(4, STEPS):
            resumed.step()
            assert resumed.get_last_lr() == rates[number]

    three_workers[0].run(check)


def test_learning_rates_that_are_tensors(three_workers):
    """Schedulers change tensor learning rates in place."""

    def check() -> None:
        models, local = spread(Layer, "worker1", "worker2"), [Layer(0), Layer(1)]
        options = {"lr": torch.tensor(0.1), "foreach": False}
        optimizer = DistributedOptimizer(torch.optim.Adam, parameters_of(models), **options)
        reference = torch.optim.Adam([p for layer in local for p in layer.parameters()], lr=0.1)
        scheduler = DistributedLRScheduler(lr_scheduler.ExponentialLR, optimizer, 0.5)
        expected = lr_scheduler.ExponentialLR(reference, 0.5)
        for number in range(4):
            train_step(models, optimizer, number)
            local_step(local, reference, number)
            scheduler.step()
            expected.step()
        assert scheduler.get_last_lr() == [torch.tensor(0.1 / 2**4)]
        assert optimizer.state_dict()["param_groups"][0]["lr"] == torch.tensor(0.1 / 2**4)
        assert_same_weights(models, local)

    three_workers[0].run(check)


def test_fractions_of_epochs(three_workers):
    def check() -> None:
        _, optimizer, _, reference = make_both()
        scheduler = DistributedLRScheduler(lr_scheduler.CosineAnnealingWarmRestarts, optimizer, 2)
        expected = lr_scheduler.CosineAnnealingWarmRestarts(reference, 2)
        for quarter in range(12):
            scheduler.step(epoch=quarter / 4)
            expected.step(quarter / 4)
            assert scheduler.get_last_lr() == expected.get_last_lr()

    three_workers[0].run(check)


def test_a_scheduler_step_before_the_optimizers_warns_as_in_torch(three_workers):
    def check() -> None:
        models, optimizer, _, _ = make_both()
        scheduler = DistributedLRScheduler(lr_scheduler.StepLR, optimizer, 1)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()
        scheduler = DistributedLRScheduler(lr_scheduler.StepLR, optimizer, 1)
        train_step(models, optimizer, 0)
        scheduler.step()

    three_workers[0].run(check)


def test_bad_arguments(three_workers):
    def check() -> None:
        _, optimizer, _, reference = make_both()
        _, other, _, _ = make_both()
        with pytest.raises(TypeError, match="optimizer is of type SGD: give a DistributedOptimizer"):
            DistributedLRScheduler(lr_scheduler.StepLR, reference, 1)
        with pytest.raises(TypeError, match="scheduler_class is 'StepLR'"):
            DistributedLRScheduler("StepLR", optimizer, 1)
        with pytest.raises(TypeError, match="scheduler_class made a NoneType"):
            DistributedLRScheduler(lambda optimizer: None, optimizer)
        with pytest.raises(TypeError, match="gamma"):
            DistributedLRScheduler(lr_scheduler.ExponentialLR, optimizer)
        with pytest.raises(ValueError, match="optimizer"):
            foreign = DistributedLRScheduler(lr_scheduler.StepLR, other, 1)
            DistributedLRScheduler(lr_scheduler.SequentialLR, optimizer, [foreign], [])
        with pytest.raises(TypeError, match="works on another optimizer"):
            DistributedLRScheduler(lambda _: lr_scheduler.StepLR(reference, 1), optimizer)
        plateau = DistributedLRScheduler(lr_scheduler.ReduceLROnPlateau, optimizer)
        with pytest.raises(ValueError, match="ReduceLROnPlateau needs metrics"):
            plateau.step()
        steps = DistributedLRScheduler(lr_scheduler.StepLR, optimizer, 1)
        with pytest.raises(ValueError, match=r"metrics is 0.5, but StepLR takes none"):
            steps.step(0.5)
        with pytest.raises(ValueError, match=r"of a .*ReduceLROnPlateau, but this scheduler is a .*StepLR"):
            steps.load_state_dict(plateau.state_dict())

    three_workers[0].run(check)
