"""PyG's LocalFeatureStore: each of three workers looks up features of nodes that are on all of them.

PyG's own distributed loaders also need pyg-lib, which is not on PyPI.
"""

import os

import torch
import torch.multiprocessing as mp
from torch_geometric.distributed import LocalFeatureStore
from torch_geometric.distributed.dist_context import DistContext, DistRole
from torch_geometric.distributed.rpc import (
    RPCRouter,
    global_barrier,
    init_rpc,
    rpc_partition_to_workers,
    shutdown_rpc,
)

PARTS, NODES, WIDTH = 3, 30, 4


def main(rank):
    context = DistContext(
        rank=rank,
        global_rank=rank,
        world_size=PARTS,
        global_world_size=PARTS,
        group_name="pyg",
        role=DistRole.WORKER,
    )
    init_rpc(context, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    mine = torch.arange(rank, NODES, PARTS)
    features = torch.arange(NODES * WIDTH, dtype=torch.float32).view(NODES, WIDTH)
    store = LocalFeatureStore.from_data(node_id=mine, x=features[mine])
    store.num_partitions, store.partition_idx, store.meta = PARTS, rank, {"is_hetero": False}
    store.node_feat_pb = torch.arange(NODES) % PARTS
    store.set_rpc_router(RPCRouter(rpc_partition_to_workers(context, PARTS, rank)))
    global_barrier()  # all answer now
    for size in (5, 12):
        wanted = torch.randperm(NODES, generator=torch.Generator().manual_seed(size + rank))[:size]
        found = store.lookup_features(wanted).wait()
        assert torch.equal(found, features[wanted])
        print(f"result worker {rank} found {size} rows with sum {found.sum().item()}", flush=True)
    shutdown_rpc()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=PARTS)
