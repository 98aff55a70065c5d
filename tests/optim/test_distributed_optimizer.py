"""Optimizers over parameters on several workers."""

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import RemoteError, UnknownContextError, WorkerLostError
from gradwire.optim import DistributedOptimizer
from torch import nn

from tests import remote_functions
from tests.optim.models import (
    Layer,
    Matrix,
    Model,
    Table,
    assert_same_weights,
    local_step,
    parameters_of,
    spread,
    train_step,
)

OPTIMIZERS = [
    (torch.optim.ASGD, {"lr": 0.01, "t0": 2}, Layer),
    (torch.optim.Adadelta, {}, Layer),
    (torch.optim.Adafactor, {"lr": 0.01}, Layer),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, Layer),
    (torch.optim.Adagrad, {"lr": 0.1}, Table),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, Layer),
    (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}, Layer),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, Layer),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}, Layer),
    (torch.optim.Adamax, {"lr": 0.01}, Layer),
    (torch.optim.Muon, {"lr": 0.01}, Matrix),
    (torch.optim.NAdam, {"lr": 0.01}, Layer),
    (torch.optim.RAdam, {"lr": 0.01}, Layer),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}, Layer),
    (torch.optim.Rprop, {"lr": 0.01}, Layer),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, Layer),
    (torch.optim.SGD, {"lr": 0.1, "maximize": True}, Table),
    (torch.optim.SparseAdam, {"lr": 0.01}, Table),
]


def test_no_optimizer_of_torch_is_left_out():
    classes = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert classes - {torch.optim.Optimizer, torch.optim.LBFGS} == {kind for kind, _, _ in OPTIMIZERS}


@pytest.mark.parametrize(
    ("optimizer_class", "options", "kind"),
    OPTIMIZERS,
    ids=[f"{c.__name__}-{k.__name__}" for c, _, k in OPTIMIZERS],
)
def test_steps_equal_those_of_one_process(three_workers, optimizer_class, options, kind):
    def check() -> None:
        local = [kind(0), kind(1), kind(2)]
        models = spread(kind, "worker1", "worker2", "worker0")
        reference = optimizer_class([p for model in local for p in model.parameters()], **options)
        optimizer = DistributedOptimizer(optimizer_class, parameters_of(models), **options)
        for step in range(4):
            assert train_step(models, optimizer, step) == pytest.approx(local_step(local, reference, step))
            if step == 1:
                models[0].rpc_sync().relocate()
        assert_same_weights(models, local)

    three_workers[0].run(check)


def test_groups_spread_over_owners(three_workers):
    def check() -> None:
        local = [Layer(0), Layer(1)]
        models = spread(Layer, "worker1", "worker2")
        weights, biases = zip(*(model.rpc_sync().parameter_rrefs() for model in models), strict=True)
        optimizer = DistributedOptimizer(
            torch.optim.SGD,
            [
                {"params": weights, "lr": 0.2, "name": "weights"},
                {"params": []},
                {"params": biases[1], "momentum": 0.5},
                {"params": iter(biases[:1]), "weight_decay": 0.1, "lr": 0.0},
            ],
            0.05,
            momentum=0.9,
        )
        reference = torch.optim.SGD(
            [
                {"params": [layer.linear.weight for layer in local], "lr": 0.2, "name": "weights"},
                {"params": []},
                {"params": local[1].linear.bias, "momentum": 0.5},
                {"params": local[0].linear.bias, "weight_decay": 0.1, "lr": 0.0},
            ],
            0.05,
            momentum=0.9,
        )
        for step in range(4):
            train_step(models, optimizer, step)
            local_step(local, reference, step)
            if step == 1:
                optimizer.param_groups[3]["lr"] = reference.param_groups[3]["lr"] = 0.3
            if step == 2:
                optimizer.param_groups[3]["lr"] = reference.param_groups[3]["lr"] = 0.0
        assert_same_weights(models, local)
        assert [group["params"] for group in optimizer.param_groups] == [
            list(weights),
            [],
            [biases[1]],
            [biases[0]],
        ]
        for ours, torchs in zip(optimizer.param_groups, reference.param_groups, strict=True):
            assert {**ours, "params": None} == {**torchs, "params": None}

    three_workers[0].run(check)


def run_steps(models: list[rpc.RRef], steps: int) -> float:
    """Trains with an optimizer of this worker's own; returns the last loss."""
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters_of(models), lr=0.02, momentum=0.5)
    return [train_step(models, optimizer, 0) for _ in range(steps)][-1]


def test_several_trainers_share_parameters(three_workers):
    def check() -> None:
        models = spread(Layer, "worker1", "worker2")
        first = run_steps(models, 1)
        trainers = [rpc.rpc_async(f"worker{i % 3}", run_steps, (models, 25)) for i in range(4)]
        losses = [trainer.wait() for trainer in trainers]
        print(first, losses)
        assert all(loss < first / 4 for loss in losses)

    three_workers[0].run(check)


def forward_on_both(used: rpc.RRef, unused: rpc.RRef) -> torch.Tensor:
    return used.rpc_sync().forward(torch.ones(1, 4)).sum()


def test_parameters_without_a_gradient_stay(three_workers):
    def check() -> None:
        used, unused = spread(Layer, "worker1", "worker2")
        frozen = rpc.remote("worker2", torch.ones, (3,))
        optimizer = DistributedOptimizer(
            torch.optim.SGD, [*parameters_of([used, unused]), frozen], lr=1.0, weight_decay=1.0
        )
        before = used.rpc_sync().weights(), unused.rpc_sync().weights()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker2", forward_on_both, (used, unused))])
            optimizer.step(context_id)
        torch.testing.assert_close(unused.rpc_sync().weights(), before[1], rtol=0, atol=0)
        assert torch.equal(frozen.to_here(), torch.ones(3))
        assert not torch.equal(used.rpc_sync().weights()[0], before[0][0])

    three_workers[0].run(check)


class Owned(Model):
    """Makes references that an optimizer refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Parameter(torch.ones(3))

    def bad_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(self.leaf), rpc.RRef(self.leaf * 2), rpc.RRef("a string"), rpc.RRef(self.leaf)]


def test_bad_arguments(three_workers):
    def check() -> None:
        leaf, result, text, again = rpc.remote("worker1", Owned).rpc_sync().bad_rrefs()
        sgd = torch.optim.SGD
        bad = [
            (TypeError, "optimizer_class is <class '.*Linear'>", nn.Linear, [leaf], {}),
            (ValueError, "optimizer_class is LBFGS, .* closure", torch.optim.LBFGS, [leaf], {}),
            (TypeError, r"params_rref\[1\] is of type Tensor", sgd, [leaf, torch.ones(3)], {}),
            (TypeError, r"params_rref\[1\] is of type dict", sgd, [leaf, {"params": [again]}], {}),
            (TypeError, r"params_rref\[1\] is of type RRef, but .* group", sgd, [{"params": [leaf]}, again], {}),
            (TypeError, r"params_rref is of type RRef", sgd, leaf, {}),
            (TypeError, r"params_rref is of type set", sgd, {leaf}, {}),
            (ValueError, r'params_rref\[0\] has no "params"', sgd, [{"lr": 1.0}], {}),
            (TypeError, r'params_rref\[0\]\["params"\]\[0\] is of type int', sgd, [{"params": [1]}], {}),
            (TypeError, r'params_rref\[0\]\["params"\] is of type Tensor', sgd, [{"params": torch.ones(3)}], {}),
            (ValueError, "params_rref is empty", sgd, [], {}),
            (ValueError, "params_rref is empty", sgd, [{"params": []}], {}),
            (ValueError, r"params_rref\[1\] on worker 'worker1' is the result of", sgd, [leaf, result], {}),
            (ValueError, r"params_rref\[0\] on worker 'worker1' is of type str", sgd, [text], {}),
            (ValueError, r"\[1\] on worker 'worker1' is the same .* params_rref\[0\]", sgd, [leaf, again], {}),
            (
                ValueError,
                r'\[1\]\["params"\]\[0\] on worker .* same .* params_rref\[0\]\["params"\]:',
                sgd,
                [{"params": leaf}, {"params": [again]}],
                {},
            ),
            (TypeError, "unexpected keyword argument 'rate'", sgd, [leaf], {"rate": 1}),
            (ValueError, "Invalid learning rate: -1", sgd, [leaf], {"lr": -1}),
            (ValueError, "Invalid learning rate: -2", sgd, [{"params": leaf, "lr": -2}], {"lr": 1}),
            (ValueError, "Muon", torch.optim.Muon, [leaf], {}),
        ]
        for error, message, optimizer_class, params, options in bad:
            with pytest.raises(error, match=message):
                DistributedOptimizer(optimizer_class, params, **options)
        with pytest.raises(ValueError, match="learning rate") as caught:
            DistributedOptimizer(sgd, [{"params": leaf, "lr": -2}])
        notes = "\n".join(caught.value.__notes__)
        assert "params_rref[0]" in notes
        assert "'worker1'" in notes

    three_workers[0].run(check)


def test_bad_steps(three_workers):
    def check() -> None:
        dense, sparse = rpc.remote("worker1", Layer, (0,)), rpc.remote("worker2", Table, (1,))
        optimizer = DistributedOptimizer(torch.optim.SparseAdam, parameters_of([sparse, dense]))
        before = sparse.rpc_sync().weights()
        with pytest.raises(RuntimeError, match="does not support dense gradients") as caught:
            train_step([sparse, dense], optimizer, 0)
        assert "the step failed on worker 'worker1'" in "\n".join(caught.value.__notes__)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert not torch.equal(sparse.rpc_sync().weights()[0], before[0])  # the others have made their step
        with pytest.raises(UnknownContextError):
            optimizer.step(99)

    three_workers[0].run(check)


def test_a_lost_owner_does_not_keep_the_others_from_their_step(workers):
    trainer, _, lost = workers.rpc(3)

    def prepare() -> None:
        models = spread(Layer, "worker1", "worker2")
        remote_functions.kept.append(
            (models, DistributedOptimizer(torch.optim.SGD, parameters_of(models), lr=1.0))
        )

    def check() -> None:
        models, optimizer = remote_functions.kept.pop()
        before = models[0].rpc_sync().weights()
        for _ in range(2):  # first the step notices the loss, then it is known
            with pytest.raises(WorkerLostError) as caught:
                train_step(models[:1], optimizer, 0)
            assert caught.value.worker == "worker2"
            assert "the step failed on worker 'worker2'" in caught.value.__notes__
            after = models[0].rpc_sync().weights()
            assert not torch.equal(before[0], after[0])
            before = after
        with pytest.raises(WorkerLostError, match="worker2"):
            optimizer.state_dict()
        with pytest.raises(WorkerLostError, match="worker2"):
            DistributedOptimizer(
                torch.optim.SGD, parameters_of(models[:1]) + optimizer.param_groups[0]["params"][2:]
            )

    trainer.run(prepare)
    lost.kill()
    trainer.run(check)
