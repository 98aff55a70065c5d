"""The gradients that a context has accumulated on a worker, and the hooks that see them.

torch's engine returns the gradients of leaves instead of running the nodes that add them to `.grad`. What those
nodes do besides is therefore done here, after the engine: running their own hooks, and those of
`register_post_accumulate_grad_hook`. Hooks on tensors are run by the engine itself.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from ..rpc.execution.ctrl_c import wait_interruptibly
from ..torch_internals import storage_use_count

__all__ = ["GradSwapLock", "LeafGradients", "total"]

GradientsByLeaf = dict[torch.Tensor, torch.Tensor]


def _references_in_accumulate() -> int:
    """Returns what sys.getrefcount returns for an object that a list and one local variable refer to."""
    values = [object()]
    value = values[0]
    return sys.getrefcount(value)


UNSHARED = _references_in_accumulate()
"""The references to a gradient in `LeafGradients.accumulate` if nothing else refers to it."""


def _references_to_base(view: torch.Tensor) -> tuple[int, int] | None:
    """Returns how many references Python and C++ have to the tensor that a tensor is a view of, if it is one."""
    base = view._base
    return None if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


UNSHARED_BASE = _references_to_base(torch.zeros(1).view(1))
"""The references to a tensor that nothing but a view of it refers to."""


def _add(before: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    if before.is_sparse and not more.is_sparse:
        return more + before  # torch adds sparse to dense, not the other way round
    return before + more


def total(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum of two gradients, either of which may be None, or sparse."""
    if before is None or more is None:
        return before if more is None else more
    return _add(before, more)


@final
class GradSwapLock:
    """Locks leaves whose `.grad` a thread has replaced by the gradient of a context, for hooks to see.

    A leaf is locked by one thread at a time, re-entrantly. While its hooks run, the thread may lock further
    leaves, so a hook can run passes, also by way of other workers.
    """

    def __init__(self) -> None:
        self._unlocked = threading.Condition()
        self._owners: dict[torch.Tensor, int] = {}
        """The thread that has locked each leaf."""

    @contextmanager
    def swapped(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager that waits until no other thread has locked one of the leaves, and locks all of them."""
        me = threading.get_ident()
        with self._unlocked:
            wait_interruptibly(
                self._unlocked.wait_for, lambda: all(self._owners.get(leaf, me) == me for leaf in leaves)
            )
            locked = [leaf for leaf in leaves if leaf not in self._owners]
            self._owners.update(dict.fromkeys(locked, me))
        try:
            yield
        finally:
            with self._unlocked:
                for leaf in locked:
                    del self._owners[leaf]
                self._unlocked.notify_all()


@final
class LeafGradients:
    """The gradients of one context by leaf. Safe to use from any thread."""

    def __init__(self, swap_lock: GradSwapLock) -> None:
        """Args: swap_lock: that of all contexts of the worker."""
        self._lock = threading.Lock()
        self._swap_lock = swap_lock
        self._gradients: GradientsByLeaf = {}

    def accumulate(
        self,
        nodes: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        before_hook: Callable[[], None],
    ) -> None:
        """Adds the gradients that a pass has computed, and runs the hooks of the leaves.

        A gradient that nothing else refers to is stolen, in torch's term: kept without a copy. Any other is
        copied. The caller keeps no other reference to them. Hooks may wait for other workers.
        """
        for index, node in enumerate(nodes):
            gradient = gradients[index]
            # A further reference belongs to a hook or a function that keeps the gradient, or to another leaf with
            # the same one.
            can_steal = (
                gradient is not None
                and sys.getrefcount(gradient) == UNSHARED
                and _can_steal(gradient, node.variable)
            )
            hooks, leaf = _hooks_of(node), node.variable
            if hooks[0] or hooks[1] or leaf._post_accumulate_grad_hooks:
                with torch.no_grad():  # as in torch's engine
                    self._accumulate_with_hooks(leaf, gradient, hooks, before_hook, can_steal=can_steal)
            elif gradient is not None:
                self._add(leaf, gradient, can_steal=can_steal)

    def get(self) -> GradientsByLeaf:
        """Returns all gradients so far."""
        with self._lock:
            return dict(self._gradients)

    def change(
        self, leaves: Sequence[torch.Tensor], compute: Callable[[GradientsByLeaf], GradientsByLeaf]
    ) -> None:
        """Replaces gradients by what a function, which changes the `.grad` of leaves, computes from all so far."""
        with self._swap_lock.swapped(leaves):
            changed = compute(self.get())
            with self._lock:
                self._gradients.update(changed)

    def clear(self) -> None:
        """Drops all gradients."""
        with self._lock:
            self._gradients.clear()

    def _accumulate_with_hooks(
        self,
        leaf: torch.Tensor,
        gradient: torch.Tensor | None,
        hooks: "NodeHooks",
        before_hook: Callable[[], None],
        *,
        can_steal: bool,
    ) -> None:
        """Does what an accumulation node with hooks does, for the context instead of `.grad`."""
        before, after = hooks
        for hook in list(before.values()):
            before_hook()
            changed = hook((gradient,))
            if changed is not None:
                gradient, can_steal = changed[0] if isinstance(changed, tuple) else changed, False
        if gradient is not None:
            self._add(leaf, gradient, can_steal=can_steal)
            self._run_post_accumulate_hooks(leaf, before_hook)
        for hook in list(after.values()):
            before_hook()
            hook((), (gradient,))

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, can_steal: bool) -> None:
        if gradient.requires_grad:
            gradient = gradient.detach()
        with self._lock:
            before = self._gradients.get(leaf)
            if before is not None:
                self._gradients[leaf] = _add(before, gradient)
            else:
                self._gradients[leaf] = gradient if can_steal else _copy(gradient, leaf)

    def _run_post_accumulate_hooks(self, leaf: torch.Tensor, before_hook: Callable[[], None]) -> None:
        """Runs these hooks with the gradient in `.grad`; the context keeps what they leave there."""
        hooks: Mapping[int, Any] | None = leaf._post_accumulate_grad_hooks
        if not hooks:
            return
        before_hook()
        with self._swap_lock.swapped([leaf]):
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


NodeHooks = tuple[dict[int, Any], dict[int, Any]]
"""The dicts of the hooks that a node runs before and after it: those registered later appear in them."""


def _hooks_of(node: Any) -> NodeHooks:
    """Returns the hooks of a node. torch gives access to them through the handle of a registered hook only."""
    before, after = node.register_prehook(_ignore), node.register_hook(_ignore)
    hooks: NodeHooks = before.hooks_dict_ref(), after.hooks_dict_ref()
    del hooks[0][before.id], hooks[1][after.id]
    return hooks


def _ignore(*_: Any) -> None:
    """A hook that does nothing."""


def _can_steal(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Returns whether a gradient can be kept without a copy; the caller checks that Python has no other reference.

    It can if C++ has none either, no other tensor shares its memory, and it is laid out like the leaf.
    """
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
    is_contiguous = gradient.is_contiguous() and leaf.is_contiguous()
    if not is_contiguous and gradient.stride() != torch.empty_like(leaf, device="meta").stride():
        return False
    uses = storage_use_count(gradient)
    if uses == 3:  # as of the gradient of a weight, which is a view of a tensor that nobody has any more
        references = _references_to_base(gradient)
        return references is not None and references == UNSHARED_BASE
    return uses == 2  # the gradient, and the call itself


def _copy(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a gradient that is laid out like the leaf."""
    if gradient.layout is not torch.strided:
        return gradient.clone()
    if gradient.is_contiguous() and leaf.is_contiguous() and not (gradient.is_conj() or gradient.is_neg()):
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(leaf, dtype=gradient.dtype, device=gradient.device, requires_grad=False).copy_(
        gradient
    )
