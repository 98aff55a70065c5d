"""Clipping gradients by their norm over all workers."""

import math
from collections.abc import Iterable, Sequence

import torch

from ..autograd import get_gradients
from ..rref import RRef
from ..rref.proxy import call_with_values
from .local_optimizer import check_leaves
from .owners import wait_for_owners
from .parameter_groups import by_owner, read_parameters

__all__ = ["clip_grad_norm_"]

EPSILON = 1e-6
"""Added to the norm that is divided by; the value of torch.nn.utils.clip_grad_norm_."""


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[RRef[torch.Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients of a context so that their norm over all workers is at most `max_norm`.

        autograd.backward(context_id, [loss])
        clip_grad_norm_(context_id, parameter_rrefs, max_norm=1.0)
        optimizer.step(context_id)

    All gradients together count as one vector, as in `torch.nn.utils.clip_grad_norm_` (Pascanu et al., 2013).
    The owners are asked once for the norms and, if these are too large, once to scale. Gradients are scaled
    in place: tensors that `get_gradients` has returned change too. No `.grad` is touched.

    Args:
        context_id: what `autograd.context()` yielded.
        params_rref: references to parameters, on any workers; those without a gradient do not count.
        max_norm: the largest norm that is left as it is.
        norm_type: the p of the p-norm; `math.inf` or "inf" for the maximum.
        error_if_nonfinite: raise if the norm is nan or infinite. Otherwise it makes the gradients nan or 0, as
            in torch.

    Returns:
        The norm before clipping, a scalar on the CPU; 0 if there are no gradients.

    Raises:
        TypeError, ValueError: an argument cannot be.
        UnknownContextError: no such context on an owner.
        RuntimeError: the norm is not finite, and that is an error. No gradient has changed.
    """
    parameters = read_parameters(params_rref)
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm:g}: give a number that is not negative")
    owned = by_owner(parameters)
    answers = wait_for_owners(
        {
            owner: call_with_values(
                [parameters[number].rref for number in numbers],
                _norms,
                [parameters[number].label for number in numbers],
                context_id,
                norm_type,
            )
            for owner, numbers in owned.items()
        },
        "taking the norms of gradients",
    )
    # In the order of the parameters, whoever has them, so that the sum is always rounded alike.
    norms = {
        owned[owner][place]: norm
        for owner, (places, values) in answers.items()
        for place, norm in zip(places, values, strict=True)
    }
    if not norms:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norms[number] for number in sorted(norms)]), norm_type
    )
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is non-finite ({total.item()}), so they cannot "
            "be clipped. error_if_nonfinite=False scales them all the same"
        )
    scale = max_norm / (total + EPSILON)
    if not scale >= 1:  # nan too
        scaled = {owner: [owned[owner][place] for place in places] for owner, (places, _) in answers.items()}
        wait_for_owners(
            {
                owner: call_with_values([parameters[number].rref for number in numbers], _scale, context_id, scale)
                for owner, numbers in scaled.items()
                if numbers
            },
            "scaling gradients",
        )
    return total


# On the owners.


def _norms(
    leaves: Sequence[torch.Tensor], labels: Sequence[str], context_id: int, norm_type: float
) -> tuple[list[int], torch.Tensor]:
    """The norms of the gradients that there are, and which of the leaves they are of."""
    check_leaves(leaves, labels)
    gradients = get_gradients(context_id)
    norms = {
        place: torch.linalg.vector_norm(_values(gradients[leaf]), norm_type).cpu()
        for place, leaf in enumerate(leaves)
        if leaf in gradients
    }
    return list(norms), torch.stack(list(norms.values())) if norms else torch.empty(0)


def _scale(leaves: Sequence[torch.Tensor], context_id: int, scale: torch.Tensor) -> None:
    gradients = get_gradients(context_id)
    for leaf in leaves:
        gradients[leaf].mul_(scale.to(gradients[leaf].device))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient that are not zero for sure."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
