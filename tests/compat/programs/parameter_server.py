"""A program for torch.distributed.rpc: two trainers share the parameters of a server."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from tests.ports import free_port

WORLD_SIZE = 4
SERVER = "ps"
TRAINERS = ("trainer1", "trainer2")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class ParameterServer:
    """Has a tower for each trainer, and averages the reports of all trainers."""

    def __init__(self) -> None:
        self.towers = {name: make_model() for name in TRAINERS}
        self.lock = threading.Lock()
        self.average = torch.zeros(4)
        self.reports: list[torch.Tensor] = []
        self.answer: torch.futures.Future = torch.futures.Future()

    def forward(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return self.towers[name](inputs)

    def parameters(self, name: str) -> list[RRef]:
        return [RRef(parameter) for parameter in self.towers[name].parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def report(server: RRef, value: torch.Tensor) -> torch.futures.Future:
        """Returns a future of the average, which is done when all trainers have reported."""
        self = server.local_value()
        with self.lock:
            self.reports.append(value)
            answer = self.answer
            if len(self.reports) == len(TRAINERS):
                self.average = torch.stack(self.reports).mean(0)
                self.reports, self.answer = [], torch.futures.Future()
                answer.set_result(self.average)
        return answer


def train(server: RRef, name: str) -> float:
    """Trains some steps on random data; runs on a trainer."""
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameters(name), lr=0.05)
    loss = torch.zeros(())
    for _ in range(5):
        inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
        with dist_autograd.context() as context_id:
            outputs = server.rpc_sync().forward(name, inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        rpc.rpc_sync(SERVER, ParameterServer.report, (server, outputs.detach().mean(0)))
    return loss.item()


def main(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    name = "master" if rank == 0 else SERVER if rank == 1 else TRAINERS[rank - 2]
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60, _transports=["shm", "uv"])
    rpc.init_rpc(name, rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    if rank == 0:
        server = rpc.remote(SERVER, ParameterServer)
        losses = [rpc.rpc_async(name, train, (server, name)) for name in TRAINERS]
        print("trained", len([future.wait() for future in losses]), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(main, args=(free_port(),), nprocs=WORLD_SIZE)
