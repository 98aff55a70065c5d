"""Checks every engine on tensors of more than 2 GiB and more than 2**31 elements.

    python -m tests.c10d.huge [--engines shm gloo mpi] [--gib 2.2]
    mpiexec -n 2 python -m tests.c10d.huge                              # the MPI engine on this MPI

Two ranks need eight times as much memory as a tensor takes. All rows of a tensor differ, and so do those of the
ranks, so that missing, repeated and misplaced data is detected.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable

import gradwire.c10d
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
from gradwire import launch
from gradwire.c10d.engines.mpi.world import load_mpi, under_mpiexec
from gradwire.errors import UnsupportedOperationError
from torch import Tensor

GIB = 2**30

ROW = 2**20 + 7
"""Elements of a row. Odd, so that rows cross the boundaries of pieces."""

PATTERN = torch.arange(ROW, dtype=torch.int64).mul_(37).to(torch.uint8)

Operation = Callable[[int, int, int], bool]
"""Takes the number of elements, the rank and the other rank; returns whether the result is right."""


def row(number: int, rank: int) -> Tensor:
    """Returns a row of numbers below 64, whose sums fit into all dtypes."""
    return (PATTERN + (11 * number + 23 * rank) % 256) & 63


def filled(elements: int, rank: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Returns the tensor of a rank."""
    tensor = torch.empty(elements, dtype=dtype)
    for number, part in enumerate(tensor.split(ROW)):
        part.copy_(row(number, rank)[: len(part)])
    return tensor


def holds(tensor: Tensor, *ranks: int, first: int = 0) -> bool:
    """Returns whether a tensor is the sum of these ranks' tensors, from their row `first` on."""
    for number, part in enumerate(tensor.split(ROW), first):
        wanted = torch.stack([row(number, rank)[: len(part)] for rank in ranks]).sum(0, dtype=tensor.dtype)
        if not torch.equal(part, wanted):
            return False
    return True


def broadcast(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements, rank)
    dist.broadcast(tensor, 1)
    return holds(tensor, 1)


def send_and_recv(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements, rank)
    if rank == 0:
        dist.send(tensor, other)
    else:
        dist.recv(tensor, other)
    return holds(tensor, 0)


def all_reduce(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements, rank)
    dist.all_reduce(tensor)
    return holds(tensor, 0, 1)


def all_reduce_bfloat16(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements // 2, rank, torch.bfloat16)
    dist.all_reduce(tensor)
    return holds(tensor, 0, 1)


def reduce(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements, rank)
    dist.reduce(tensor, 1)
    return rank == 0 or holds(tensor, 0, 1)


def all_gather(elements: int, rank: int, other: int) -> bool:
    """Gathers tensors of half the size."""
    tensor = filled(elements // 2, rank)
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    return holds(parts[0], 0) and holds(parts[1], 1)


def all_gather_single(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements, rank)
    whole = tensor.new_empty(2 * elements)
    dist.all_gather_into_tensor(whole, tensor)
    return holds(whole[:elements], 0) and holds(whole[elements:], 1)


def gather(elements: int, rank: int, other: int) -> bool:
    tensor = filled(elements // 2, rank)
    parts = [torch.empty_like(tensor) for _ in range(2)] if rank == 0 else None
    dist.gather(tensor, parts, 0)
    return parts is None or (holds(parts[0], 0) and holds(parts[1], 1))


def scatter(elements: int, rank: int, other: int) -> bool:
    tensor = torch.empty(elements // 2, dtype=torch.uint8)
    parts = [filled(elements // 2, to) for to in range(2)] if rank == 1 else None
    dist.scatter(tensor, parts, 1)
    return holds(tensor, rank)


def reduce_scatter_float(elements: int, rank: int, other: int) -> bool:
    """Runs reduce_scatter_single with fewer and larger elements."""
    return reduce_scatter_single(elements // 4, rank, other, torch.float32)


def reduce_scatter_single(elements: int, rank: int, other: int, dtype: torch.dtype = torch.uint8) -> bool:
    """Reduces parts of half the size."""
    rows = elements // 2 // ROW
    whole = filled(2 * rows * ROW, rank, dtype)
    part = whole.new_empty(rows * ROW)
    dist.reduce_scatter_tensor(part, whole)
    return holds(part, 0, 1, first=rank * rows)


def all_to_all_single(elements: int, rank: int, other: int) -> bool:
    """Exchanges parts of half the size."""
    rows = elements // 2 // ROW
    whole = filled(2 * rows * ROW, rank)
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    parts = received.split(rows * ROW)
    return holds(parts[0], 0, first=rank * rows) and holds(parts[1], 1, first=rank * rows)


OPERATIONS: list[Operation] = [
    broadcast,
    send_and_recv,
    all_reduce,
    all_reduce_bfloat16,
    reduce,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter_single,
    reduce_scatter_float,
    all_to_all_single,
]


def work(rank: int, backend: str, gib: float, only: list[str]) -> None:
    """Runs the operations on one rank, and prints their outcomes."""
    torch.set_num_threads(1)
    gradwire.c10d.init_process_group(backend)
    rank, wrong = dist.get_rank(), 0
    may_refuse = under_mpiexec() and load_mpi().Get_version() < (4, 0)  # whose counts are too small
    for operation in OPERATIONS:
        if only and operation.__name__ not in only:
            continue
        began = time.monotonic()
        try:
            outcome = "ok" if operation(int(gib * GIB), rank, 1 - rank) else "WRONG"
        except UnsupportedOperationError as refusal:
            outcome = f"refused: {refusal}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:300]}"
        wrong += outcome != "ok" and not (may_refuse and outcome.startswith("refused"))
        print(
            f"{backend} {operation.__name__:24} rank {rank} {time.monotonic() - began:6.1f} s  {outcome}",
            flush=True,
        )
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


def main() -> None:
    """Runs all engines; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["shm", "gloo", "mpi"], help="(default: %(default)s)")
    parser.add_argument("--gib", type=float, default=2.2, help="size of a tensor (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="operations (default: all)")
    arguments = parser.parse_args()
    free = psutil.virtual_memory().available / GIB
    if free < 8 * arguments.gib:
        sys.exit(f"this needs {8 * arguments.gib:.0f} GiB of memory, but {free:.0f} GiB are free")
    if under_mpiexec():
        work(0, "gradwire_mpi", arguments.gib, arguments.only)
    failed = False
    for engine in arguments.engines:
        try:
            launch.spawn(work, 2, (f"gradwire_{engine}", arguments.gib, arguments.only))
        except torch.multiprocessing.ProcessExitedException:
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
