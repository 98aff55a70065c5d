"""PyG's DistNeighborSampler, which samples neighbours of nodes on the workers that have them."""

import os

import torch
import torch.multiprocessing as mp
from torch_geometric.distributed import DistNeighborSampler, LocalFeatureStore, LocalGraphStore
from torch_geometric.distributed.dist_context import DistContext, DistRole
from torch_geometric.distributed.rpc import init_rpc, shutdown_rpc
from torch_geometric.sampler import NodeSamplerInput

PARTS, NODES = 2, 10


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
    ring = torch.stack([torch.arange(NODES), torch.arange(NODES).roll(1)])
    mine = (ring[1] % PARTS == rank).nonzero().flatten()
    features = LocalFeatureStore.from_data(node_id=torch.arange(NODES), x=torch.arange(NODES).view(-1, 1))
    graph = LocalGraphStore.from_data(edge_id=mine, edge_index=ring[:, mine], num_nodes=NODES, is_sorted=False)
    for store in (features, graph):
        store.num_partitions, store.partition_idx = PARTS, rank
        store.meta = {"is_hetero": False, "num_parts": PARTS}
    graph.node_pb = features.node_feat_pb = torch.arange(NODES) % PARTS
    sampler = DistNeighborSampler(context, (features, graph), num_neighbors=[-1, -1])
    sampler.init_sampler_instance()
    sampler.register_sampler_rpc()
    sampler.init_event_loop()
    found = sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.tensor([rank])))
    print("result worker", rank, found.x.flatten().sort().values.tolist(), flush=True)
    shutdown_rpc()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=PARTS)
