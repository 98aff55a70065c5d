"""Clips gradients by their total norm over all workers.

The algorithm is norm clipping (Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
networks", 2013): if the norm of the concatenated gradients exceeds a threshold, all of them are multiplied by
threshold / norm. The p-norm of a concatenation is the p-norm of the parts' p-norms, so the owners of the
parameters send one number per parameter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..autograd import get_gradients
from ..rpc.contracts.policy import expose
from ..rref import RRef
from ..rref.rref import call_with_values
from .local_optimizer import check_leaves
from .parameter_groups import Parameter, indices_by_owner, parse_parameters, wait_for_owners

__all__ = ["clip_grad_norm_"]

EPSILON = 1e-6
"""Added to the norm before dividing by it; the value that torch.nn.utils.clip_grad_norm_ uses."""


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[RRef[torch.Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients of an autograd context so that their norm over all workers is at most `max_norm`.

        autograd.backward(context_id, [loss])
        clip_grad_norm_(context_id, parameter_rrefs, max_norm=1.0)
        optimizer.step(context_id)

    All gradients count as one vector, as in `torch.nn.utils.clip_grad_norm_`. Each owner gets one request for the
    norms of its gradients and, if the total is too large, one to scale them. Gradients are scaled in place, so
    tensors that `get_gradients` returned before change too. `.grad` is not used.

    Args:
        context_id: the id that `autograd.context()` yielded.
        params_rref: references to parameters, owned by any workers. Parameters without a gradient are skipped.
        max_norm: the largest norm that is not scaled; at least 0.
        norm_type: the p of the p-norm; `math.inf` or "inf" for the maximum norm.
        error_if_nonfinite: whether to raise if the total norm is nan or infinite. If False, such a norm makes the
            gradients nan or 0, as in torch.

    Returns:
        The norm before clipping: a tensor of shape () on the CPU; 0 if no parameter has a gradient.

    Raises:
        TypeError: `params_rref` is not an iterable of RRefs.
        ValueError: `max_norm` is negative or nan, or a reference is not to a leaf tensor, or appears twice.
        UnknownContextError: an owner has no such context.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is True. No gradient has changed.
        WorkerLostError, RpcTimeoutError: an owner did not answer.
    """
    parameters = parse_parameters(params_rref)
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm:g}: give a number that is not negative")
    norms = _gradient_norms(parameters, context_id, norm_type)
    total = _total_norm(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is non-finite ({total.item()}), so they cannot "
            "be clipped. error_if_nonfinite=False scales them all the same"
        )
    scale = max_norm / (total + EPSILON)
    if norms and not scale >= 1:  # also if it is nan
        _scale_gradients([parameters[index] for index in sorted(norms)], context_id, scale)
    return total


def _gradient_norms(parameters: Sequence[Parameter], context_id: int, norm_type: float) -> dict[int, torch.Tensor]:
    """Returns the norms of the parameters' gradients by index; parameters without a gradient are left out."""
    owners = indices_by_owner(parameters)
    requests = {
        owner: call_with_values(
            [parameters[index].rref for index in indices],
            _norms_on_owner,
            [parameters[index].label for index in indices],
            context_id,
            norm_type,
        )
        for owner, indices in owners.items()
    }
    return {
        owners[owner][position]: norm
        for owner, (positions, norms) in wait_for_owners(requests, "taking the norms of gradients").items()
        for position, norm in zip(positions, norms, strict=True)
    }


def _total_norm(norms: Mapping[int, torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the p-norm of all gradients from their single norms; 0 if there are none."""
    if not norms:
        return torch.tensor(0.0)
    # In the order of the parameters, not of the owners, so that rounding does not depend on who owns what.
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norms[index] for index in sorted(norms)]), norm_type
    )
    return total


def _scale_gradients(parameters: Sequence[Parameter], context_id: int, scale: torch.Tensor) -> None:
    """Multiplies the gradients of parameters, all of which have one, on their owners."""
    requests = {
        owner: call_with_values([parameters[index].rref for index in indices], _scale_on_owner, context_id, scale)
        for owner, indices in indices_by_owner(parameters).items()
    }
    wait_for_owners(requests, "scaling gradients")


# The functions below run on the owners of the parameters.


@expose
def _norms_on_owner(
    leaves: Sequence[torch.Tensor], labels: Sequence[str], context_id: int, norm_type: float
) -> tuple[list[int], torch.Tensor]:
    """Returns the positions in `leaves` of those that have a gradient, and the norms of these, shape (n,), CPU."""
    check_leaves(leaves, labels)
    gradients = get_gradients(context_id)
    norms = {
        position: torch.linalg.vector_norm(_stored_values(gradients[leaf]), norm_type).cpu()
        for position, leaf in enumerate(leaves)
        if leaf in gradients
    }
    return list(norms), torch.stack(list(norms.values())) if norms else torch.empty(0)


@expose
def _scale_on_owner(leaves: Sequence[torch.Tensor], context_id: int, scale: torch.Tensor) -> None:
    gradients = get_gradients(context_id)
    for leaf in leaves:
        gradients[leaf].mul_(scale.to(gradients[leaf].device))


def _stored_values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor with the same norm: of a sparse gradient, its values after duplicates are summed."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
