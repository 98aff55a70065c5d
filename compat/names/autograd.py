"""Replacements for `torch.distributed.autograd` and its C++ extension."""

from collections.abc import Callable, Mapping

from ... import autograd
from .. import contexts, debug_info

__all__ = ["REPLACEMENTS"]


def _c_extension() -> Mapping[str, object]:
    return {
        "DistAutogradContext": contexts.DistAutogradContext,
        "_current_context": contexts.current,
        "_get_debug_info": debug_info.autograd_info,
        "_get_max_id": contexts.max_id,
        "_init": _init,
        "_is_valid_context": contexts.check_valid,
        "_new_context": contexts.new,
        "_release_context": contexts.release,
        "_retrieve_context": contexts.retrieve,
        "backward": contexts.backward,
        "get_gradients": autograd.get_gradients,
    }


def _init(worker_id: int) -> None:
    """Does nothing: the agent has autograd from its start."""


REPLACEMENTS: dict[str, Callable[[], Mapping[str, object]]] = {
    "torch._C._distributed_autograd": _c_extension,
    "torch.distributed.autograd": lambda: {"context": contexts.context},
}
