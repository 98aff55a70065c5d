"""The MPI engine: operations of mpi4py on a communicator for each group.

Operations that only move data move bytes. Reductions use MPI's own datatypes where it has them; other numbers are
reduced in a wider dtype (bfloat16 in float32), as MPI libraries differ in how they treat types that they do not
know.

Counts are limited to 2**31 - 1 before MPI 4.0, which MPICH implements and Open MPI does not. There, larger tensors
are broadcast, reduced, sent and received in pieces, and other operations on them are refused.

If a process of the MPI world dies, operations of the others fail as those of other engines do, but MPI itself
cannot be used any more: groups that are created later are refused until the processes are started again.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ....errors import ProcessGroupError, RankLostError, UnsupportedOperationError
from ..base import DIED, CombinedOperation, Pending, PendingOperation, Setup, Tensors
from ..fingerprint import AgreeingEngine, encode, encode_parts
from ..reductions import Reduction, finish, prepare
from ..staging import as_bytes, flat, join_bytes, split_bytes
from .world import MpiOperation, MpiWorld

__all__ = ["MpiEngine"]

MAX_COUNT = 2**31 - 1
"""Largest count of elements before MPI 4.0, whose counts have 64 bits."""

PIECE_BYTES = 2**30
"""Bytes of the pieces that larger tensors are divided into."""

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}
"""Dtypes that MPI has no type for, and those in which they are reduced."""

_OPS = {
    "sum": "SUM",
    "avg": "SUM",
    "premul_sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}

_BOOL_OPS = {**_OPS, "sum": "BOR", "product": "BAND"}
"""For bools, which are reduced as bytes that are 0 or 1."""


@final
class MpiEngine(AgreeingEngine):
    """Connects ranks by MPI, through mpi4py. Raises ProcessGroupError if that or an MPI library is missing."""

    name: ClassVar[str] = "mpi"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        world, ranks = MpiWorld.join(setup)
        self._mpi = world.mpi
        self._world = world
        members = world.comm.Get_group().Incl(ranks)
        # The tag distinguishes groups that several threads create at the same time.
        self._comm = world.comm.Create_group(members, zlib.crc32(setup.group_name.encode()) % 2**15)
        self._max_tag = self._comm.Get_attr(self._mpi.TAG_UB)
        versions = self._mpi.VERSION, self._mpi.Get_version()[0]  # of mpi4py and of the library
        self._has_large_counts = min(versions) >= 4
        members.Free()

    # Collectives. Each reaches an agreement with the other ranks, and then starts an operation of MPI.

    def exchange_fingerprints(self, received: Tensor, sent: Tensor) -> None:
        """Exchanges them by MPI_Ialltoall."""
        arguments = self._comm.Ialltoall, self._raw(sent), self._raw(received)
        self._collective(*arguments, buffers=(sent, received)).wait(None)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> Pending:
        """Broadcasts bytes, by MPI_Ibcast."""
        self.agree(timeout, encode("broadcast", tensor.nbytes, root=root))

        def start(piece: Tensor) -> MpiOperation:
            return self._collective(self._comm.Ibcast, self._raw(piece), root, buffers=piece)

        return self._in_pieces(tensor, start)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> Pending:
        """Reduces numbers, by MPI_Iallreduce."""
        self.agree(timeout, encode("all_reduce", tensor.nbytes, reduction=reduction, dtype=tensor.dtype))

        def start(piece: Tensor) -> MpiOperation:
            own = _Reducible.of(piece, reduction)
            return self._collective(
                self._comm.Iallreduce,
                self._mpi.IN_PLACE,
                own.spec(self._mpi),
                own.op(self._mpi, reduction),
                buffers=own,
                finish=lambda: own.write_result(piece, reduction, self.size),
            )

        return self._in_pieces(tensor, start)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> Pending:
        """Reduces numbers, by MPI_Ireduce."""
        self.agree(timeout, encode("reduce", tensor.nbytes, root=root, reduction=reduction, dtype=tensor.dtype))
        is_root = self.rank == root

        def start(piece: Tensor) -> MpiOperation:
            own = _Reducible.of(piece, reduction)
            numbers = own.spec(self._mpi)
            return self._collective(
                self._comm.Ireduce,
                self._mpi.IN_PLACE if is_root else numbers,
                numbers if is_root else None,
                own.op(self._mpi, reduction),
                root,
                buffers=own,
                finish=(lambda: own.write_result(piece, reduction, self.size)) if is_root else None,
            )

        return self._in_pieces(tensor, start)

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> Pending:
        """Gathers bytes, by MPI_Iallgather if the sizes are equal or else MPI_Iallgatherv, through one buffer."""
        sizes = [output.nbytes for output in outputs]
        self._check_count("all_gather", sum(sizes))
        expected = [encode("all_gather", size) for size in sizes]
        self.agree(timeout, expected[self.rank], expected)
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        if len(set(sizes)) == 1:  # all ranks see the same sizes, so all choose the same function
            function, target = self._comm.Iallgather, self._raw(whole)
        else:
            function, target = self._comm.Iallgatherv, self._parts(whole, sizes)
        return self._collective(
            function,
            self._raw(tensor),
            target,
            buffers=(tensor, whole),
            finish=lambda: split_bytes(whole, outputs),
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> Pending:
        """Gathers bytes, by MPI_Iallgather."""
        self._check_count("all_gather", tensor.nbytes)
        self.agree(timeout, encode("all_gather", tensor.nbytes))
        if _share_memory(output, tensor):  # FSDP gathers in place, which MPI does not allow
            tensor = tensor.clone()
        return self._collective(
            self._comm.Iallgather,
            self._raw(tensor),
            self._raw(output),
            buffers=(tensor, output),
        )

    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> Pending:
        """Gathers bytes, by MPI_Igatherv, through one buffer on the root."""
        self._check_count("gather", sum(output.nbytes for output in outputs) or self.size * tensor.nbytes)
        self.agree(timeout, encode("gather", tensor.nbytes, root=root))
        sizes = [output.nbytes for output in outputs]
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        return self._collective(
            self._comm.Igatherv,
            self._raw(tensor),
            self._parts(whole, sizes) if outputs else None,
            root,
            buffers=(tensor, whole),
            finish=lambda: split_bytes(whole, outputs),
        )

    def scatter(self, tensor: Tensor, inputs: Tensors, root: int, timeout: float) -> Pending:
        """Scatters bytes, by MPI_Iscatterv, through one buffer on the root."""
        self._check_count("scatter", sum(each.nbytes for each in inputs) or self.size * tensor.nbytes)
        self.agree(timeout, encode("scatter", tensor.nbytes, root=root))
        source, whole = None, None
        if self.rank == root:
            whole = join_bytes(inputs)
            source = self._parts(whole, [each.nbytes for each in inputs])
        target = self._raw(tensor)
        return self._collective(self._comm.Iscatterv, source, target, root, buffers=(tensor, whole))

    def reduce_scatter(self, tensor: Tensor, inputs: Tensors, reduction: Reduction, timeout: float) -> Pending:
        """Reduces numbers, by MPI_Ireduce_scatter, from a concatenation of the inputs."""
        sizes = [each.numel() for each in inputs]
        self._check_count("reduce_scatter", sum(sizes))
        self.agree(timeout, encode_parts(reduction, inputs))
        whole = torch.cat([each.view(-1) for each in inputs])
        return self._reduce_scatter(tensor, whole, sizes, reduction)

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> Pending:
        """Reduces numbers, by MPI_Ireduce_scatter."""
        self._check_count("reduce_scatter", whole.numel())
        self.agree(timeout, encode("reduce_scatter", whole.nbytes, reduction=reduction, dtype=whole.dtype))
        if reduction.factor is not None or _share_memory(whole, tensor):
            whole = whole.clone()
        return self._reduce_scatter(tensor, whole, [tensor.numel()] * self.size, reduction)

    def _reduce_scatter(
        self, tensor: Tensor, whole: Tensor, sizes: Sequence[int], reduction: Reduction
    ) -> Pending:
        """Reduces consecutive parts of `whole`, of `sizes` elements; `whole` may be changed."""
        own = _Reducible.of(whole, reduction)
        result = _Reducible.of(tensor, Reduction("sum"))
        return self._collective(
            self._comm.Ireduce_scatter,
            own.spec(self._mpi),
            result.spec(self._mpi),
            list(sizes),
            own.op(self._mpi, reduction),
            buffers=(own, result),
            finish=lambda: result.write_result(tensor, reduction, self.size),
        )

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> Pending:
        """Exchanges bytes, by MPI_Ialltoallv, through one buffer for all inputs and one for all outputs."""
        sizes = [output.nbytes for output in outputs]
        self._check_count("all_to_all", max(sum(sizes), sum(each.nbytes for each in inputs)))
        given = [encode("all_to_all", each.nbytes) for each in inputs]
        self.agree(timeout, given, [encode("all_to_all", size) for size in sizes])
        sent, received = join_bytes(inputs), torch.empty(sum(sizes), dtype=torch.uint8)
        return self._collective(
            self._comm.Ialltoallv,
            self._parts(sent, [each.nbytes for each in inputs]),
            self._parts(received, sizes),
            buffers=(sent, received),
            finish=lambda: split_bytes(received, outputs),
        )

    def all_to_all_single(self, output: Tensor, whole: Tensor, timeout: float) -> Pending:
        """Exchanges bytes, by MPI_Ialltoall."""
        part = whole.nbytes // self.size
        self._check_count("all_to_all", part)
        self.agree(timeout, encode("all_to_all", part))
        source, target = self._raw(whole), self._raw(output)
        return self._collective(self._comm.Ialltoall, source, target, buffers=(whole, output))

    # Point-to-point messages

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> Pending:
        """Sends bytes, by MPI_Isend."""
        self._check_tag("send", tag)

        def start(piece: Tensor) -> MpiOperation:
            return self._start("send", timeout, self._comm.Isend, self._raw(piece), peer, tag, buffers=piece)

        return self._in_pieces(tensor, start)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> Any:
        """Receives bytes, by MPI_Irecv."""
        if peer is None:  # the pieces of several ranks would be mixed up
            self._check_count("recv from any rank", tensor.nbytes)
        self._check_tag("recv", tag)
        source = self._mpi.ANY_SOURCE if peer is None else peer

        def start(piece: Tensor) -> MpiOperation:
            target, size = self._raw(piece), piece.nbytes
            return self._start(
                "recv", timeout, self._comm.Irecv, target, source, tag, buffers=piece, expected_bytes=size
            )

        return self._in_pieces(tensor, start)

    def _collective(
        self, function: Callable[..., Any], *arguments: Any, buffers: Any, finish: Callable[[], None] | None = None
    ) -> MpiOperation:
        """Starts the collective that was agreed on last; see `_start`."""
        return self._start(self.operation, self.timeout, function, *arguments, buffers=buffers, finish=finish)

    def _start(
        self,
        operation: str,
        timeout: float,
        function: Callable[..., Any],
        *arguments: Any,
        buffers: Any,
        finish: Callable[[], None] | None = None,
        expected_bytes: int | None = None,
    ) -> MpiOperation:
        """Starts an operation: calls an immediate function of MPI. See MpiOperation for the other arguments."""
        self.raise_if_failed()
        try:
            request = function(*arguments)
        except self._mpi.Exception as error:
            raise self.fail_group(ProcessGroupError(f"{operation} failed in MPI: {error}")) from error
        return MpiOperation(
            self,
            self._world.progress,
            request,
            name=operation,
            timeout=timeout,
            buffers=buffers,
            finish=finish,
            expected_bytes=expected_bytes,
        )

    # Buffer specifications of mpi4py, which do not keep tensors alive

    def _raw(self, tensor: Tensor) -> list[Any]:
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), self._mpi.BYTE]

    def _parts(self, whole: Tensor, sizes: Sequence[int]) -> list[Any]:
        buffer, datatype = self._raw(whole)
        return [buffer, sizes, datatype]

    # Limits of the library

    def _is_too_large(self, count: int) -> bool:
        return count > MAX_COUNT and not self._has_large_counts

    def _in_pieces(self, tensor: Tensor, start: Callable[[Tensor], MpiOperation]) -> PendingOperation:
        """Starts an operation for a tensor, or for pieces of one that is too large for one call."""
        if not self._is_too_large(tensor.nbytes):
            return start(tensor)
        pieces = torch.split(tensor.view(-1), PIECE_BYTES // tensor.itemsize)
        return CombinedOperation([start(piece) for piece in pieces])

    def _check_count(self, operation: str, count: int) -> None:
        if self._is_too_large(count):
            major, minor = self._mpi.Get_version()
            raise UnsupportedOperationError(
                self.name,
                operation,
                f"MPI {major}.{minor} counts to {MAX_COUNT} only, and this takes {count}: use smaller tensors, an "
                "MPI 4.0 such as the mpich wheel, or another engine",
            )

    def _check_tag(self, operation: str, tag: int) -> None:
        if not 0 <= tag <= self._max_tag:
            raise UnsupportedOperationError(
                self.name, operation, f"the tag is {tag}, but MPI has only tags from 0 to {self._max_tag}"
            )

    # Failures

    def fail(self, error: Exception) -> None:
        """Makes all operations in flight, and all later ones, raise `error`, a few milliseconds later."""
        if self.failure is None and isinstance(error, RankLostError) and error.reason == DIED:
            self._world.failure = error
        super().fail(error)

    def close(self) -> None:
        """Frees the communicator, unless MPI may still use it for abandoned operations or a process has died."""
        if not self._world.progress.abandoned and self._world.failure is None:
            self._comm.Free()


@final
@dataclass(slots=True)
class _Reducible:
    """A tensor as numbers that MPI can reduce.

    numbers: one of MPI's dtypes; shares the tensor's memory, or is `wide`, a copy in a wider dtype.
    is_bool: whether the numbers are bytes that represent bools.
    """

    numbers: Tensor
    wide: Tensor | None
    is_bool: bool

    @classmethod
    def of(cls, tensor: Tensor, reduction: Reduction) -> "_Reducible":
        """Multiplies the tensor by the reduction's factor, if there is one, and returns it as numbers."""
        prepare(reduction, tensor)
        if tensor.dtype in _WIDER:
            wide = flat(tensor).to(_WIDER[tensor.dtype])
            return cls(wide, wide, is_bool=False)
        if tensor.dtype == torch.bool:
            return cls(as_bytes(tensor), None, is_bool=True)
        return cls(tensor, None, is_bool=False)

    def spec(self, mpi: Any) -> list[Any]:
        """Describes the numbers to mpi4py, in the module `mpi`; the description does not keep them alive."""
        numbers, dtype = self.numbers, self.numbers.dtype
        kind = "c" if dtype.is_complex else "f" if dtype.is_floating_point else "i" if dtype.is_signed else "u"
        buffer = mpi.buffer.fromaddress(numbers.data_ptr(), numbers.nbytes)
        return [buffer, mpi.Datatype.fromcode(f"{kind}{dtype.itemsize}")]

    def op(self, mpi: Any, reduction: Reduction) -> Any:
        return getattr(mpi, (_BOOL_OPS if self.is_bool else _OPS)[reduction.name])

    def write_result(self, tensor: Tensor, reduction: Reduction, ranks: int) -> None:
        """Writes the numbers, which MPI has reduced over `ranks` ranks, to the tensor that this was made of."""
        if self.wide is None:
            finish(reduction, tensor, ranks)
        else:
            finish(reduction, self.wide, ranks)
            tensor.view(-1).copy_(self.wide)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes and other < start + first.nbytes
