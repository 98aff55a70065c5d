"""DDP goes on in the same processes after a rank was killed, and after another has joined."""

import gc
import os
import signal
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.errors import RankLostError
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.c10d.groups.test_reconfigure import members, opened, port  # noqa: F401 - fixtures
from tests.c10d.members import everywhere

LEARNING_RATE, MOMENTUM = 0.1, 0.9
WIDTH = 8


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def start_training() -> None:
    model = network()
    opened.update(network=model, optimizer=optimizer_of(model), step=0, losses=[])


def synchronize() -> None:
    """Copies step, model and optimizer from a rank that has come furthest, and wraps the model in DDP anew."""
    steps = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([opened["step"]]))
    furthest = max(range(len(steps)), key=lambda rank: steps[rank].item())
    model, optimizer = opened["network"], opened["optimizer"]
    state = [opened["step"], model.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(state, furthest)
    opened["step"] = state[0]
    model.load_state_dict(state[1])
    optimizer.load_state_dict(state[2])
    opened["ddp"] = DistributedDataParallel(model)


def train(until: int) -> None:
    """Trains until a step. When a rank is lost, forms the group anew and repeats the step."""
    while opened["step"] < until:
        step, rank, size = opened["step"], dist.get_rank(), dist.get_world_size()
        inputs, targets = batch(step, rank)
        try:
            opened["optimizer"].zero_grad()
            loss = mse_loss(opened["ddp"](inputs), targets)
            loss.backward()
        except RuntimeError:  # torch's C++ passes on only the text of an error in DDP's collectives
            if not isinstance(dist.group.WORLD.failure, RankLostError):
                raise
            del opened["ddp"]
            gc.collect()
            c10d.reconfigure(timeout=30)
            synchronize()
            continue
        opened["optimizer"].step()
        opened["losses"].append((step, rank, size, loss.item()))
        opened["step"] += 1


def grow(size: int) -> None:
    c10d.reconfigure(min_size=size, timeout=30)
    synchronize()


def result() -> tuple[list[tuple[int, int, int, float]], list[Tensor], int]:
    return opened["losses"], [each.detach() for each in opened["network"].parameters()], os.getpid()


def reference(sizes: Sequence[int]) -> tuple[dict[tuple[int, int], float], list[Tensor]]:
    """Trains in one process, with the mean gradient of as many batches in each step as there are ranks.

    Returns the losses by step and rank, and the parameters.
    """
    model = network()
    optimizer = optimizer_of(model)
    losses = {}
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for rank in range(size):
            inputs, targets = batch(step, rank)
            loss = mse_loss(model(inputs), targets)
            (loss / size).backward()
            losses[step, rank] = loss.item()
        optimizer.step()
    return losses, [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_ddp_goes_on_with_three_of_four_ranks_and_then_with_four(members, backend):  # noqa: F811
    ranks = members(4, backend)
    pids = [each.pid for each in ranks]
    everywhere(ranks, start_training)
    everywhere(ranks, synchronize)
    everywhere(ranks, train, 3)
    killed = ranks.pop(1)
    pending = [each.start(train, 6) for each in ranks]  # their third step waits for the killed rank
    os.kill(killed.pid, signal.SIGKILL)
    for each in pending:
        each.result()
    ranks += members(1, backend, has_ranks=False)
    ranks[-1].run(start_training)
    everywhere(ranks, grow, 4)
    everywhere(ranks, train, 9)

    sizes = [4] * 3 + [3] * 3 + [4] * 3
    losses, parameters = reference(sizes)
    for new_rank, (seen, trained, pid) in enumerate(everywhere(ranks, result)):
        assert pid in pids or new_rank == 3  # the survivors were not restarted
        assert [(step, size) for step, _, size, _ in seen] == list(enumerate(sizes))[6 if new_rank == 3 else 0 :]
        for step, rank, _, loss in seen:
            assert loss == pytest.approx(losses[step, rank], rel=1e-5)
        for mine, theirs in zip(trained, parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
