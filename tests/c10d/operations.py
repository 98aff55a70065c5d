"""Every operation of torch.distributed on every dtype, checked against a plain computation.

    python -m tests.c10d.operations [--engines shm gloo mpi] [--ranks 2 4]      # prints the table
    mpiexec -n 2 python -m tests.c10d.operations                                # the MPI engine on this MPI

A cell of the table is the outcome of one operation with one dtype on one engine: `ok`, `refused` (an error on all
ranks before anything was sent), or what is wrong. `expected_refusal` says which operations must be refused, and
why.
"""

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradwire.c10d
import torch
import torch.distributed as dist
import torch.multiprocessing
from gradwire import launch
from gradwire.c10d.engines.mpi.world import under_mpiexec
from torch import Tensor
from torch.distributed import ReduceOp

ENGINES = ["shm", "gloo", "mpi"]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]

DTYPES_OF_EACH_KIND = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
]
"""Those with which the tests make do; `make operations` has all."""

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda values: values,
    "matrix": lambda values: values.view(3, 4),
    "strided": lambda values: values.view(3, 4).t(),
    "spread": lambda values: values[::2],
    "scalar": lambda values: values[0],
    "empty": lambda values: values[:0],
}
"""Tensors of different shapes and strides, made of twelve values."""


class WrongError(AssertionError):
    """A result is wrong."""


@dataclass
class Case:
    """The parameters of one run of an operation on one rank."""

    rank: int
    size: int
    dtype: torch.dtype
    shape: str
    asynchronous: bool
    group: dist.ProcessGroup

    @property
    def ranks(self) -> range:
        return range(self.size)

    def values(self, *numbers: int) -> Tensor:
        """Returns twelve values that depend on these numbers: small integers that every dtype can represent."""
        start = 1 + sum((i + 1) * number for i, number in enumerate(numbers))
        whole = [(start + i) % 3 for i in range(12)]
        if self.dtype == torch.float8_e8m0fnu:  # powers of two
            return torch.tensor([2.0**value for value in whole]).to(self.dtype)
        if self.dtype.is_complex:
            parts = torch.tensor([complex(value, (value + 1) % 3) for value in whole], dtype=torch.complex64)
            return parts.to(self.dtype)
        return torch.tensor(whole).to(self.dtype)

    def tensor(self, *numbers: int) -> Tensor:
        return SHAPES[self.shape](self.values(*numbers))

    def blank(self) -> Tensor:
        """Returns a tensor of the same shape and strides, with other values."""
        return SHAPES[self.shape](torch.zeros(12).to(self.dtype))

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Calls a collective, and waits if it is asynchronous."""
        work = function(*arguments, group=self.group, async_op=self.asynchronous, **options)
        if self.asynchronous:
            work.get_future().wait()
            waited = work.wait()
            if torch.get_default_device().type == "cuda":
                torch.cuda.current_stream().synchronize()  # only the stream has waited
            if not waited or not work.is_completed():
                raise WrongError("the work is not completed after wait")

    def same(self, got: Tensor, wanted: Tensor, what: str = "result") -> None:
        if got.dtype != wanted.dtype or got.shape != wanted.shape or not torch.equal(_plain(got), _plain(wanted)):
            raise WrongError(f"{what} on rank {self.rank}: {_plain(got).tolist()}, not {_plain(wanted).tolist()}")

    def reduced(self, op: ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the reduction of these tensors, computed in the widest dtype of torch."""
        stacked = torch.stack([_plain(tensor) for tensor in tensors])
        if op == ReduceOp.SUM:
            result = stacked.sum(0)
        elif op == ReduceOp.AVG:
            total = stacked.sum(0)
            exact = stacked.is_floating_point() or stacked.is_complex()
            result = total / len(tensors) if exact else total.div(len(tensors), rounding_mode="trunc")
        elif op == ReduceOp.PRODUCT:
            result = stacked.prod(0)
        elif op == ReduceOp.MIN:
            result = stacked.amin(0)
        elif op == ReduceOp.MAX:
            result = stacked.amax(0)
        else:
            bits = {
                ReduceOp.BAND: torch.bitwise_and,
                ReduceOp.BOR: torch.bitwise_or,
                ReduceOp.BXOR: torch.bitwise_xor,
            }
            result = stacked[0]
            for tensor in stacked[1:]:
                result = bits[op.op if hasattr(op, "op") else op](result, tensor)
        return result.to(self.dtype)


def _plain(tensor: Tensor) -> Tensor:
    """Returns the same numbers in a dtype that torch computes with."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    return tensor.to(torch.int64)


Operation = Callable[[Case], None]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


@operation
def broadcast(case: Case) -> None:
    for root in case.ranks:
        tensor = case.tensor(root) if case.rank == root else case.blank()
        case.call(dist.broadcast, tensor, root)
        case.same(tensor, case.tensor(root))


def _reduction(name: str) -> None:
    op = getattr(ReduceOp, name)

    def all_reduce(case: Case) -> None:
        tensor = case.tensor(case.rank)
        case.call(dist.all_reduce, tensor, op)
        case.same(tensor, case.reduced(op, [case.tensor(rank) for rank in case.ranks]))

    def reduce(case: Case) -> None:
        for root in case.ranks:
            tensor = case.tensor(case.rank)
            case.call(dist.reduce, tensor, root, op)
            if case.rank == root:
                case.same(tensor, case.reduced(op, [case.tensor(rank) for rank in case.ranks]))

    def reduce_scatter(case: Case) -> None:
        output = case.blank()
        case.call(dist.reduce_scatter, output, [case.tensor(case.rank, to) for to in case.ranks], op)
        case.same(output, case.reduced(op, [case.tensor(rank, case.rank) for rank in case.ranks]))

    for each in (all_reduce, reduce, reduce_scatter):
        OPERATIONS[f"{each.__name__} {name}"] = each


for _name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
    _reduction(_name)


@operation
def all_gather(case: Case) -> None:
    outputs = [case.blank() for _ in case.ranks]
    case.call(dist.all_gather, outputs, case.tensor(case.rank))
    for rank, output in enumerate(outputs):
        case.same(output, case.tensor(rank))


@operation
def all_gather_uneven(case: Case) -> None:
    def part(values: Tensor, rank: int) -> Tensor:
        return values[: 3 * rank]

    outputs = [part(torch.zeros(12).to(case.dtype), rank) for rank in case.ranks]
    case.call(dist.all_gather, outputs, part(case.values(case.rank), case.rank))
    for rank, output in enumerate(outputs):
        case.same(output, part(case.values(rank), rank))


@operation
def all_gather_single(case: Case) -> None:
    output = torch.zeros(12 * case.size).to(case.dtype)
    case.call(dist.all_gather_into_tensor, output, case.values(case.rank))
    case.same(output, torch.cat([case.values(rank) for rank in case.ranks]))


@operation
def gather(case: Case) -> None:
    for root in case.ranks:
        outputs = [case.blank() for _ in case.ranks] if case.rank == root else None
        case.call(dist.gather, case.tensor(case.rank), outputs, dst=root)
        for rank, output in enumerate(outputs or []):
            case.same(output, case.tensor(rank))


@operation
def scatter(case: Case) -> None:
    for root in case.ranks:
        inputs = [case.tensor(root, rank) for rank in case.ranks] if case.rank == root else None
        output = case.blank()
        case.call(dist.scatter, output, inputs, src=root)
        case.same(output, case.tensor(root, case.rank))


@operation
def reduce_scatter_single(case: Case) -> None:
    output = torch.zeros(12).to(case.dtype)
    whole = torch.cat([case.values(case.rank, to) for to in case.ranks])
    case.call(dist.reduce_scatter_tensor, output, whole)
    case.same(output, case.reduced(ReduceOp.SUM, [case.values(rank, case.rank) for rank in case.ranks]))


@operation
def all_to_all(case: Case) -> None:
    outputs = [case.blank() for _ in case.ranks]
    case.call(dist.all_to_all, outputs, [case.tensor(case.rank, to) for to in case.ranks])
    for rank, output in enumerate(outputs):
        case.same(output, case.tensor(rank, case.rank))


@operation
def all_to_all_single(case: Case) -> None:
    rows = torch.cat([case.values(case.rank, to) for to in case.ranks])
    output = torch.zeros(12 * case.size).to(case.dtype)
    case.call(dist.all_to_all_single, output, rows)
    case.same(output, torch.cat([case.values(rank, case.rank) for rank in case.ranks]))


@operation
def all_to_all_single_uneven(case: Case) -> None:
    def part(source: int, to: int) -> Tensor:
        return case.values(source, to)[: source + 2 * to]

    parts = [part(case.rank, to) for to in case.ranks]
    wanted = [part(rank, case.rank) for rank in case.ranks]
    output = torch.zeros(sum(len(each) for each in wanted)).to(case.dtype)
    sizes = [len(each) for each in wanted], [len(each) for each in parts]
    case.call(dist.all_to_all_single, output, torch.cat(parts), *sizes)
    case.same(output, torch.cat(wanted))


@operation
def send_and_recv(case: Case) -> None:
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    received = case.blank()
    if case.asynchronous:
        works = [
            dist.isend(case.tensor(case.rank), after, group=case.group, tag=3),
            dist.irecv(received, before, group=case.group, tag=3),
        ]
        for work in works:
            work.wait()
    elif case.rank % 2:
        dist.recv(received, before, group=case.group)
        dist.send(case.tensor(case.rank), after, group=case.group)
    else:
        dist.send(case.tensor(case.rank), after, group=case.group)
        dist.recv(received, before, group=case.group)
    case.same(received, case.tensor(before))


@operation
def recv_from_any(case: Case) -> None:
    if case.rank:
        dist.send(case.tensor(case.rank), 0, group=case.group)
        dist.barrier(group=case.group)
        return
    seen = set()
    for _ in range(1, case.size):
        received = case.blank()
        source = dist.recv(received, group=case.group)
        case.same(received, case.tensor(source))
        seen.add(source)
    if seen != set(range(1, case.size)):
        raise WrongError(f"received from {seen}")
    dist.barrier(group=case.group)


@operation
def batch_isend_irecv(case: Case) -> None:
    received = {rank: case.blank() for rank in case.ranks if rank != case.rank}
    sends = [dist.P2POp(dist.isend, case.tensor(case.rank, rank), rank, case.group) for rank in received]
    recvs = [dist.P2POp(dist.irecv, tensor, rank, case.group) for rank, tensor in received.items()]
    for work in dist.batch_isend_irecv(sends + recvs) if received else []:
        work.wait()
    for rank, tensor in received.items():
        case.same(tensor, case.tensor(rank, case.rank))


@operation
def barrier(case: Case) -> None:
    case.call(dist.barrier)


@operation
def coalesced(case: Case) -> None:
    tensors = [case.values(case.rank, i) for i in range(3)]
    with dist._coalescing_manager(case.group, async_ops=case.asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=case.group)
    if case.asynchronous:
        manager.wait()
    for i, tensor in enumerate(tensors):
        case.same(tensor, case.reduced(ReduceOp.SUM, [case.values(rank, i) for rank in case.ranks]))


@operation
def objects(case: Case) -> None:
    everything: list[Any] = [None] * case.size
    dist.all_gather_object(everything, {"rank": case.rank}, group=case.group)
    if everything != [{"rank": rank} for rank in case.ranks]:
        raise WrongError(f"all_gather_object: {everything}")
    here = [case.rank, "text"] if case.rank == 0 else [None, None]
    dist.broadcast_object_list(here, 0, group=case.group)
    if here != [0, "text"]:
        raise WrongError(f"broadcast_object_list: {here}")
    gathered: list[Any] | None = [None] * case.size if case.rank == 0 else None
    dist.gather_object(case.rank, gathered, 0, group=case.group)
    if case.rank == 0 and gathered != list(case.ranks):
        raise WrongError(f"gather_object: {gathered}")
    mine: list[Any] = [None]
    dist.scatter_object_list(
        mine, [f"for {rank}" for rank in case.ranks] if case.rank == 0 else None, 0, case.group
    )
    if mine != [f"for {case.rank}"]:
        raise WrongError(f"scatter_object_list: {mine}")


NO_SHAPES = {
    "all_gather_uneven",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "all_to_all_single_uneven",
    "coalesced",
}
"""Operations that take parts of flat tensors only."""

NO_TENSORS = {"barrier", "objects"}


def outcome(name: str, dtype: torch.dtype, group: dist.ProcessGroup, *, thorough: bool = True) -> str:
    """Returns the outcome of an operation on a dtype: `ok`, `refused: why`, or what is wrong.

    Each shape is tried synchronously and asynchronously; if not `thorough`, one shape in both ways and each other
    shape in one, which is the other one for the next dtype.
    """
    shapes = ["flat"] if name in NO_SHAPES | NO_TENSORS else list(SHAPES)
    first = DTYPES.index(dtype)
    for asynchronous in (False, True):
        for number, shape in enumerate(shapes):
            if not thorough and number and (number + first) % 2 == asynchronous:
                continue
            case = Case(dist.get_rank(group), dist.get_world_size(group), dtype, shape, asynchronous, group)
            try:
                OPERATIONS[name](case)
            except (ValueError, TypeError, gradwire.errors.UnsupportedOperationError) as refusal:
                return f"refused: {refusal}"
            except Exception as error:
                how = f"{shape}, {'async' if asynchronous else 'sync'}"
                return f"{how}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    return "ok"


def outcomes(
    group: dist.ProcessGroup, dtypes: Sequence[torch.dtype] = DTYPES, *, thorough: bool = True
) -> Iterator[tuple[str, torch.dtype, str]]:
    """Gives the outcome of every operation on every one of the dtypes."""
    for name in OPERATIONS:
        for dtype in dtypes if name not in NO_TENSORS else [torch.float32]:
            yield name, dtype, outcome(name, dtype, group, thorough=thorough)


def expected_refusal(name: str, dtype: torch.dtype) -> str | None:
    """Returns why an operation must be refused on every engine; None if it must not."""
    function, _, op = name.partition(" ")
    op = op or ("SUM" if function in {"reduce_scatter_single", "coalesced"} else "")
    if not op:
        return None
    if dtype == torch.float8_e8m0fnu:
        return "these are powers of two: torch does not add or compare them"
    if dtype.is_complex and op not in {"SUM", "AVG"}:
        return "complex numbers have no order and no bits, and torch refuses their products"
    if dtype.is_floating_point and op in {"BAND", "BOR", "BXOR"}:
        return "floating-point numbers are not combined bit by bit"
    if dtype == torch.bool and op == "AVG":
        return "bools have no average"
    return None


def work(rank: int, backend: str, show: bool) -> None:
    """Fills the table on one rank; rank 0 prints it."""
    gradwire.c10d.init_process_group(backend)
    rank = dist.get_rank()
    table: dict[str, list[str]] = {}
    wrong = 0
    for name, dtype, result in outcomes(dist.group.WORLD):
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, result)
        refused = expected_refusal(name, dtype) is not None
        kinds = {each.partition(":")[0] for each in everywhere}
        if kinds == {"refused"} and refused:
            cell = "-"
        elif kinds == {"ok"} and not refused:
            cell = "ok"
        else:
            cell = "WRONG"
            wrong += 1
            if show and rank == 0:
                print(name, dtype, *everywhere, sep="\n    ", flush=True)
        table.setdefault(name, []).append(cell)
    if rank == 0:
        print_table(backend, dist.get_world_size(), table)
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


def print_table(backend: str, size: int, table: dict[str, list[str]]) -> None:
    """Prints the table, with a line per operation and a column per dtype."""
    names = [str(dtype).removeprefix("torch.").replace("float8_", "f8_") for dtype in DTYPES]
    width = max(map(len, names)) + 1
    print(f"\n{backend}, {size} ranks\n{'':28}" + "".join(name.rjust(width) for name in names))
    for name, cells in table.items():
        print(f"{name:28}" + "".join(cell.rjust(width) for cell in cells))
    print(f"- refused: {sum(cells.count('-') for cells in table.values())} cells", flush=True)


def main() -> None:
    """Prints the tables; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="of gradwire (default: %(default)s)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="(default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="do not print what is wrong")
    arguments = parser.parse_args()
    if under_mpiexec():
        work(0, "gradwire_mpi", not arguments.quiet)
    failed = False
    for engine in arguments.engines:
        for size in arguments.ranks:
            backend = engine if engine not in ENGINES else f"gradwire_{engine}"
            try:
                launch.spawn(work, size, (backend, not arguments.quiet))
            except torch.multiprocessing.ProcessExitedException:
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, about names that 2.11 lacks
    main()
