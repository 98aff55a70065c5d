"""graphlearn-torch's RPC layer: roles, routing of data partitions, callees, and servers that clients call.

Importing the whole package needs CUDA (see graphlearn_import.py). This layer does not, so its modules are
imported without what is beside them.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

import torch
import torch.multiprocessing as mp

ROOT = Path(importlib.util.find_spec("graphlearn_torch").origin).parent
for name, folder in (("graphlearn_torch", ROOT), ("graphlearn_torch.distributed", ROOT / "distributed")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]

from graphlearn_torch.distributed import dist_context  # noqa: E402
from graphlearn_torch.distributed import rpc as glt  # noqa: E402

WORKERS, ROWS = 3, 24


class Rows(glt.RpcCalleeBase):
    """The rows of a table that are on this worker."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def call(self, rows):
        assert (rows % WORKERS == self.rank).all()
        return rows.unsqueeze(1) * torch.tensor([1.0, 10.0])


def report(*words):
    print("result", *words, flush=True)


def collocated(rank, address, port):
    """Runs a group in which every process is a worker with a partition of the data."""
    dist_context.init_worker_group(WORKERS, rank, "together")
    glt.init_rpc(address, port, num_rpc_threads=4)
    router = glt.RpcDataPartitionRouter(glt.rpc_sync_data_partitions(WORKERS, rank))
    callee = glt.rpc_register(Rows(rank))
    wanted = torch.arange(ROWS).roll(rank)
    calls = []
    for part in range(WORKERS):
        rows = wanted[wanted % WORKERS == part]
        calls.append(glt.rpc_request_async(router.get_to_worker(part), callee, args=(rows,)))
    total = sum(call.wait().sum().item() for call in calls)
    gathered = glt.all_gather(rank * rank)
    report("worker", rank, "total", total, "gathered", sum(gathered.values()))
    glt.barrier()
    glt.shutdown_rpc()


def double(rows):
    return 2 * rows


def serving(rank, address, port):
    """Runs two servers and a client that calls them."""
    if rank < 2:
        dist_context._set_server_context(2, rank, "servers", 1)
    else:
        dist_context._set_client_context(2, 1, 0, "clients")
    glt.init_rpc(address, port, num_rpc_threads=4)
    if rank == 2:
        for server in range(2):
            doubled = glt.rpc_global_request(
                dist_context.DistRole.SERVER, server, double, (torch.ones(3 + server),)
            )
            report("server", server, "doubled to", doubled.sum().item())
        report("names", *sorted(name for names in glt.get_rpc_worker_names().values() for name in names))
    glt.global_barrier()
    glt.shutdown_rpc()


if __name__ == "__main__":
    address = os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.setdefault("MASTER_PORT", "29500"))
    mp.spawn(collocated, args=(address, port), nprocs=WORKERS)
    mp.spawn(serving, args=(address, port), nprocs=WORKERS)
