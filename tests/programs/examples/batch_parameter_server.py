"""A parameter server that waits for the gradients of all trainers, steps once, and answers all of them.

Modelled on pytorch/examples, distributed/rpc/batch/parameter_server.py.
"""

import os
import threading

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution

TRAINERS, STEPS = 3, 6


class Server:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.lock = threading.Lock()
        self.future = torch.futures.Future()
        self.arrived = 0

    def fetch(self):
        return self.model

    @staticmethod
    @async_execution
    def update_and_fetch(server, gradients):
        self = server.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / TRAINERS
            future = self.future
            self.arrived += 1
            if self.arrived == TRAINERS:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.arrived, self.future = 0, torch.futures.Future()
                future.set_result(self.model)
        return future


def train(server, trainer):
    torch.manual_seed(100 + trainer)
    inputs = torch.randn(16, 6)
    targets = inputs.sum(1, keepdim=True).sin()
    model = server.rpc_sync().fetch()
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        model = rpc.rpc_sync(server.owner(), Server.update_and_fetch, args=(server, gradients))
        losses.append(loss.item())
    return losses


def main(rank):
    rpc.init_rpc(f"trainer{rank - 1}" if rank else "server", rank=rank, world_size=1 + TRAINERS)
    if rank == 0:
        server = rpc.RRef(Server())
        calls = [rpc.rpc_async(f"trainer{number}", train, args=(server, number)) for number in range(TRAINERS)]
        for number, losses in enumerate(torch.futures.wait_all(calls)):
            print(f"result trainer {number}", *(f"{loss:.6f}" for loss in losses), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=1 + TRAINERS)
