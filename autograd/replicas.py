"""Modules in torch's DistributedDataParallel (DDP) in a distributed backward pass.

DDP averages gradients among replicas in C++ hooks on the nodes that accumulate them in `.grad`. A worker's part of
a pass does not run those nodes, so nothing would be averaged. The gradients of replicated parameters are therefore
passed on by an ordinary backward pass that starts at the parameters. It runs their nodes, and with them DDP's
hooks, while `.grad` holds the gradients of the context. Afterwards the context has the averages, and `.grad` is
what it was.

That takes the DDP modules of the parameters in a pass, in an order that is the same on all replicas. torch has no
list of DDP modules, and neither a parameter nor its node leads to them, except in C++. So importing this module
registers a hook that torch calls whenever a module gets a submodule. DDP gets one, the module that it wraps; the
hook then notes the DDP module in the metadata of the nodes of its parameters. No smaller effect serves: hooks on
forward calls, registered only while a context is open, would slow down every module meanwhile, make torch.compile
warn, and miss what was computed before the context was opened.

DDP modules that were made before the import have no notes. If torch.distributed was initialized by then (else
there are none), the first pass searches for them, in order to refuse them.
"""

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import AutogradError
from .graph import start_node

__all__ = ["Replicas", "average"]

NOTES = "gradwire.replicas"
"""The key of the notes in the metadata of an accumulation node, one for each DDP module that has its parameter."""

MAY_HAVE_EARLIER_MODULES = torch.distributed.is_available() and torch.distributed.is_initialized()
"""Whether DDP modules can have been made before this module was imported."""


@dataclass(frozen=True, slots=True, eq=False)
class _Note:
    """A DDP module and when it was made, in ns of `time.monotonic_ns`; None if it was before the import.

    The order in which modules are made is the same on all replicas, because making one is a collective operation.
    """

    made_ns: int | None
    module: "weakref.ref[DistributedDataParallel]"


def _notes(node: Any) -> Iterable[_Note]:
    """Returns the notes of an accumulation node."""
    notes: Iterable[_Note] = node.metadata.get(NOTES, ())
    return notes


def _replicated_parameters(wrapped: nn.Module) -> list[nn.Parameter]:
    return [each for each in wrapped.parameters() if each.requires_grad and not is_lazy(each)]


def _note(module: DistributedDataParallel, wrapped: nn.Module, made_ns: int | None) -> None:
    note = _Note(made_ns, weakref.ref(module))
    nodes = [start_node(parameter) for parameter in _replicated_parameters(wrapped)]
    for node in nodes:
        node.metadata[NOTES] = [*(each for each in _notes(node) if each.module()), note]
    # The nodes are kept for the module until it is complete; from then on it keeps them itself.
    weakref.finalize(module, nodes.clear).atexit = False


def _on_submodule(module: nn.Module, name: str, submodule: nn.Module | None) -> None:  # noqa: ARG001
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _note(module, submodule, time.monotonic_ns())


register_module_module_registration_hook(_on_submodule)


@final
class Replicas:
    """Finds the DDP modules that take part in a pass. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_searched = not MAY_HAVE_EARLIER_MODULES

    def modules_of(self, nodes: Iterable[Any]) -> list[DistributedDataParallel]:
        """Returns the DDP modules that have a parameter with one of these accumulation nodes.

        They are in the order in which they were made, which is the same on all replicas.

        Raises:
            AutogradError: one of them has a static graph, or was made before this package was imported.
        """
        self._search_earlier_modules()
        notes = {note for node in nodes for note in _notes(node)}
        if any(note.made_ns is None and note.module() for note in notes):
            raise AutogradError(
                "a DistributedDataParallel module was made before gradwire was imported, so it is not known in "
                "which order it averages among others: import gradwire first"
            )
        modules = [note.module() for note in sorted(notes, key=lambda note: note.made_ns or 0)]
        found = [module for module in modules if module is not None]
        if any(module.static_graph for module in found):
            raise AutogradError(
                "DistributedDataParallel(static_graph=True) averages its first gradients too early for an "
                "autograd context: leave static_graph out"
            )
        return found

    def _search_earlier_modules(self) -> None:
        with self._lock:
            if self._has_searched:
                return
            for each in gc.get_objects():
                if issubclass(type(each), DistributedDataParallel) and (wrapped := _wrapped(each)) is not None:
                    nodes = [start_node(parameter) for parameter in _replicated_parameters(wrapped)]
                    if not any(note.module() is each for node in nodes for note in _notes(node)):
                        _note(each, wrapped, None)
            self._has_searched = True


def _wrapped(module: DistributedDataParallel) -> nn.Module | None:
    """Returns the module that a DDP module wraps, None if the DDP module could not be completed."""
    wrapped: nn.Module | None = module.__dict__.get("_modules", {}).get("module")
    return wrapped


def average(
    module: DistributedDataParallel,
    captured: Mapping[torch.Tensor, torch.Tensor | None],
    so_far: Mapping[torch.Tensor, torch.Tensor],
) -> dict[torch.Tensor, torch.Tensor]:
    """Has a DDP module average gradients among its replicas; waits until they do so too.

    Args:
        module: the module. As with `loss.backward()`, inside `module.no_sync()` nothing is averaged.
        captured: the gradients that a pass has computed for its parameters.
        so_far: the gradients that the context had before.

    Returns:
        The gradients of the module's parameters that the context has now.
    """
    parameters: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    roots = [parameter for parameter in parameters if parameter in captured]
    if not roots:
        return {}  # another DDP module with the same parameters has averaged them
    with _grads_replaced(parameters, so_far), _without_hooks(roots):
        # DDP requires a gradient for every parameter in the graph.
        gradients = [torch.zeros_like(root) if captured[root] is None else captured[root] for root in roots]
        torch.autograd.backward(roots, gradients)
        found = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        # A view shares memory with the bucket in which DDP averages.
        return {parameter: each.clone() if each._is_view() else each for parameter, each in found.items()}


@contextmanager
def _grads_replaced(
    parameters: Sequence[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor]
) -> Iterator[None]:
    """Context manager that replaces the `.grad` of parameters by copies of other gradients, or None."""
    before = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    values = _copies(before)  # they may share memory with the buckets in which DDP averages
    other = _copies({parameter: gradients[parameter] for parameter in parameters if parameter in gradients})
    for parameter in parameters:
        parameter.grad = other.get(parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = before.get(parameter)
        for parameter, value in values.items():
            before[parameter].copy_(value)


@contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context manager that disables the hooks of tensors, which ran when the gradients were captured."""
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
