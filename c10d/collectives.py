"""The operations of a process group under the names by which torch calls them, brought into one form.

torch has several names for one operation: those of its releases (`_allgather_base` became `all_gather_single`),
and forms for lists, single tensors and several at once. Here each is checked and becomes a Call; what is done with
it, a subclass says.
"""

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .call import CollectiveCall, Step, Steps
from .checks import check_parts, check_rank, check_reduction, check_same_size, check_tensors, check_whole, the_one
from .reductions import Reduction
from .sparse import SparseSum
from .staging import Staging
from .torch_types import TorchProcessGroup
from .work import GroupWork

__all__ = ["Collectives"]

Tensors = Sequence[Tensor]
Time = timedelta | None
Result = GroupWork | None

_NO_TIME = timedelta(0)


class Collectives(TorchProcessGroup):
    """What torch.distributed calls.

    Every method returns a Work; or, as with torch's own groups, None once all is done, if the options say that the
    caller would wait (`asyncOp = False`).
    Options are torch's, such as AllreduceOptions; where torch takes single arguments instead, so do these.
    Bad arguments raise ValueError or TypeError on this rank, before anything is sent.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a form that the stubs lack
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """This process's number in the group."""
        return self._rank  # torch's own takes ten times as long, and this is asked with every call

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    @abstractmethod
    def start(self, call: CollectiveCall) -> Result:
        """Does what was called for."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Every rank's tensor becomes the root's."""
        tensor = the_one("broadcast", tensors)
        root = self._root("broadcast", opts)
        check_tensors("broadcast", [tensor])
        staging = Staging()
        alias = staging.output(tensor)
        step = Step("broadcast", alias, root)
        return self._start("broadcast", [step], staging, [tensor], [tensor], [tensor], opts, timeout, root=root)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Every rank's tensor becomes the reduction of all. Sparse COO tensors can be summed and averaged."""
        tensor = the_one("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensor, opts, timeout)
        return self._all_reduce("all_reduce", [tensor], opts, timeout)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any, timeout: Time) -> Result:
        reduction = _reduction(opts)
        if reduction.name not in {"sum", "avg"}:
            raise ValueError(f"all_reduce of a sparse tensor cannot use {reduction.name}, only sum and avg")
        step = SparseSum(tensor, average=reduction.name == "avg")
        return self._start(
            "all_reduce", [step], Staging(), [tensor], [tensor], [tensor], opts, timeout, reduction=reduction
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Result:
        """As several all_reduce, in one."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts, None)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any, timeout: Time) -> Result:
        reduction = _reduction(opts)
        check_tensors(name, tensors)
        check_reduction(name, reduction, tensors)
        staging = Staging()
        steps = [Step("all_reduce", alias, reduction) for alias in staging.outputs(tensors)]
        return self._start(
            name, steps, staging, tensors, tensors, list(tensors), opts, timeout, reduction=reduction
        )

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Time = None) -> Result:
        """The root's tensor becomes the reduction of all; the other ranks' may change or not."""
        tensor = the_one("reduce", tensors)
        root = self._root("reduce", opts)
        reduction = _reduction(opts if op is None else op)
        check_tensors("reduce", [tensor])
        check_reduction("reduce", reduction, [tensor])
        staging = Staging()
        alias = staging.output(tensor)
        step = Step("reduce", alias, root, reduction)
        return self._start(
            "reduce", [step], staging, [tensor], [tensor], [tensor], opts, timeout, root=root, reduction=reduction
        )

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Each of the outputs becomes one rank's tensor; their sizes may differ."""
        outputs = output_tensors if isinstance(input_tensors, Tensor) else the_one("all_gather", output_tensors)
        return self._all_gather("all_gather", [outputs], [the_one("all_gather", input_tensors)], opts, timeout)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Result:
        """As several all_gather, in one: `output_lists[r][i]` becomes rank r's `input_list[i]`."""
        check_parts("all_gather_coalesced", "lists of outputs", output_lists, self.size())
        by_input = [[outputs[i] for outputs in output_lists] for i in range(len(input_list))]
        return self._all_gather("all_gather_coalesced", by_input, input_list, opts, None)

    def _all_gather(
        self, name: str, lists: Sequence[Tensors], tensors: Tensors, opts: Any, timeout: Time
    ) -> Result:
        flat = [output for outputs in lists for output in outputs]
        check_tensors(name, [*tensors, *flat])
        staging = Staging()
        steps: list[Step] = []
        for outputs, tensor in zip(lists, tensors, strict=True):
            check_parts(name, "outputs", outputs, self.size())
            check_same_size(name, outputs[self.rank()], tensor)
            aliases, source = staging.outputs(outputs), staging.input(tensor)
            steps.append(Step("all_gather", aliases, source))
        return self._start(name, steps, staging, tensors, flat, [list(each) for each in lists], opts, timeout)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """`output` becomes the tensors of all ranks, one after another; they have one size."""
        return self._all_gather_single("all_gather_into_tensor", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Result:
        """As several all_gather_single, in one."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Result:
        check_tensors(name, [*inputs, *outputs])
        staging = Staging()
        steps: list[Step] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole(name, "output", output, "input", tensor, self.size())
            alias, source = staging.output(output), staging.input(tensor)
            steps.append(Step("all_gather_single", alias, source))
        return self._start(name, steps, staging, inputs, outputs, list(outputs), opts, None)

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Time = None,
    ) -> Result:
        """On the root, each of the outputs becomes one rank's tensor."""
        tensor = the_one("gather", input_tensors)
        root = self._root("gather", opts)
        outputs = self._at_root("gather", "outputs", output_tensors, root, isinstance(input_tensors, Tensor))
        check_tensors("gather", [tensor, *outputs])
        staging = Staging()
        aliases, source = staging.outputs(outputs), staging.input(tensor)
        step = Step("gather", aliases, source, root)
        return self._start("gather", [step], staging, [tensor], outputs, [outputs], opts, timeout, root=root)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """On the root, `output` becomes the tensors of all ranks, one after another; they have one size."""
        name = "gather_single"
        root = self._root(name, opts)
        check_tensors(name, [input, output])
        staging = Staging()
        source = staging.input(input)
        parts: list[Tensor] = []
        if self.rank() == root:
            check_whole(name, "output", output, "input", input, self.size())
            parts = list(staging.output(output).view(self.size(), *input.shape).unbind())
        step = Step("gather", parts, source, root)
        written = [output] if parts else []
        return self._start(name, [step], staging, [input], written, written, opts, None, root=root)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None) -> Result:
        """Each rank's tensor becomes one of the root's inputs."""
        tensor = the_one("scatter", output_tensors)
        root = self._root("scatter", opts)
        inputs = self._at_root("scatter", "inputs", input_tensors, root, isinstance(output_tensors, Tensor))
        check_tensors("scatter", [tensor, *inputs])
        staging = Staging()
        alias, sources = staging.output(tensor), staging.inputs(inputs)
        step = Step("scatter", alias, sources, root)
        return self._start("scatter", [step], staging, inputs, [tensor], [tensor], opts, timeout, root=root)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Time = None
    ) -> Result:
        """Rank r's tensor becomes the reduction of the r-th inputs of all ranks."""
        name = "reduce_scatter"
        tensor = the_one(name, output_tensors)
        inputs = input_tensors if isinstance(output_tensors, Tensor) else the_one(name, input_tensors)
        reduction = _reduction(opts)
        check_parts(name, "inputs", inputs, self.size())
        check_tensors(name, [tensor, *inputs])
        check_same_size(name, inputs[self.rank()], tensor)
        check_reduction(name, reduction, [tensor])
        staging = Staging()
        alias, sources = staging.output(tensor), staging.inputs(inputs)
        step = Step("reduce_scatter", alias, sources, reduction)
        return self._start(name, [step], staging, inputs, [tensor], [tensor], opts, timeout, reduction=reduction)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Result:  # noqa: A002
        """As reduce_scatter of the equal parts of `input`."""
        return self._reduce_scatter_single("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Result:
        """As several reduce_scatter_single, in one."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Result:
        reduction = _reduction(opts)
        check_tensors(name, [*inputs, *outputs])
        check_reduction(name, reduction, outputs)
        staging = Staging()
        steps: list[Step] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole(name, "input", tensor, "output", output, self.size())
            alias, source = staging.output(output), staging.input(tensor)
            steps.append(Step("reduce_scatter_single", alias, source, reduction))
        return self._start(name, steps, staging, inputs, outputs, list(outputs), opts, None, reduction=reduction)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Time = None) -> Result:
        """Rank r's j-th output becomes rank j's r-th input; the sizes may differ."""
        name = "all_to_all"
        check_parts(name, "outputs", outputs, self.size())
        check_parts(name, "inputs", inputs, self.size())
        check_tensors(name, [*inputs, *outputs])
        check_same_size(name, outputs[self.rank()], inputs[self.rank()])
        staging = Staging()
        aliases, sources = staging.outputs(outputs), staging.inputs(inputs)
        step = Step("all_to_all", aliases, sources)
        return self._start(name, [step], staging, inputs, outputs, list(outputs), opts, timeout)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Time = None,
    ) -> Result:
        """As all_to_all of parts of two tensors along their first dimension; equal ones if no sizes are given."""
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
        return self._start(name, [step], staging, [input], [output], [output], opts, timeout)

    def barrier(self, opts: Any = None, timeout: Time = None) -> Result:
        """Done once all ranks have called it."""
        step = Step("barrier")
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None) or torch.device("cpu")
        return self._start("barrier", [step], Staging(), [], [], [], opts, timeout, device=device)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Result:
        """Sends to `dst`'s receive with this tag."""
        tensor = the_one("send", tensors)
        check_tensors("send", [tensor])
        check_rank("send", "dst", dst, self.size())
        staging = Staging()
        source = staging.input(tensor)
        step = Step("send", source, dst, tag)
        return self._start("send", [step], staging, [tensor], [], [tensor], None, None, peer=dst, tag=tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Result:
        """Receives what `src` sends with this tag."""
        check_rank("recv", "src", src, self.size())
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Result:
        """Receives what any rank sends with this tag; `source_rank` of the Work tells which."""
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> Result:
        tensor = the_one("recv", tensors)
        check_tensors("recv", [tensor])
        staging = Staging()
        alias = staging.output(tensor)
        step = Step("recv", alias, src, tag)
        peer = -1 if src is None else src
        return self._start("recv", [step], staging, [], [tensor], [tensor], None, None, peer=peer, tag=tag)

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(
        self,
        name: str,
        steps: Steps,
        staging: Staging,
        inputs: Tensors,
        outputs: Tensors,
        result: Any,
        opts: Any,
        timeout: Time,
        *,
        device: torch.device | None = None,
        reduction: Reduction | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int = 0,
    ) -> Result:
        limit = getattr(opts, "timeout", None) if timeout is None else timeout
        if device is None:
            device = inputs[0].device if inputs else outputs[0].device
        return self.start(
            CollectiveCall(
                name=name,
                inputs=inputs,
                outputs=outputs,
                device=device,
                steps=steps,
                staging=staging,
                result=result,
                # torch's options without a timeout say a negative one
                seconds=limit.total_seconds() if limit is not None and limit > _NO_TIME else None,
                now=not getattr(opts, "asyncOp", True),
                reduction=reduction,
                root=root,
                peer=peer,
                tag=tag,
            )
        )

    def _root(self, name: str, opts: Any) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        check_rank(name, "root", root, self.size())
        return root

    def _at_root(self, name: str, what: str, lists: Any, root: int, single: bool) -> list[Tensor]:
        """The list that only the root gives; torch puts it into a list of its own, or leaves that empty."""
        parts = list(lists if single else (lists[0] if lists else []))
        if self.rank() == root:
            check_parts(name, what, parts, self.size())
        elif parts:
            raise ValueError(f"{name} has {what} on rank {self.rank()}, but only its root, rank {root}, may")
        return parts


def _reduction(opts: Any) -> Reduction:
    return Reduction.of(ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))


def _split(name: str, what: str, tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """The parts along the first dimension, one for each rank; equal ones if no sizes are given."""
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
