"""Small trainings with what torch builds on process groups. Each returns tensors that do not depend on the engine.

A default group must be there; the same function runs on torch's own Gloo for comparison.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8
STEPS = 3

TRAININGS: dict[str, Callable[[], list[Tensor]]] = {}


def training(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    TRAININGS[function.__name__] = function
    return function


def run(name: str) -> list[Tensor]:
    """Runs a training by name."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its own functions
        return TRAININGS[name]()


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None = None) -> list[Tensor]:
    """Trains a model, and returns the losses."""
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, dist.get_rank() if rank is None else rank)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@training
def ddp() -> list[Tensor]:
    model = DistributedDataParallel(network())
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return parameters(model)


def ddp_compiled() -> list[Tensor]:
    """Runs `ddp` with torch.compile, whose program does not include the broadcasts of DDP's C++."""
    model = DistributedDataParallel(network())
    steps(torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.1))
    return parameters(model)


@training
def ddp_fp16() -> list[Tensor]:
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return parameters(model)


@training
def ddp_power_sgd() -> list[Tensor]:
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return parameters(model)


@training
def ddp_sparse() -> list[Tensor]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.EmbeddingBag(20, WIDTH, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = torch.arange(4 * (1 + dist.get_rank())).view(-1, 4) + step
        model(words).pow(2).sum().backward()
        optimizer.step()
    return parameters(model)


@training
def fsdp2() -> list[Tensor]:
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps(model, torch.optim.Adam(model.parameters(), lr=0.01))
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@training
def dtensor() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(64.0).view(8, 8)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    partial = (columns @ rows).redistribute(mesh, [Replicate()])
    return [
        columns.to_local(),
        columns.redistribute(mesh, [Replicate()]).to_local(),
        product.full_tensor(),
        partial.to_local(),
    ]


@training
def tensor_parallel() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank=0)
    return [*losses, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def _pipeline(schedule: type) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    plan = schedule(stage, n_microbatches=4, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = batch(step, 0)
        optimizer.zero_grad()
        if rank == 0:
            plan.step(inputs)
        elif rank == size - 1:
            plan.step(target=targets, losses=[])
        else:
            plan.step()
        optimizer.step()
    return parameters(layer)


@training
def pipeline_gpipe() -> list[Tensor]:
    return _pipeline(ScheduleGPipe)


@training
def pipeline_1f1b() -> list[Tensor]:
    return _pipeline(Schedule1F1B)


@training
def zero() -> list[Tensor]:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    steps(model, optimizer)
    return parameters(model)


@training
def post_local_sgd() -> list[Tensor]:
    model = DistributedDataParallel(network())
    pair, _ = dist.new_subgroups(group_size=2)
    state = post_localSGD_hook.PostLocalSGDState(None, pair, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    steps(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))
    return parameters(model)


@training
def functional_collectives() -> list[Tensor]:
    world = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0 * size).view(size, 2) + rank
    leaf = mine.clone().requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, world)
    (gathered * gathered).sum().backward()
    results = [
        functional.all_reduce(mine, "avg", world),
        functional.broadcast(mine, 1, world),
        functional.all_gather_tensor(mine, 1, world),
        functional.reduce_scatter_tensor(mine, "sum", 0, world),
        functional.all_to_all_single(mine, None, None, world),
        *functional.all_reduce_coalesced([mine, mine + 1], "max", world),
        *functional.all_gather_into_tensor_coalesced([mine, mine * 2], world),
        *functional.reduce_scatter_tensor_coalesced([mine, mine * 2], "sum", [0, 0], world),
    ]
    return [*(functional.wait_tensor(each) for each in results), leaf.grad]


@training
def checkpoint() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(network(), mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = make()
    steps(model, optimizer)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    again, optimizer = make()
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    again.load_state_dict(state["model"])
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder[0]).rglob("*"):
            path.unlink()
        Path(folder[0]).rmdir()
    steps(again, optimizer)
    return [parameter.full_tensor().detach() for parameter in again.parameters()]
