"""The operations of a process group, under the names by which torch calls them.

torch has several names for one operation: those of different releases (`_allgather_base` became
`all_gather_single`), and variants for lists, for single tensors and for several operations at once. Each method
here checks its arguments, on the rank that gives them, and makes a CollectiveCall; a subclass carries it out.
"""

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..engines.base import Engine
from ..engines.collective_call import ANY_RANK, CollectiveCall, step_of
from ..engines.reductions import Reduction
from ..engines.staging import Staging, span_of
from ..torch_types import TorchProcessGroup
from .work import GroupWork

__all__ = ["Collectives", "check_parts", "check_reduction"]

Tensors = Sequence[Tensor]

Time = timedelta | None

Result = GroupWork | None


class Collectives(TorchProcessGroup):
    """A torch ProcessGroup with the methods that torch.distributed calls for collectives, sends and receives.

    Every method returns a Work. As with torch's own groups, it returns None after the operation is done if the
    options say that the caller waits (`asyncOp = False`). Options are torch's, such as AllreduceOptions; where
    torch takes single arguments instead, so do these methods. Bad arguments raise ValueError or TypeError on this
    rank, before anything is sent.
    """

    @abstractmethod
    def start(self, call: CollectiveCall) -> Result:
        """Starts an operation. Returns its Work; None if the caller asked to wait, which has happened by then."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies the root's tensor to every rank."""
        tensor = _single_item("broadcast", tensors)
        root = self._root("broadcast", opts)
        _check_tensors("broadcast", [tensor])
        staging = Staging()
        step = step_of("broadcast", staging.output(tensor), root)
        both = [tensor]
        return self.start(CollectiveCall("broadcast", [step], staging, both, both, opts, timeout, root=root))

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Reduces the tensors of all ranks into every rank's. Sparse COO tensors can be summed and averaged."""
        tensor = _single_item("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensor, opts, timeout)
        return self._all_reduce("all_reduce", [tensor], opts, timeout)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any, timeout: Time) -> Result:
        reduction = _reduction(opts)
        if reduction.name not in {"sum", "avg"}:
            raise ValueError(f"all_reduce of a sparse tensor cannot use {reduction.name}, only sum and avg")
        step = _SparseSum(tensor, average=reduction.name == "avg")
        both = [tensor]
        return self.start(
            CollectiveCall("all_reduce", [step], Staging(), both, both, opts, timeout, reduction=reduction)
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Result:
        """Runs an all_reduce of each tensor, as one operation."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts, None)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any, timeout: Time) -> Result:
        reduction = _reduction(opts)
        _check_tensors(name, tensors)
        check_reduction(name, reduction, tensors)
        staging = Staging()
        steps = [step_of("all_reduce", alias, reduction) for alias in staging.outputs(tensors)]
        return self.start(
            CollectiveCall(name, steps, staging, tensors, tensors, opts, timeout, reduction=reduction)
        )

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Time = None) -> Result:
        """Reduces the tensors of all ranks into the root's; the other ranks' tensors may change or not."""
        tensor = _single_item("reduce", tensors)
        root = self._root("reduce", opts)
        reduction = _reduction(opts if op is None else op)
        _check_tensors("reduce", [tensor])
        check_reduction("reduce", reduction, [tensor])
        staging = Staging()
        step = step_of("reduce", staging.output(tensor), root, reduction)
        both = [tensor]
        return self.start(
            CollectiveCall("reduce", [step], staging, both, both, opts, timeout, root=root, reduction=reduction)
        )

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies rank r's tensor into the r-th output of every rank; sizes may differ between ranks."""
        outputs = (
            output_tensors if isinstance(input_tensors, Tensor) else _single_item("all_gather", output_tensors)
        )
        inputs = [_single_item("all_gather", input_tensors)]
        return self._all_gather("all_gather", [outputs], inputs, opts, timeout)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Result:
        """Runs several all_gather as one operation: `output_lists[r][i]` becomes rank r's `input_list[i]`."""
        for outputs in output_lists:
            _check_coalesced("all_gather_coalesced", outputs, input_list)
        check_parts("all_gather_coalesced", "lists of outputs", output_lists, self.size())
        by_input = [[outputs[i] for outputs in output_lists] for i in range(len(input_list))]
        return self._all_gather("all_gather_coalesced", by_input, input_list, opts, None)

    def _all_gather(
        self, name: str, lists: Sequence[Tensors], tensors: Tensors, opts: Any, timeout: Time
    ) -> Result:
        flat = [output for outputs in lists for output in outputs]
        _check_tensors(name, [*tensors, *flat])
        for outputs, tensor in zip(lists, tensors, strict=True):
            check_parts(name, "outputs", outputs, self.size())
            _check_same_size(name, outputs[self.rank()], tensor)
        staging = Staging()
        aliases = [staging.outputs(outputs) for outputs in lists]
        own = self.rank()
        steps = [
            step_of("all_gather", outputs, staging.input(tensor, span_of(outputs[own])))
            for outputs, tensor in zip(aliases, tensors, strict=True)
        ]
        result = [list(outputs) for outputs in lists]
        return self.start(CollectiveCall(name, steps, staging, tensors, flat, opts, timeout, result=result))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """Concatenates the tensors of all ranks, of one size, into `output` on every rank."""
        return self._all_gather_single("all_gather_into_tensor", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Result:
        """Runs several all_gather_single as one operation."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Result:
        _check_tensors(name, [*inputs, *outputs])
        _check_coalesced(name, outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_whole(name, "output", output, "input", tensor, self.size())
        staging, own, parts = Staging(), self.rank(), self.size()
        steps = [
            step_of("all_gather_single", output, staging.input(tensor, span_of(output, own, parts)))
            for output, tensor in zip(staging.outputs(outputs), inputs, strict=True)
        ]
        return self.start(CollectiveCall(name, steps, staging, inputs, outputs, opts))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies rank r's tensor into the r-th output of the root; all have one size."""
        tensor = _single_item("gather", input_tensors)
        root = self._root("gather", opts)
        outputs = self._root_list("gather", "outputs", output_tensors, root, isinstance(input_tensors, Tensor))
        _check_tensors("gather", [tensor, *outputs])
        _check_equal_sizes("gather", "outputs", outputs, tensor)
        staging = Staging()
        aliases = staging.outputs(outputs)
        source = staging.input(tensor, span_of(aliases[root]) if aliases else None)
        step = step_of("gather", aliases, source, root)
        return self.start(
            CollectiveCall(
                "gather", [step], staging, [tensor], outputs, opts, timeout, result=[outputs], root=root
            )
        )

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """Concatenates the tensors of all ranks, of one size, into `output` on the root."""
        name = "gather_single"
        root = self._root(name, opts)
        _check_tensors(name, [input, output])
        staging = Staging()
        parts: list[Tensor] = []
        if self.rank() == root:
            _check_whole(name, "output", output, "input", input, self.size())
            parts = list(staging.output(output).view(self.size(), *input.shape).unbind())
        source = staging.input(input, span_of(parts[root]) if parts else None)
        step = step_of("gather", parts, source, root)
        outputs = [output] if parts else []
        return self.start(CollectiveCall(name, [step], staging, [input], outputs, opts, root=root))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies the root's r-th input into rank r's tensor; all have one size."""
        tensor = _single_item("scatter", output_tensors)
        root = self._root("scatter", opts)
        inputs = self._root_list("scatter", "inputs", input_tensors, root, isinstance(output_tensors, Tensor))
        _check_tensors("scatter", [tensor, *inputs])
        _check_equal_sizes("scatter", "inputs", inputs, tensor)
        staging = Staging()
        alias = staging.output(tensor)
        step = step_of("scatter", alias, staging.inputs(inputs, root, span_of(alias)), root)
        return self.start(CollectiveCall("scatter", [step], staging, inputs, [tensor], opts, timeout, root=root))

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None
    ) -> Result:
        """Reduces the r-th inputs of all ranks into rank r's tensor."""
        name = "reduce_scatter"
        tensor = _single_item(name, output_tensors)
        inputs = input_tensors if isinstance(output_tensors, Tensor) else _single_item(name, input_tensors)
        reduction = _reduction(opts)
        check_parts(name, "inputs", inputs, self.size())
        _check_tensors(name, [tensor, *inputs])
        _check_same_size(name, tensor, inputs[self.rank()])
        check_reduction(name, reduction, [tensor])
        staging = Staging()
        alias = staging.output(tensor)
        step = step_of("reduce_scatter", alias, staging.inputs(inputs, self.rank(), span_of(alias)), reduction)
        return self.start(
            CollectiveCall(name, [step], staging, inputs, [tensor], opts, timeout, reduction=reduction)
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """Runs a reduce_scatter of the equal parts of `input`."""
        return self._reduce_scatter_single("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Result:
        """Runs several reduce_scatter_single as one operation."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Result:
        reduction = _reduction(opts)
        _check_tensors(name, [*inputs, *outputs])
        _check_coalesced(name, outputs, inputs)
        check_reduction(name, reduction, outputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_whole(name, "input", tensor, "output", output, self.size())
        staging, own_part = Staging(), (self.rank(), self.size())
        steps = [
            step_of("reduce_scatter_single", alias, staging.input(whole, own_part=own_part), reduction)
            for alias, whole in zip(staging.outputs(outputs), inputs, strict=True)
        ]
        return self.start(CollectiveCall(name, steps, staging, inputs, outputs, opts, reduction=reduction))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Time = None) -> Result:
        """Copies rank r's j-th input into rank j's r-th output; sizes may differ."""
        name = "all_to_all"
        check_parts(name, "outputs", outputs, self.size())
        check_parts(name, "inputs", inputs, self.size())
        _check_tensors(name, [*inputs, *outputs])
        _check_same_size(name, outputs[self.rank()], inputs[self.rank()])
        staging = Staging()
        own, aliases = self.rank(), staging.outputs(outputs)
        step = step_of("all_to_all", aliases, staging.inputs(inputs, own, span_of(aliases[own])))
        return self.start(CollectiveCall(name, [step], staging, inputs, outputs, opts, timeout))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Time = None,
    ) -> Result:
        """Runs an all_to_all of parts of two tensors along their first dimension; of equal parts without sizes."""
        name = "all_to_all_single"
        _check_tensors(name, [input, output])
        staging = Staging()
        alias, source = staging.output(output), staging.input(input)
        if output_split_sizes or input_split_sizes:
            aliases = _split(name, "output", alias, output_split_sizes, self.size())
            sources = _split(name, "input", source, input_split_sizes, self.size())
            _check_same_size(name, aliases[self.rank()], sources[self.rank()])
            step = step_of("all_to_all", aliases, sources)
        else:
            _check_same_size(name, output, input)
            _split(name, "output", alias, (), self.size())
            step = step_of("all_to_all_single", alias, source)
        return self.start(CollectiveCall(name, [step], staging, [input], [output], opts, timeout))

    def barrier(self, opts: Any = None, timeout: Time = None) -> Result:
        """Waits until all ranks have called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None) or torch.device("cpu")
        return self.start(
            CollectiveCall("barrier", [step_of("barrier")], Staging(), [], [], opts, timeout, device=device)
        )

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Result:
        """Sends a tensor to rank `dst`, which receives it with the same tag."""
        tensor = _single_item("send", tensors)
        _check_tensors("send", [tensor])
        _check_rank("send", "dst", dst, self.size())
        _check_tag("send", tag)
        staging = Staging()
        step = step_of("send", staging.input(tensor), dst, tag)
        inputs = [tensor]
        return self.start(CollectiveCall("send", [step], staging, inputs, [], result=inputs, peer=dst, tag=tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Result:
        """Receives what rank `src` sends with this tag."""
        _check_rank("recv", "src", src, self.size())
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Result:
        """Receives what any rank sends with this tag; `source_rank()` of the Work returns which rank sent."""
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> Result:
        tensor = _single_item("recv", tensors)
        _check_tensors("recv", [tensor])
        _check_tag("recv", tag)
        staging = Staging()
        step = step_of("recv", staging.output(tensor), src, tag)
        peer = ANY_RANK if src is None else src
        return self.start(CollectiveCall("recv", [step], staging, [], [tensor], peer=peer, tag=tag))

    # Names that torch uses before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _root(self, name: str, opts: Any) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        _check_rank(name, "root", root, self.size())
        return root

    def _root_list(self, name: str, what: str, lists: Any, root: int, is_flat: bool) -> list[Tensor]:
        """Returns the list of tensors that only the root gives.

        Unless `is_flat`, it is in a list, as torch gives it; elsewhere than on the root that list is empty.
        """
        parts = list(lists if is_flat else (lists[0] if lists else []))
        if self.rank() == root:
            check_parts(name, what, parts, self.size())
        elif parts:
            raise ValueError(f"{name} has {what} on rank {self.rank()}, but only its root, rank {root}, may")
        return parts


def _reduction(opts: Any) -> Reduction:
    return Reduction.of(ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))


def _split(name: str, what: str, tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Splits a tensor along its first dimension into one part for each rank; equal parts if no sizes are given."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(
                f"{name}: {rows} rows of the {what} cannot be split evenly among {ranks} ranks; give split sizes"
            )
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{name}: split sizes {list(sizes)} do not fit: give {ranks}, none negative, whose sum is the "
            f"{rows} rows of the {what}"
        )
    return list(tensor.split(list(sizes)))  # type: ignore[no-untyped-call]


@final
class _SparseSum:
    """A step of a CollectiveCall that reduces a sparse COO tensor over all ranks, in place.

    DDP needs it for embeddings with sparse gradients. Every rank gathers the indices and values of all ranks and
    adds the values of each index in the order of the ranks, so that all ranks get the same bits.

    Args:
        tensor: this rank's sparse COO tensor, of the same shape on all ranks. The number of entries may differ.
        average: divide the sum by the number of ranks.
    """

    def __init__(self, tensor: Tensor, *, average: bool) -> None:
        self._tensor = tensor
        self._average = average

    def __call__(self, engine: Engine, timeout_s: float) -> None:
        """Runs the step and waits until it is done. Each of its gathers may take `timeout_s` seconds."""
        own = self._tensor.coalesce()
        indices, values = own.indices(), own.values()
        count = torch.tensor([own._nnz()], device=values.device)
        counts = [int(each) for each in _gather(engine, [1] * engine.size, count, timeout_s)]
        all_indices = _gather(engine, [n * len(indices) for n in counts], indices, timeout_s)
        width = values.shape[1:].numel()
        all_values = _gather(engine, [n * width for n in counts], values, timeout_s)
        total = torch.sparse_coo_tensor(
            torch.cat([part.view(len(indices), n) for n, part in zip(counts, all_indices, strict=True)], 1),
            torch.cat([part.view(n, *values.shape[1:]) for n, part in zip(counts, all_values, strict=True)]),
            own.shape,
        ).coalesce()
        self._tensor.copy_(total / engine.size if self._average else total)


def _gather(engine: Engine, sizes: list[int], tensor: Tensor, timeout_s: float) -> list[Tensor]:
    """Returns the flattened tensors of all ranks, which have these numbers of elements."""
    outputs = [tensor.new_empty(size) for size in sizes]
    pending = engine.all_gather(outputs, tensor.contiguous().view(-1), timeout_s)
    if pending is not None:
        pending.wait(None)
    return outputs


def _single_item(name: str, tensors: Any) -> Any:
    """Returns the only item of a list, in which torch passes the tensor (or list of tensors) of a rank."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{name} takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


def _check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    """Checks that there are tensors, and that they are dense, of one dtype and on one device."""
    if not tensors:
        raise ValueError(f"{name} needs at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} takes tensors, not a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} takes dense tensors, not {tensor.layout}: call to_dense() first")
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{name} takes tensors of one dtype on one device, but got {first.dtype} on {first.device} and "
                f"{tensor.dtype} on {tensor.device}"
            )


def check_reduction(name: str, reduction: Reduction, tensors: Sequence[Tensor]) -> None:
    """Checks that the reduction supports the dtype of the tensors."""
    reason = reduction.unsupported_reason(tensors[0].dtype)
    if reason:
        raise ValueError(f"{name} cannot use {reduction.name} on {tensors[0].dtype}: {reason}")


def _check_rank(name: str, what: str, rank: object, size: int) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
        raise ValueError(f"{name}: {what} is {rank!r}, but the group has the ranks 0 to {size - 1}")


def _check_tag(name: str, tag: int) -> None:
    if tag < 0:
        raise ValueError(f"{name}: the tag is {tag}: give 0 or more")


def check_parts(name: str, what: str, parts: Sequence[Any], size: int) -> None:
    """Checks that there is one part for each of `size` ranks."""
    if len(parts) != size:
        raise ValueError(f"{name} takes one of its {what} for each of the {size} ranks, but got {len(parts)}")


def _check_same_size(name: str, output: Tensor, tensor: Tensor) -> None:
    if output.numel() != tensor.numel():
        raise ValueError(
            f"{name}: the output for this rank's own input has {output.numel()} elements, the input "
            f"{tensor.numel()}"
        )


def _check_equal_sizes(name: str, what: str, parts: Sequence[Tensor], tensor: Tensor) -> None:
    for rank, part in enumerate(parts):
        if part.numel() != tensor.numel():
            raise ValueError(
                f"{name} takes {what} of one size, but that of rank {rank} has {part.numel()} elements and the "
                f"root's own {tensor.numel()}: use all_to_all for tensors of different sizes"
            )


def _check_coalesced(name: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(outputs) != len(inputs):
        raise ValueError(f"{name} takes one output for each of the {len(inputs)} inputs, but got {len(outputs)}")


def _check_whole(name: str, big: str, whole: Tensor, small: str, part: Tensor, size: int) -> None:
    """Checks that the tensor called `big` has `size` times as many elements as the one called `small`."""
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"{name}: the {big} must have {size} times the elements of the {small}, but they have "
            f"{whole.numel()} and {part.numel()}"
        )
