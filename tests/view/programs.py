"""The programs that run while tests look at them: workers at a parameter server, and one that is late."""

import contextlib
import threading
from collections import Counter

import torch
import torch.distributed as dist
from gradwire import autograd, rpc
from gradwire.autograd.extension import Autograd
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rref.forks import References
from gradwire.view.page import Page
from gradwire.view.statistics import CallStatistics

from tests.remote_functions import wait_for

kept: list[object] = []
"""What keeps references and contexts of this worker until `release`."""


def url():
    return current_agent().extension(Page).server.url


class ParameterServer:
    def __init__(self, size):
        self.weight = torch.ones(size, requires_grad=True)
        self.lock = threading.Lock()
        self.steps = 0

    def forward(self, scale):
        return self.weight * scale

    def step(self, context):
        gradient = autograd.get_gradients(context)[self.weight]
        with self.lock, torch.no_grad():
            self.steps += 1
            self.weight -= 1e-6 * gradient
        return self.steps


def train(rounds, size):
    """Trains with the parameters of worker0. Keeps the reference to them, and the context of the last round."""
    server = rpc.remote("worker0", ParameterServer, (size,))
    for number in range(rounds):
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(autograd.context())
            autograd.backward(context, [server.rpc_sync().forward(2.0).sum()])
            server.rpc_sync().step(context)
            if number == rounds - 1:
                kept.extend([server, stack.pop_all()])


def release():
    kept[-1].close()  # type: ignore[attr-defined] # the contexts
    kept.clear()


def counts():
    """Returns what this worker itself counts: calls by function and worker, references, and contexts."""
    agent = current_agent()
    calls = {(each["worker"], each["function"]): each["count"] for each in agent.extension(CallStatistics).sent()}
    info = agent.debug_info()
    held = Counter(fork.owner.name for fork in agent.extension(References).forks.copy())
    contexts = {str(each.id) for each in agent.extension(Autograd).contexts.all()}
    return {"calls": calls, "values": info["num_owner_rrefs"], "held": dict(held), "contexts": contexts}


def enter_barrier(names):
    rpc.barrier(names)


def load_batch():
    """Is late, as one that reads from a slow disk."""
    return wait_for("go on")


def be_late(names):
    load_batch()
    enter_barrier(names)


def form_group(path, rank, size):
    dist.init_process_group("gradwire_shm", rank=rank, world_size=size, store=dist.FileStore(path, size))
    dist.all_reduce(torch.ones(1))


def reduce_gradients():
    dist.all_reduce(torch.ones(1000))
