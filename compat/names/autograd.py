"""`torch.distributed.autograd`, and what it has in C++."""

from collections.abc import Callable, Mapping

from ... import autograd
from .. import contexts, debug_info

__all__ = ["TABLES"]


def _c_names() -> Mapping[str, object]:
    return {
        "DistAutogradContext": contexts.DistAutogradContext,
        "_current_context": contexts.current,
        "_get_debug_info": debug_info.autograd_info,
        "_get_max_id": contexts.greatest_id,
        "_init": _nothing_to_do,
        "_is_valid_context": contexts.is_valid,
        "_new_context": contexts.new,
        "_release_context": contexts.release,
        "_retrieve_context": contexts.retrieve,
        "backward": contexts.backward,
        "get_gradients": autograd.get_gradients,
    }


def _nothing_to_do(worker_id: int) -> None:
    """Autograd is there as soon as the agent is."""


TABLES: dict[str, Callable[[], Mapping[str, object]]] = {
    "torch._C._distributed_autograd": _c_names,
    "torch.distributed.autograd": lambda: {"context": contexts.context},
}
