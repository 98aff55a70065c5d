"""Modules under torch's DistributedDataParallel (DDP) in a distributed backward pass.

DDP averages gradients among its replicas in a hook, in C++, on the nodes that accumulate them in `.grad`. A
worker's part of a pass captures gradients and accumulates none, so nothing would be averaged. Therefore those
of replicated parameters go on from there by an ordinary backward pass that starts at the parameters: their nodes
run, DDP's hook with them, while `.grad` holds what the context has. In the end the context has the averages, and
`.grad` is what it was.
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
from .closure import start_node

__all__ = ["average", "replicated_modules"]

NOTES = "gradwire.replicas"
"""Under this name the metadata of an accumulation node have a note of each DDP module with its parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class _Note:
    """A DDP module, and when it was made, in ns: the order among modules is the same on all replicas.

    made: None if it is not known.
    """

    made: int | None
    module: "weakref.ref[DistributedDataParallel]"


def _note(module: DistributedDataParallel, wrapped: nn.Module, made: int | None) -> None:
    note = _Note(made, weakref.ref(module))
    nodes = [start_node(each) for each in wrapped.parameters() if each.requires_grad and not is_lazy(each)]
    for node in nodes:
        node.metadata[NOTES] = [*(each for each in node.metadata.get(NOTES, ()) if each.module()), note]
    # The module holds its parameters' nodes itself, but only once it is complete.
    weakref.finalize(module, nodes.clear).atexit = False


def _note_new(module: nn.Module, name: str, submodule: nn.Module | None) -> None:  # noqa: ARG001
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _note(module, submodule, time.monotonic_ns())


def _note_old() -> None:
    for each in gc.get_objects() if torch.distributed.is_initialized() else ():
        if issubclass(type(each), DistributedDataParallel):
            _note(each, each.module, None)


_note_old()
register_module_module_registration_hook(_note_new)  # which DDP calls when it gets the module that it wraps


def replicated_modules(nodes: Iterable[Any]) -> list[DistributedDataParallel]:
    """The DDP modules that have a parameter with one of these accumulation nodes, in the order on all replicas.

    Raises:
        AutogradError: one of them has a static graph, or was made before this package was imported.
    """
    notes = {note for node in nodes for note in node.metadata.get(NOTES, ())}
    if any(note.made is None and note.module() for note in notes):
        raise AutogradError(
            "a DistributedDataParallel module was made before gradwire was imported, so it is not known in which "
            "order it averages among others: import gradwire first"
        )
    modules = [note.module() for note in sorted(notes, key=lambda note: note.made or 0)]
    found = [module for module in modules if module is not None]
    if any(module.static_graph for module in found):
        raise AutogradError(
            "DistributedDataParallel(static_graph=True) averages its first gradients too early for an autograd "
            "context: leave static_graph out"
        )
    return found


def average(
    module: DistributedDataParallel,
    captured: Mapping[torch.Tensor, torch.Tensor | None],
    so_far: Mapping[torch.Tensor, torch.Tensor],
) -> dict[torch.Tensor, torch.Tensor]:
    """Has a DDP module average gradients with its replicas; waits until those have come as far.

    Args:
        module: the module. As with `loss.backward()`, inside `module.no_sync()` nothing is averaged.
        captured: what a pass has found for its parameters.
        so_far: the gradients that the context had before.

    Returns:
        The gradients that the context has of the module's parameters now.
    """
    parameters: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    roots = [parameter for parameter in parameters if parameter in captured]
    if not roots:
        return {}  # another DDP module with the same parameters has been through
    with _gradients_in_place(parameters, so_far), _without_hooks(roots):
        # DDP counts on a gradient for every parameter in the graph.
        gradients = [torch.zeros_like(root) if captured[root] is None else captured[root] for root in roots]
        torch.autograd.backward(roots, gradients)
        found = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        # A view lies in the memory in which DDP averages.
        return {parameter: each.clone() if each._is_view() else each for parameter, each in found.items()}


@contextmanager
def _gradients_in_place(
    parameters: Sequence[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor]
) -> Iterator[None]:
    """The parameters have copies of other gradients for a while."""
    before = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    values = _copies(before)  # they may lie in the memory in which DDP averages
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
    """The hooks of the tensors do not run: they have, when the gradients were captured."""
    hooks = [
        (tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks
    ]
    for those, _ in hooks:
        those.clear()
    try:
        yield
    finally:
        for those, before in hooks:
            those.update(before)


def _copies(gradients: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    return {parameter: gradient.clone() for parameter, gradient in gradients.items()}
