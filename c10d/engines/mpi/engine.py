"""The MPI engine: operations of mpi4py on a communicator for each group.

What is only moved is moved as bytes. Reductions use MPI's own types where it has them; numbers of other formats
are reduced in a wider one (bfloat16 in float32), so nothing is left to what an MPI library makes of types that it
does not know.

Operations are started without waiting and then tested until they are done (mpi_progress.py), so they can time out
and be failed. MPI cannot forget what was given up: the memory of these tensors stays as long as the process, and
MPI may still write to it.

MPI counts to 2**31 - 1 only before its version 4, which MPICH has and Open MPI has not. There, larger tensors are
broadcast, reduced, sent and received in pieces, and other operations on them are refused.

If a process of the MPI world dies, the others' operations fail as those of other engines do, but MPI itself can be
used no more: groups that are made later are refused until the processes are started again.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ....errors import CollectiveTimeoutError, ProcessGroupError, RankLostError, UnsupportedOperationError
from ...failure_detector import DIED
from ...pending import All
from ...reductions import Reduction, finish, prepare
from ..base import Engine, PendingOperation, Setup
from ..memory import as_bytes, flat, join, spread
from .progress import MpiOperation
from .world import MpiWorld

__all__ = ["MpiEngine"]

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}
"""In which dtype numbers are reduced for which MPI has no type."""

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}

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

HIGHEST_COUNT = 2**31 - 1
"""Of MPI before version 4."""

PIECE = 2**30
"""Bytes."""


@final
class MpiEngine(Engine):
    """MPI, by mpi4py."""

    name: ClassVar[str] = "mpi"
    blocking: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._world, ranks = MpiWorld.join(setup)
        self._mpi = self._world.mpi
        self._types = {dtype: getattr(self._mpi, name) for dtype, name in _TYPES.items()}
        self._failure: Exception | None = None
        self._tell_group = setup.failed
        # The tag keeps groups apart that several threads make at once.
        group = self._world.comm.Get_group().Incl(ranks)
        self._comm = self._world.comm.Create_group(group, zlib.crc32(setup.group.encode()) % 2**15)
        self._counts_far = min(self._mpi.VERSION, self._mpi.Get_version()[0]) >= 4  # mpi4py's, and the library's
        self._highest_tag = self._comm.Get_attr(self._mpi.TAG_UB)
        group.Free()

    # Collectives

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> PendingOperation | None:
        """Every rank's `tensor` becomes the root's."""
        if self._is_long(tensor.nbytes):
            return _in_pieces(tensor, lambda piece: self.broadcast(piece, root, timeout))
        return self._start("broadcast", timeout, self._comm.Ibcast, self._raw(tensor), root, keep=tensor)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Every rank's `tensor` becomes the reduction of all."""
        if self._is_long(tensor.nbytes):
            return _in_pieces(tensor, lambda piece: self.all_reduce(piece, reduction, timeout))
        own = _Reducible.of(tensor, reduction)
        return self._start(
            "all_reduce",
            timeout,
            self._comm.Iallreduce,
            self._mpi.IN_PLACE,
            self._typed(own.numbers),
            self._op(own, reduction),
            keep=own,
            then=lambda: own.give(tensor, reduction, self.size),
        )

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """The root's `tensor` becomes the reduction of all."""
        if self._is_long(tensor.nbytes):
            return _in_pieces(tensor, lambda piece: self.reduce(piece, root, reduction, timeout))
        own = _Reducible.of(tensor, reduction)
        here = self.rank == root
        return self._start(
            "reduce",
            timeout,
            self._comm.Ireduce,
            self._mpi.IN_PLACE if here else self._typed(own.numbers),
            self._typed(own.numbers) if here else None,
            self._op(own, reduction),
            root,
            keep=own,
            then=(lambda: own.give(tensor, reduction, self.size)) if here else None,
        )

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> PendingOperation | None:
        """`outputs[i]` becomes the tensor of rank i; the sizes may differ."""
        sizes = [output.nbytes for output in outputs]
        self._check_count("all_gather", sum(sizes))
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        if len(set(sizes)) == 1:  # on one rank as on all
            begin, into = self._comm.Iallgather, self._raw(whole)
        else:
            begin, into = self._comm.Iallgatherv, self._parts(whole, sizes)
        return self._start(
            "all_gather",
            timeout,
            begin,
            self._raw(tensor),
            into,
            keep=(tensor, whole),
            then=lambda: spread(whole, outputs),
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> PendingOperation | None:
        """`output` becomes the tensors of all ranks, which have one size."""
        self._check_count("all_gather", tensor.nbytes)
        if _overlap(output, tensor):  # as FSDP gathers in place; MPI refuses it
            tensor = tensor.clone()
        return self._start(
            "all_gather",
            timeout,
            self._comm.Iallgather,
            self._raw(tensor),
            self._raw(output),
            keep=(tensor, output),
        )

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float
    ) -> PendingOperation | None:
        """On the root, `outputs[i]` becomes the tensor of rank i; the sizes may differ."""
        self._check_count("gather", sum(output.nbytes for output in outputs) or self.size * tensor.nbytes)
        if self.rank != root:
            return self._start("gather", timeout, self._comm.Igatherv, self._raw(tensor), None, root, keep=tensor)
        sizes = [output.nbytes for output in outputs]
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        return self._start(
            "gather",
            timeout,
            self._comm.Igatherv,
            self._raw(tensor),
            self._parts(whole, sizes),
            root,
            keep=(tensor, whole),
            then=lambda: spread(whole, outputs),
        )

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float
    ) -> PendingOperation | None:
        """Rank i's `tensor` becomes the root's `inputs[i]`; the sizes may differ."""
        self._check_count("scatter", sum(each.nbytes for each in inputs) or self.size * tensor.nbytes)
        sent, whole = None, None
        if self.rank == root:
            whole = join(inputs)
            sent = self._parts(whole, [each.nbytes for each in inputs])
        return self._start(
            "scatter", timeout, self._comm.Iscatterv, sent, self._raw(tensor), root, keep=(tensor, whole)
        )

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Rank i's `tensor` becomes the reduction of all ranks' `inputs[i]`; the sizes may differ."""
        sizes = [each.numel() for each in inputs]
        return self._reduce_scatter(
            tensor, torch.cat([each.view(-1) for each in inputs]), sizes, reduction, timeout
        )

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """As reduce_scatter of the equal parts of `whole`."""
        if reduction.factor is not None or _overlap(whole, tensor):
            whole = whole.clone()
        return self._reduce_scatter(tensor, whole, [tensor.numel()] * self.size, reduction, timeout)

    def _reduce_scatter(
        self, tensor: Tensor, whole: Tensor, sizes: Sequence[int], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        self._check_count("reduce_scatter", whole.numel())
        own = _Reducible.of(whole, reduction)
        result = _Reducible.of(tensor, Reduction("sum"))
        return self._start(
            "reduce_scatter",
            timeout,
            self._comm.Ireduce_scatter,
            self._typed(own.numbers),
            self._typed(result.numbers),
            list(sizes),
            self._op(own, reduction),
            keep=(own, result),
            then=lambda: result.give(tensor, reduction, self.size),
        )

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
    ) -> PendingOperation | None:
        """Rank i's `outputs[j]` becomes rank j's `inputs[i]`; the sizes may differ."""
        sizes = [output.nbytes for output in outputs]
        self._check_count("all_to_all", max(sum(sizes), sum(each.nbytes for each in inputs)))
        sent, received = join(inputs), torch.empty(sum(sizes), dtype=torch.uint8)
        return self._start(
            "all_to_all",
            timeout,
            self._comm.Ialltoallv,
            self._parts(sent, [each.nbytes for each in inputs]),
            self._parts(received, sizes),
            keep=(sent, received),
            then=lambda: spread(received, outputs),
        )

    def all_to_all_single(self, output: Tensor, whole: Tensor, timeout: float) -> PendingOperation | None:
        """As all_to_all of equal parts of two tensors."""
        self._check_count("all_to_all", whole.nbytes // self.size)
        if _overlap(output, whole):
            whole = whole.clone()
        return self._start(
            "all_to_all", timeout, self._comm.Ialltoall, self._raw(whole), self._raw(output), keep=(whole, output)
        )

    def barrier(self, timeout: float) -> PendingOperation | None:
        """Done once all ranks have called it."""
        return self._start("barrier", timeout, self._comm.Ibarrier, keep=None)

    # Point to point

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> PendingOperation | None:
        """Sends to `peer`'s `recv` with this tag."""
        if self._is_long(tensor.nbytes):
            return _in_pieces(tensor, lambda piece: self.send(piece, peer, tag, timeout))
        self._check_tag("send", tag)
        return self._start("send", timeout, self._comm.Isend, self._raw(tensor), peer, tag, keep=tensor)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> Any:
        """Receives what `peer`, or anyone if it is None, sends with this tag."""
        if peer is None:  # whose pieces would come between those of others
            self._check_count("recv from any rank", tensor.nbytes)
        elif self._is_long(tensor.nbytes):
            return _in_pieces(tensor, lambda piece: self.recv(piece, peer, tag, timeout))
        self._check_tag("recv", tag)
        source = self._mpi.ANY_SOURCE if peer is None else peer
        return self._start("recv", timeout, self._comm.Irecv, self._raw(tensor), source, tag, keep=tensor)

    def _is_long(self, count: int) -> bool:
        """Is it more than MPI can count?"""
        return count > HIGHEST_COUNT and not self._counts_far

    def _check_count(self, operation: str, count: int) -> None:
        if self._is_long(count):
            major, minor = self._mpi.Get_version()
            raise UnsupportedOperationError(
                self.name,
                operation,
                f"MPI {major}.{minor} counts to {HIGHEST_COUNT} only, and this takes {count}: give less at a "
                "time, or use an MPI 4.0, such as the mpich wheel, or another engine",
            )

    def _check_tag(self, operation: str, tag: int) -> None:
        if not 0 <= tag <= self._highest_tag:
            raise UnsupportedOperationError(
                self.name, operation, f"the tag is {tag}, but MPI has only tags from 0 to {self._highest_tag}"
            )

    # What all of them do

    def _start(
        self,
        operation: str,
        timeout: float,
        begin: Callable[..., Any],
        *arguments: Any,
        keep: Any,
        then: Callable[[], None] | None = None,
    ) -> MpiOperation:
        """Starts an MPI operation. What is kept lives until it is over."""
        if self._failure is not None:
            raise self._failure
        end = time.monotonic() + timeout
        expected = keep.nbytes if operation == "recv" else None

        def error_now() -> Exception | None:
            if self._failure is None and time.monotonic() > end:
                self._report(CollectiveTimeoutError(operation, timeout))
            return self._failure

        def is_done(status: Any) -> int:
            if then is not None:
                then()
            if expected is None:
                return -1
            got = status.Get_count(self._mpi.BYTE)
            if got != expected:
                raise ProcessGroupError(
                    f"recv has room for {expected} bytes, but rank {status.Get_source()} sent {got}: send and "
                    "receive tensors of one size and dtype"
                )
            return int(status.Get_source())

        def explain(error: Exception) -> Exception:
            if isinstance(error, self._mpi.Exception):
                error = ProcessGroupError(f"{operation} failed in MPI: {error}")
            self._report(error)
            return self._failure or error

        try:
            request = begin(*arguments)
        except self._mpi.Exception as error:
            raise explain(error) from error
        status = self._mpi.Status() if expected is not None else None
        return MpiOperation(self._world.progress, request, status, error_now, is_done, explain, keep)

    def _raw(self, tensor: Tensor) -> list[Any]:
        """Its bytes, as mpi4py takes them."""
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), self._mpi.BYTE]

    def _parts(self, whole: Tensor, sizes: list[int]) -> list[Any]:
        """Parts of so many bytes, one after another."""
        buffer, kind = self._raw(whole)
        return [buffer, sizes, kind]

    def _typed(self, numbers: Tensor) -> list[Any]:
        buffer = self._mpi.buffer.fromaddress(numbers.data_ptr(), numbers.nbytes)
        return [buffer, self._types[numbers.dtype]]

    def _op(self, own: "_Reducible", reduction: Reduction) -> Any:
        return getattr(self._mpi, (_BOOL_OPS if own.bools else _OPS)[reduction.name])

    # Faults

    def _report(self, error: Exception) -> None:
        self._tell_group(error)
        self.fail(error)  # if the group has not done so, perhaps with another error

    def fail(self, error: Exception) -> None:
        """Makes all that is under way, and all that comes, raise `error`, a few milliseconds later."""
        if self._failure is None:
            self._failure = error
            if isinstance(error, RankLostError) and error.reason == DIED:
                self._world.broken = error

    def close(self) -> None:
        """Gives the communicator back, unless MPI may still use it for what was given up."""
        if not self._world.progress.abandoned and self._world.broken is None:
            self._comm.Free()


@final
@dataclass(slots=True)
class _Reducible:
    """A tensor as numbers that MPI can reduce.

    numbers: of a dtype that MPI knows; the memory of the tensor or a copy.
    wide: the copy in a wider dtype, if there is one.
    bools: are the numbers bytes that stand for bools?
    """

    numbers: Tensor
    wide: Tensor | None
    bools: bool

    @classmethod
    def of(cls, tensor: Tensor, reduction: Reduction) -> "_Reducible":
        """The tensor, multiplied by the reduction's factor."""
        prepare(reduction, tensor)
        if tensor.dtype in _WIDER:
            wide = flat(tensor).to(_WIDER[tensor.dtype])
            return cls(wide, wide, bools=False)
        if tensor.dtype == torch.bool:
            return cls(as_bytes(tensor), None, bools=True)
        return cls(tensor, None, bools=False)

    def give(self, tensor: Tensor, reduction: Reduction, size: int) -> None:
        """Writes the result of a reduction of `size` tensors to one."""
        if self.wide is None:
            finish(reduction, tensor, size)
        else:
            finish(reduction, self.wide, size)
            tensor.view(-1).copy_(self.wide)


def _in_pieces(tensor: Tensor, begin: Callable[[Tensor], PendingOperation | None]) -> PendingOperation:
    """Several operations as one."""
    begun = [begin(piece) for piece in torch.split(tensor.view(-1), PIECE // tensor.itemsize)]
    return All([pending for pending in begun if pending is not None])


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Do they share memory?"""
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes and other < start + first.nbytes
