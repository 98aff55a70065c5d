"""Averages the gradients of DistributedDataParallel (DDP) modules in a distributed backward pass.

DDP averages gradients among replicas in C++ hooks on AccumulateGrad nodes, which add gradients to `.grad`. A
worker's part of a distributed pass uses `torch.autograd.grad`, which does not run these nodes. So the
gradients that it returns for replicated parameters are afterwards fed into an ordinary backward pass whose roots
are the parameters themselves. It runs the AccumulateGrad nodes, and thereby DDP's hooks, while `.grad` temporarily
holds the gradients of the autograd context. Then the averages are moved to the context, and `.grad` is restored.

For that, the DDP modules of the parameters in a pass must be found, in an order that is the same on all replicas.
torch has no list of DDP modules, and only C++ code can get from a parameter, or from its AccumulateGrad node, to
its DDP module. So importing this module registers a global hook that torch calls whenever a module gets a
submodule. DDP's constructor sets one, the module that it wraps; the hook then records the DDP module in the
metadata of the AccumulateGrad nodes of its parameters. Global forward hooks, registered only while a context is
open, would be worse: they slow down every module, make torch.compile warn, and miss what was computed before the
context was opened.

DDP modules that were constructed before the import are not recorded. They can exist only if torch.distributed was
initialized by then. In that case the import searches for them, and any pass that involves one is refused.
"""

import gc
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import AutogradError
from .graph import start_node

__all__ = ["average", "may_exist", "replicated_modules"]

METADATA_KEY = "gradwire.replicas"
"""Key in the metadata of an AccumulateGrad node; the value lists a record per DDP module with the parameter."""

may_exist = False
"""Whether this process may have, or have had, DDP modules."""


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """A DDP module, and when its constructor ran.

    constructed_ns: in nanoseconds of `time.monotonic_ns`; None if the import of this module was later. Modules are
        constructed in the same order on all replicas, because the constructor is a collective operation.
    module: the DDP module, which the record does not keep alive.
    """

    constructed_ns: int | None
    module: "weakref.ref[DistributedDataParallel]"


def _records(node: Any) -> Iterable[_Record]:
    """Returns the records of an AccumulateGrad node."""
    records: Iterable[_Record] = node.metadata.get(METADATA_KEY, ())
    return records


def _replicated_parameters(wrapped: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a wrapped module that require grad, without uninitialized ones of lazy modules."""
    return [each for each in wrapped.parameters() if each.requires_grad and not is_lazy(each)]


def _record_module(module: DistributedDataParallel, wrapped: nn.Module, constructed_ns: int | None) -> None:
    """Records a DDP module in the metadata of the AccumulateGrad nodes of the parameters that it wraps."""
    global may_exist  # noqa: PLW0603
    may_exist = True
    record = _Record(constructed_ns, weakref.ref(module))
    nodes = [start_node(parameter) for parameter in _replicated_parameters(wrapped)]
    for node in nodes:
        node.metadata[METADATA_KEY] = [*(each for each in _records(node) if each.module()), record]
    # A parameter does not keep its AccumulateGrad node alive. The finalizer keeps the nodes, and so the records,
    # while the DDP module lives; after its constructor, DDP keeps them too.
    weakref.finalize(module, nodes.clear).atexit = False


def _on_submodule(module: nn.Module, name: str, submodule: nn.Module | None) -> None:  # noqa: ARG001
    """Records a DDP module when its constructor sets the wrapped module. torch calls this for all modules."""
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _record_module(module, submodule, time.monotonic_ns())


def replicated_modules(nodes: Iterable[Any]) -> list[DistributedDataParallel]:
    """Returns the DDP modules of the parameters with these AccumulateGrad nodes, in the order of construction.

    It is the same on all replicas. Raises AutogradError if a module has a static graph, or is too old.
    """
    records = {record for node in nodes for record in _records(node)}
    if any(record.constructed_ns is None and record.module() for record in records):
        raise AutogradError(
            "a DistributedDataParallel module was made before gradwire was imported, so it is not known in "
            "which order it averages among others: import gradwire first"
        )
    in_order = [record.module() for record in sorted(records, key=lambda record: record.constructed_ns or 0)]
    modules = [module for module in in_order if module is not None]
    if any(module.static_graph for module in modules):
        raise AutogradError(
            "DistributedDataParallel(static_graph=True) averages its first gradients too early for an "
            "autograd context: leave static_graph out"
        )
    return modules


def _record_earlier_modules() -> None:
    """Records the DDP modules that were constructed before this module was imported."""
    for each in gc.get_objects():
        # Not isinstance, which reads `__class__`: that may run code of objects such as proxies.
        if issubclass(type(each), DistributedDataParallel):
            wrapped = each.__dict__.get("_modules", {}).get("module")
            if wrapped is None:  # the constructor has failed before it set the module
                continue
            nodes = [start_node(parameter) for parameter in _replicated_parameters(wrapped)]
            if not any(record.module() is each for node in nodes for record in _records(node)):
                _record_module(each, wrapped, None)


register_module_module_registration_hook(_on_submodule)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    _record_earlier_modules()


def average(
    module: DistributedDataParallel,
    captured: Mapping[torch.Tensor, torch.Tensor | None],
    so_far: Mapping[torch.Tensor, torch.Tensor],
) -> dict[torch.Tensor, torch.Tensor]:
    """Averages the gradients of a DDP module among its replicas. A collective: waits until all replicas call it.

    Args:
        module: the DDP module. As with `loss.backward()`, inside `module.no_sync()` nothing is averaged.
        captured: by parameter, the gradient that this pass has computed; None for a parameter without one.
        so_far: by leaf, the gradients that the context accumulated in earlier passes.

    Returns:
        By parameter of the module, the gradient that the context now has, earlier passes included.
    """
    parameters: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    roots = [parameter for parameter in parameters if parameter in captured]
    if not roots:
        return {}  # another DDP module with the same parameters has averaged them
    with _grads_replaced(parameters, so_far), _without_hooks(roots):
        # DDP waits for the AccumulateGrad node of every parameter in the graph, so all of them get a gradient.
        gradients = [torch.zeros_like(root) if captured[root] is None else captured[root] for root in roots]
        torch.autograd.backward(roots, gradients)
        averaged = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        # With gradient_as_bucket_view, `.grad` is a view of DDP's communication bucket, which DDP writes to again.
        return {parameter: each.clone() if each._is_view() else each for parameter, each in averaged.items()}


@contextmanager
def _grads_replaced(
    parameters: Sequence[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor]
) -> Iterator[None]:
    """Context manager that replaces the `.grad` of parameters by copies of `gradients`, then restores it.

    Parameters that are not in `gradients` get None meanwhile.
    """
    before = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    values_before = _copies(before)  # `.grad` may share memory with the buckets in which DDP averages
    replacements = _copies({parameter: gradients[parameter] for parameter in parameters if parameter in gradients})
    for parameter in parameters:
        parameter.grad = replacements.get(parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = before.get(parameter)
        for parameter, value in values_before.items():
            before[parameter].copy_(value)


@contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context manager that disables the hooks of tensors, which have already run on the captured gradients."""
    disabled = [
        (tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks
    ]
    for hooks, _ in disabled:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in disabled:
            hooks.update(before)


def _copies(gradients: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    return {parameter: gradient.clone() for parameter, gradient in gradients.items()}
