"""Saving and loading the state of optimizers whose parameters are spread over workers."""

import copy
from pathlib import Path

import pytest
import torch
from gradwire import rpc
from gradwire.optim import DistributedLRScheduler, DistributedOptimizer

from tests.optim.models import (
    Layer,
    Matrix,
    Table,
    assert_same_weights,
    local_step,
    parameters_of,
    spread,
    train_step,
)
from tests.workers import Worker, Workers

EPOCHS = 8


def make_optimizer(models: list[rpc.RRef], kind: type = torch.optim.Adam) -> DistributedOptimizer:
    first, *others = (model.rpc_sync().parameter_rrefs() for model in models)
    groups = [{"params": first, "lr": 0.02}, {"params": []}, {"params": [p for o in others for p in o]}]
    return DistributedOptimizer(kind, groups, lr=0.05)


def weights_of(models: list[rpc.RRef]) -> list[torch.Tensor]:
    return [weight for model in models for weight in model.rpc_sync().weights()]


def test_state_dicts_have_the_form_of_torchs(three_workers, tmp_path):
    """A torch optimizer over the same parameters can load it, and the other way round."""

    def check() -> None:
        # Owners alternate, so their numbers and the caller's differ.
        models = spread(Layer, "worker1", "worker2", "worker1", "worker0")
        local = [Layer(seed) for seed in range(4)]
        optimizer = DistributedOptimizer(torch.optim.Adam, parameters_of(models), lr=0.05)
        reference = torch.optim.Adam([p for layer in local for p in layer.parameters()], lr=0.05)
        for step in range(3):
            train_step(models, optimizer, step)
            local_step(local, reference, step)
        torch.save(optimizer.state_dict(), tmp_path / "state")
        saved = torch.load(tmp_path / "state", weights_only=True)
        assert list(saved["state"]) == list(range(8))
        torch.testing.assert_close(saved["state"], reference.state_dict()["state"])
        assert saved["param_groups"] == reference.state_dict()["param_groups"]

        onward = torch.optim.Adam([p for layer in local for p in layer.parameters()])
        onward.load_state_dict(saved)
        resumed = DistributedOptimizer(torch.optim.Adam, parameters_of(models))
        resumed.load_state_dict(reference.state_dict())
        assert resumed.param_groups[0]["lr"] == 0.05
        for step in range(3, 6):
            train_step(models, resumed, step)
            local_step(local, onward, step)
        assert_same_weights(models, local)

    three_workers[0].run(check)


def test_state_is_a_copy(three_workers):
    def check() -> None:
        models = spread(Layer, "worker0", "worker1")
        optimizer = make_optimizer(models)
        train_step(models, optimizer, 0)
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        train_step(models, optimizer, 1)
        optimizer.load_state_dict(saved)
        train_step(models, optimizer, 1)
        torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)
        assert saved["param_groups"] == before["param_groups"]

    three_workers[0].run(check)


@pytest.mark.parametrize(
    ("optimizer_class", "kind"),
    [
        (torch.optim.SGD, Layer),
        (torch.optim.Adafactor, Layer),
        (torch.optim.Rprop, Layer),
        (torch.optim.Muon, Matrix),
        (torch.optim.SparseAdam, Table),
    ],
)
def test_loading_restores_the_state_with_any_owners(three_workers, optimizer_class, kind):
    def check() -> None:
        models = spread(kind, "worker1", "worker2", "worker0")
        optimizer = make_optimizer(models, optimizer_class)
        for step in range(2):
            train_step(models, optimizer, step)
        optimizer.param_groups[1]["lr"] = 0.5  # of a group without parameters
        optimizer.param_groups[2]["lr"] = 0.03
        state, saved = optimizer.state_dict(), [model.rpc_sync().saved() for model in models]
        losses = [train_step(models, optimizer, step) for step in range(2, 5)]

        others = spread(kind, "worker0", "worker1", "worker1")
        for model, tensors in zip(others, saved, strict=True):
            model.rpc_sync().resume(tensors)
        resumed = make_optimizer(others, optimizer_class)
        resumed.load_state_dict(state)
        assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.5, 0.03]
        assert [train_step(others, resumed, step) for step in range(2, 5)] == losses

    three_workers[0].run(check)


def test_a_state_dict_that_does_not_fit_changes_nothing(three_workers):
    def check() -> None:
        models = spread(Layer, "worker1", "worker2")
        optimizer = make_optimizer(models)
        train_step(models, optimizer, 0)
        good = optimizer.state_dict()

        def with_entries(**entries: object) -> dict:
            return {**copy.deepcopy(good), **entries}

        fewer = copy.deepcopy(good["param_groups"])
        fewer[2]["params"].pop()
        bad = [
            ("state_dict is of type list", []),
            (r"state_dict is a dictionary with the keys \['weight'\]", {"weight": torch.ones(1)}),
            (
                r"of a torch.optim.sgd.SGD, but this optimizer is a torch.optim.adam.Adam",
                make_optimizer(models, torch.optim.SGD).state_dict(),
            ),
            (
                "has 2 parameter groups, but this optimizer has 3",
                with_entries(param_groups=good["param_groups"][:2]),
            ),
            (r"param_groups\[2\] of state_dict has 1 parameters, but .* 2", with_entries(param_groups=fewer)),
            (
                r"parameter 1 has shape \(5,\) in state_dict, but \(4,\)",
                with_entries(shapes=[(4, 4), (5,), (4, 4), (4,)]),
            ),
            ("shapes of 3 parameters, but this optimizer has 4", with_entries(shapes=good["shapes"][:3])),
            (r"state of \['9'\], which are in none", with_entries(state={9: {}})),
        ]
        for message, state_dict in bad:
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(state_dict)
        after = optimizer.state_dict()
        torch.testing.assert_close(after["state"], good["state"], rtol=0, atol=0)
        assert after["param_groups"] == good["param_groups"]

    three_workers[0].run(check)


class KeepsGlobalState(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: object = None) -> None:
        super().step()
        self.state["count"] = {"steps": 1}


def test_state_of_no_parameter_cannot_be_saved(three_workers):
    def check() -> None:
        models = spread(Layer, "worker1")
        optimizer = DistributedOptimizer(KeepsGlobalState, parameters_of(models), lr=0.1)
        train_step(models, optimizer, 0)
        with pytest.raises(TypeError, match="KeepsGlobalState keeps the state 'count'"):
            optimizer.state_dict()

    three_workers[0].run(check)


# A job that is killed.


def make_scheduler(optimizer: DistributedOptimizer) -> DistributedLRScheduler:
    warmup = DistributedLRScheduler(torch.optim.lr_scheduler.LinearLR, optimizer, 0.25, total_iters=3)
    decay = DistributedLRScheduler(torch.optim.lr_scheduler.ExponentialLR, optimizer, gamma=0.8)
    return DistributedLRScheduler(torch.optim.lr_scheduler.SequentialLR, optimizer, [warmup, decay], [3])


def train_job(owners: list[str], checkpoint: Path, epochs: range) -> list[tuple[float, list[float]]]:
    """Resumes from the checkpoint if there is one, saves after every epoch; returns losses and learning rates."""
    models = spread(Layer, *owners)
    optimizer = make_optimizer(models)
    scheduler = make_scheduler(optimizer)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for model, tensors in zip(models, saved["models"], strict=True):
            model.rpc_sync().resume(tensors)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    curve = []
    for epoch in epochs:
        rates = scheduler.get_last_lr()
        for step in range(3):
            loss = train_step(models, optimizer, epoch + step)
        curve.append((loss, rates))
        scheduler.step()
        torch.save(
            {
                "models": [model.rpc_sync().saved() for model in models],
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            checkpoint,
        )
    return curve


def start_job(workers: Workers) -> list[Worker]:
    """Starts three processes, of which the first is the trainer."""
    (workers.folder / "rendezvous").unlink(missing_ok=True)
    return workers.rpc(3)


@pytest.mark.parametrize("killed_after", [2, 5])  # in the warm-up, and in the decay
def test_a_killed_job_resumes_on_its_loss_curve(workers, tmp_path, killed_after):
    job = start_job(workers)
    names = [worker.name for worker in job]
    uninterrupted = job[0].run(train_job, [names[1], names[2], names[1]], tmp_path / "whole", range(EPOCHS))
    assert len({rate for _, rates in uninterrupted for rate in rates}) > EPOCHS

    part = tmp_path / "part"
    before = job[0].run(train_job, [names[1], names[2], names[1]], part, range(killed_after))
    for worker in job:
        worker.kill()

    job = start_job(workers)
    names = [worker.name for worker in job]
    # In other processes, with other names, and the parameters spread otherwise.
    after = job[0].run(train_job, [names[2], names[0], names[1]], part, range(killed_after, EPOCHS))
    assert before + after == uninterrupted
