"""The operations of a process group, under the names by which torch calls them.

torch has several names for one operation: those of different releases (`_allgather_base` became
`all_gather_single`), and variants for lists, for single tensors and for several operations at once. Each method
here checks its arguments and makes a CollectiveCall; a subclass carries it out.
"""

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..engines.collective_call import ANY_RANK, CallOptions, CollectiveCall, Step, call_options
from ..engines.reductions import Reduction
from ..engines.staging import Staging, span_of
from ..torch_types import TorchProcessGroup
from .checks import (
    check_coalesced,
    check_equal_sizes,
    check_parts,
    check_rank,
    check_reduction,
    check_same_size,
    check_tag,
    check_tensors,
    check_whole,
    single_item,
)
from .sparse import SparseSum
from .work import GroupWork

__all__ = ["Collectives"]

Tensors = Sequence[Tensor]
Time = timedelta | None
Result = GroupWork | None

_NO_OPTIONS = CallOptions()


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
        tensor = single_item("broadcast", tensors)
        root = self._root("broadcast", opts)
        check_tensors("broadcast", [tensor])
        staging = Staging()
        step = Step("broadcast", staging.output(tensor), root)
        options, both = call_options(opts, timeout), [tensor]
        return self.start(CollectiveCall("broadcast", [step], staging, both, both, options, root=root))

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Reduces the tensors of all ranks into every rank's. Sparse COO tensors can be summed and averaged."""
        tensor = single_item("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensor, opts, timeout)
        return self._all_reduce("all_reduce", [tensor], opts, timeout)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any, timeout: Time) -> Result:
        reduction = _reduction(opts)
        if reduction.name not in {"sum", "avg"}:
            raise ValueError(f"all_reduce of a sparse tensor cannot use {reduction.name}, only sum and avg")
        step = SparseSum(tensor, average=reduction.name == "avg")
        options, both = call_options(opts, timeout), [tensor]
        return self.start(
            CollectiveCall("all_reduce", [step], Staging(), both, both, options, reduction=reduction)
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Result:
        """Runs an all_reduce of each tensor, as one operation."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts, None)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any, timeout: Time) -> Result:
        reduction = _reduction(opts)
        check_tensors(name, tensors)
        check_reduction(name, reduction, tensors)
        staging = Staging()
        steps = [Step("all_reduce", alias, reduction) for alias in staging.outputs(tensors)]
        options = call_options(opts, timeout)
        return self.start(CollectiveCall(name, steps, staging, tensors, tensors, options, reduction=reduction))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Time = None) -> Result:
        """Reduces the tensors of all ranks into the root's; the other ranks' tensors may change or not."""
        tensor = single_item("reduce", tensors)
        root = self._root("reduce", opts)
        reduction = _reduction(opts if op is None else op)
        check_tensors("reduce", [tensor])
        check_reduction("reduce", reduction, [tensor])
        staging = Staging()
        step = Step("reduce", staging.output(tensor), root, reduction)
        options, both = call_options(opts, timeout), [tensor]
        return self.start(
            CollectiveCall("reduce", [step], staging, both, both, options, root=root, reduction=reduction)
        )

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies rank r's tensor into the r-th output of every rank; sizes may differ between ranks."""
        outputs = (
            output_tensors if isinstance(input_tensors, Tensor) else single_item("all_gather", output_tensors)
        )
        inputs = [single_item("all_gather", input_tensors)]
        return self._all_gather("all_gather", [outputs], inputs, opts, timeout)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Result:
        """Runs several all_gather as one operation: `output_lists[r][i]` becomes rank r's `input_list[i]`."""
        for outputs in output_lists:
            check_coalesced("all_gather_coalesced", outputs, input_list)
        check_parts("all_gather_coalesced", "lists of outputs", output_lists, self.size())
        by_input = [[outputs[i] for outputs in output_lists] for i in range(len(input_list))]
        return self._all_gather("all_gather_coalesced", by_input, input_list, opts, None)

    def _all_gather(
        self, name: str, lists: Sequence[Tensors], tensors: Tensors, opts: Any, timeout: Time
    ) -> Result:
        flat = [output for outputs in lists for output in outputs]
        check_tensors(name, [*tensors, *flat])
        for outputs, tensor in zip(lists, tensors, strict=True):
            check_parts(name, "outputs", outputs, self.size())
            check_same_size(name, outputs[self.rank()], tensor)
        staging = Staging()
        aliases = [staging.outputs(outputs) for outputs in lists]
        own = self.rank()
        steps = [
            Step("all_gather", outputs, staging.input(tensor, span_of(outputs[own])))
            for outputs, tensor in zip(aliases, tensors, strict=True)
        ]
        result = [list(outputs) for outputs in lists]
        options = call_options(opts, timeout)
        return self.start(CollectiveCall(name, steps, staging, tensors, flat, options, result=result))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """Concatenates the tensors of all ranks, of one size, into `output` on every rank."""
        return self._all_gather_single("all_gather_into_tensor", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Result:
        """Runs several all_gather_single as one operation."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Result:
        check_tensors(name, [*inputs, *outputs])
        check_coalesced(name, outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole(name, "output", output, "input", tensor, self.size())
        staging, own, parts = Staging(), self.rank(), self.size()
        steps = [
            Step("all_gather_single", output, staging.input(tensor, span_of(output, own, parts)))
            for output, tensor in zip(staging.outputs(outputs), inputs, strict=True)
        ]
        return self.start(CollectiveCall(name, steps, staging, inputs, outputs, call_options(opts, None)))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies rank r's tensor into the r-th output of the root; all have one size."""
        tensor = single_item("gather", input_tensors)
        root = self._root("gather", opts)
        outputs = self._root_list("gather", "outputs", output_tensors, root, isinstance(input_tensors, Tensor))
        check_tensors("gather", [tensor, *outputs])
        check_equal_sizes("gather", "outputs", outputs, tensor)
        staging = Staging()
        aliases = staging.outputs(outputs)
        source = staging.input(tensor, span_of(aliases[root]) if aliases else None)
        step = Step("gather", aliases, source, root)
        options = call_options(opts, timeout)
        return self.start(
            CollectiveCall("gather", [step], staging, [tensor], outputs, options, result=[outputs], root=root)
        )

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """Concatenates the tensors of all ranks, of one size, into `output` on the root."""
        name = "gather_single"
        root = self._root(name, opts)
        check_tensors(name, [input, output])
        staging = Staging()
        parts: list[Tensor] = []
        if self.rank() == root:
            check_whole(name, "output", output, "input", input, self.size())
            parts = list(staging.output(output).view(self.size(), *input.shape).unbind())
        source = staging.input(input, span_of(parts[root]) if parts else None)
        step = Step("gather", parts, source, root)
        outputs = [output] if parts else []
        return self.start(
            CollectiveCall(name, [step], staging, [input], outputs, call_options(opts, None), root=root)
        )

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Copies the root's r-th input into rank r's tensor; all have one size."""
        tensor = single_item("scatter", output_tensors)
        root = self._root("scatter", opts)
        inputs = self._root_list("scatter", "inputs", input_tensors, root, isinstance(output_tensors, Tensor))
        check_tensors("scatter", [tensor, *inputs])
        check_equal_sizes("scatter", "inputs", inputs, tensor)
        staging = Staging()
        alias = staging.output(tensor)
        step = Step("scatter", alias, staging.inputs(inputs, root, span_of(alias)), root)
        options = call_options(opts, timeout)
        return self.start(CollectiveCall("scatter", [step], staging, inputs, [tensor], options, root=root))

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None
    ) -> Result:
        """Reduces the r-th inputs of all ranks into rank r's tensor."""
        name = "reduce_scatter"
        tensor = single_item(name, output_tensors)
        inputs = input_tensors if isinstance(output_tensors, Tensor) else single_item(name, input_tensors)
        reduction = _reduction(opts)
        check_parts(name, "inputs", inputs, self.size())
        check_tensors(name, [tensor, *inputs])
        check_same_size(name, tensor, inputs[self.rank()])
        check_reduction(name, reduction, [tensor])
        staging = Staging()
        alias = staging.output(tensor)
        step = Step("reduce_scatter", alias, staging.inputs(inputs, self.rank(), span_of(alias)), reduction)
        options = call_options(opts, timeout)
        return self.start(CollectiveCall(name, [step], staging, inputs, [tensor], options, reduction=reduction))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """Runs a reduce_scatter of the equal parts of `input`."""
        return self._reduce_scatter_single("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Result:
        """Runs several reduce_scatter_single as one operation."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Result:
        reduction = _reduction(opts)
        check_tensors(name, [*inputs, *outputs])
        check_coalesced(name, outputs, inputs)
        check_reduction(name, reduction, outputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole(name, "input", tensor, "output", output, self.size())
        staging, own_part = Staging(), (self.rank(), self.size())
        steps = [
            Step("reduce_scatter_single", alias, staging.input(whole, own_part=own_part), reduction)
            for alias, whole in zip(staging.outputs(outputs), inputs, strict=True)
        ]
        options = call_options(opts, None)
        return self.start(CollectiveCall(name, steps, staging, inputs, outputs, options, reduction=reduction))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Time = None) -> Result:
        """Copies rank r's j-th input into rank j's r-th output; sizes may differ."""
        name = "all_to_all"
        check_parts(name, "outputs", outputs, self.size())
        check_parts(name, "inputs", inputs, self.size())
        check_tensors(name, [*inputs, *outputs])
        check_same_size(name, outputs[self.rank()], inputs[self.rank()])
        staging = Staging()
        own, aliases = self.rank(), staging.outputs(outputs)
        step = Step("all_to_all", aliases, staging.inputs(inputs, own, span_of(aliases[own])))
        return self.start(CollectiveCall(name, [step], staging, inputs, outputs, call_options(opts, timeout)))

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
        check_tensors(name, [input, output])
        staging = Staging()
        alias, source = staging.output(output), staging.input(input)
        if output_split_sizes or input_split_sizes:
            aliases = _split(name, "output", alias, output_split_sizes, self.size())
            sources = _split(name, "input", source, input_split_sizes, self.size())
            check_same_size(name, aliases[self.rank()], sources[self.rank()])
            step = Step("all_to_all", aliases, sources)
        else:
            check_same_size(name, output, input)
            _split(name, "output", alias, (), self.size())
            step = Step("all_to_all_single", alias, source)
        return self.start(CollectiveCall(name, [step], staging, [input], [output], call_options(opts, timeout)))

    def barrier(self, opts: Any = None, timeout: Time = None) -> Result:
        """Waits until all ranks have called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None) or torch.device("cpu")
        options = call_options(opts, timeout)
        return self.start(CollectiveCall("barrier", [Step("barrier")], Staging(), [], [], options, device=device))

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Result:
        """Sends a tensor to rank `dst`, which receives it with the same tag."""
        tensor = single_item("send", tensors)
        check_tensors("send", [tensor])
        check_rank("send", "dst", dst, self.size())
        check_tag("send", tag)
        staging = Staging()
        step = Step("send", staging.input(tensor), dst, tag)
        inputs = [tensor]
        return self.start(
            CollectiveCall("send", [step], staging, inputs, [], _NO_OPTIONS, result=inputs, peer=dst, tag=tag)
        )

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Result:
        """Receives what rank `src` sends with this tag."""
        check_rank("recv", "src", src, self.size())
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Result:
        """Receives what any rank sends with this tag; `source_rank()` of the Work returns which rank sent."""
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> Result:
        tensor = single_item("recv", tensors)
        check_tensors("recv", [tensor])
        check_tag("recv", tag)
        staging = Staging()
        step = Step("recv", staging.output(tensor), src, tag)
        peer = ANY_RANK if src is None else src
        return self.start(CollectiveCall("recv", [step], staging, [], [tensor], _NO_OPTIONS, peer=peer, tag=tag))

    # Names that torch uses before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _root(self, name: str, opts: Any) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        check_rank(name, "root", root, self.size())
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
