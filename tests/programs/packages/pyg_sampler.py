"""PyG's DistNeighborSampler: two workers sample around nodes, each of which is on one of them, and fetch features.

PyG takes the sampling on one worker from pyg-lib, which is not on PyPI. Here, functions that take all neighbours
replace it; the communication between workers is PyG's.
"""

import os

import torch
import torch.multiprocessing as mp
from torch_geometric.distributed import DistNeighborSampler, LocalFeatureStore, LocalGraphStore
from torch_geometric.distributed.dist_context import DistContext, DistRole
from torch_geometric.distributed.rpc import global_barrier, init_rpc, shutdown_rpc
from torch_geometric.sampler import NodeSamplerInput

PARTS, NODES = 2, 24


def all_neighbours(colptr, row, seed, *_options):
    """Returns the nodes, seeds first; the edges to the others; and the offset of each seed's neighbours."""
    edges = [torch.arange(colptr[node], colptr[node + 1]) for node in seed.tolist()]
    ends = torch.tensor([len(seed), *map(len, edges)]).cumsum(0)
    chosen = torch.cat(edges)
    return torch.cat([seed, row[chosen]]), chosen, ends.tolist()


def merge(nodes, edges, ends, parts, orders, *_options):
    """Merges the results of several workers, in the order of the requested nodes."""
    found = [(part, *ends[part][order : order + 2]) for part, order in zip(parts, orders, strict=True)]
    return (
        torch.cat([nodes[part][begin:end] for part, begin, end in found]),
        torch.cat([edges[part][begin - ends[part][0] : end - ends[part][0]] for part, begin, end in found]),
        None,
        [end - begin for _, begin, end in found],
    )


def relabel(seed, neighbours, counts, *_options):
    """Relabels the nodes of the edges in the order of their first occurrence."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys([*seed.tolist(), *neighbours.tolist()]))}
    rows = [numbers[node] for node in neighbours.tolist()]
    columns = [number for number, count in enumerate(counts) for _ in range(count)]
    return torch.tensor(rows), torch.tensor(columns)


torch.ops.pyg.dist_neighbor_sample = all_neighbours
torch.ops.pyg.merge_sampler_outputs = merge
torch.ops.pyg.relabel_neighborhood = relabel


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
    node = torch.arange(NODES)
    sources, targets = torch.cat([node.roll(1), node.roll(5)]), torch.cat([node, node])
    mine = (targets % PARTS == rank).nonzero().flatten()
    graph = LocalGraphStore.from_data(
        edge_id=mine, edge_index=torch.stack([sources, targets])[:, mine], num_nodes=NODES, is_sorted=False
    )
    features = LocalFeatureStore.from_data(node_id=node[rank::PARTS], x=10.0 * node[rank::PARTS].view(-1, 1))
    for store in (features, graph):
        store.num_partitions, store.partition_idx = PARTS, rank
        store.meta = {"is_hetero": False, "num_parts": PARTS}
    graph.node_pb = features.node_feat_pb = node % PARTS
    sampler = DistNeighborSampler(context, (features, graph), num_neighbors=[-1, -1])
    sampler.init_sampler_instance()
    sampler.register_sampler_rpc()
    sampler.init_event_loop()
    global_barrier()  # all answer now
    for start in (0, 7):
        seed = torch.tensor([start + rank, start + rank + 5])
        found = sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=seed))
        fetched = found.metadata[3]
        assert torch.equal(fetched, 10.0 * found.node.view(-1, 1))
        edges = [f"{row}-{column}" for row, column in zip(found.row.tolist(), found.col.tolist(), strict=True)]
        print("result worker", rank, "found", *found.node.tolist(), "edges", *edges, flush=True)
    global_barrier()
    shutdown_rpc()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=PARTS)
