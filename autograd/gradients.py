"""The gradients that a context has accumulated on a worker, and the hooks that see them.

torch's engine hands leaves' gradients over instead of running the nodes that add them to `.grad`. So what those
nodes do besides is done here, after the engine is through: their own hooks, and those of
`register_post_accumulate_grad_hook`. Hooks on tensors the engine runs itself.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from ..torch_internals import storage_use_count
from .partial import add

__all__ = ["GradSwapLock", "LeafGradients"]

Gradients = dict[torch.Tensor, torch.Tensor]
"""By leaf."""


@final
class GradSwapLock:
    """Which threads have put other gradients into leaves' `.grad`, for hooks to see.

    A leaf has one borrower at a time. While its hooks run they may borrow other leaves, and on the same thread the
    same one, so a hook can run passes, also by way of other workers.
    """

    def __init__(self) -> None:
        self._returned = threading.Condition()
        self._borrowers: dict[torch.Tensor, int] = {}

    @contextmanager
    def swapped(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Waits until no other thread has one of the leaves; then this thread has all of them for a while."""
        me = threading.get_ident()
        with self._returned:
            self._returned.wait_for(lambda: all(self._borrowers.get(leaf, me) == me for leaf in leaves))
            borrowed = [leaf for leaf in leaves if leaf not in self._borrowers]
            self._borrowers.update(dict.fromkeys(borrowed, me))
        try:
            yield
        finally:
            with self._returned:
                for leaf in borrowed:
                    del self._borrowers[leaf]
                self._returned.notify_all()


@final
class LeafGradients:
    """Gradients by leaf. Safe to use from any thread."""

    def __init__(self, loans: GradSwapLock) -> None:
        """Args: loans: those of all contexts."""
        self._lock = threading.Lock()
        self._loans = loans
        self._gradients: Gradients = {}

    def accumulate(self, nodes: Sequence[Any], gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Adds what a pass has found.

        Args:
            nodes: the accumulation nodes of leaves.
            gradients: one for each, and perhaps more. A tensor that nobody else holds is taken as it is, any other
                is copied.

        Raises:
            Exception: what a hook raised.
        """
        seen: set[int] = set()
        for index, node in enumerate(nodes):
            leaf, gradient = node.variable, gradients[index]
            owned = gradient is not None and id(gradient) not in seen
            # The tuple, `gradient` and the argument: anybody else is a hook or a function that keeps it.
            owned = owned and sys.getrefcount(gradient) == 3 and _is_alone(gradient, leaf)  # type: ignore[arg-type]
            seen.add(id(gradient))
            for hook in _hooks(node.register_prehook):
                changed = hook((gradient,))
                if changed is not None:
                    gradient, owned = changed[0] if isinstance(changed, tuple) else changed, False
            if gradient is not None:
                self._add(leaf, gradient, owned=owned)
                self._run_post_accumulate_hooks(leaf)
            for hook in _hooks(node.register_hook):
                hook((), (gradient,))

    def get(self) -> Gradients:
        """All so far."""
        with self._lock:
            return dict(self._gradients)

    def change(self, leaves: Sequence[torch.Tensor], changed: Callable[[Gradients], Gradients]) -> None:
        """Has a function, which may use the `.grad` of these leaves, change gradients.

        Args:
            leaves: the leaves.
            changed: is given all gradients so far, and returns those that take the place of theirs.
        """
        with self._loans.swapped(leaves):
            gradients = changed(self.get())
            with self._lock:
                self._gradients.update(gradients)

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            self._gradients.clear()

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, owned: bool) -> None:
        gradient = gradient.detach()
        with self._lock:
            before = self._gradients.get(leaf)
            if before is not None:
                self._gradients[leaf] = add(before, gradient)
            else:
                self._gradients[leaf] = gradient if owned else _copy(gradient, leaf)

    def _run_post_accumulate_hooks(self, leaf: torch.Tensor) -> None:
        """Such a hook finds the gradient in `.grad`, and what it leaves there is the context's from then on."""
        hooks: Mapping[int, Any] | None = leaf._post_accumulate_grad_hooks
        if not hooks:
            return
        with self._loans.swapped([leaf]):
            before, leaf.grad = leaf.grad, self._gradients.get(leaf)
            try:
                for hook in list(hooks.values()):
                    hook(leaf)
            finally:
                left, leaf.grad = leaf.grad, before
                with self._lock:
                    if left is None:
                        self._gradients.pop(leaf, None)
                    else:
                        self._gradients[leaf] = left


def _hooks(register: Any) -> list[Any]:
    """The hooks of a node. Only a handle leads to where it keeps them."""
    handle = register(_nothing)
    hooks = [hook for hook in handle.hooks_dict_ref().values() if hook is not _nothing]
    handle.remove()
    return hooks


def _nothing(*_: Any) -> None:
    """Stands in for a hook."""


def _is_alone(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Does no other tensor share its memory, and is it laid out like a gradient of the leaf?"""
    if gradient._use_count() != 1:  # type: ignore[attr-defined]
        return False
    if gradient.is_sparse:
        return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    if (
        gradient.layout is not torch.strided
        or gradient.is_conj()
        or gradient.is_neg()
        or gradient._is_zerotensor()
    ):
        return False
    if gradient.stride() != torch.empty_like(leaf, device="meta").stride():
        return False
    return storage_use_count(gradient) == 2


def _copy(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Laid out like the leaf."""
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, device=gradient.device, requires_grad=False).copy_(
        gradient
    )
