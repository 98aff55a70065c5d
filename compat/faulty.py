"""Implements torch's fault-injecting backend FAULTY_TENSORPIPE with gradwire's FAULTY backend.

gradwire sends calls of torch's operators and of Python functions as messages of one type, so torch's SCRIPT_… and
PYTHON_… message types are equivalent here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from .. import rpc
from ..c10d.torch_types import TorchStore
from ..rpc.fault_injection import FaultyRpcBackendOptions, start_faulty_agent
from .extensions import TORCH_STYLE_EXTENSIONS
from .tensorpipe import TensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeRpcBackendOptions", "construct_options", "start"]

MESSAGE_TYPES = {
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": "autograd.release",
    "PYTHON_CALL": "CALL",
    "PYTHON_REMOTE_CALL": "RREF_CREATE",
    "PYTHON_RREF_FETCH_CALL": "RREF_FETCH",
    "RREF_CHILD_ACCEPT": "rref.accept",
    "RREF_FORK_REQUEST": "rref.fork",
    "RREF_USER_DELETE": "rref.delete",
    "SCRIPT_CALL": "CALL",
    "SCRIPT_REMOTE_CALL": "RREF_CREATE",
    "SCRIPT_RREF_FETCH_CALL": "RREF_FETCH",
}
"""gradwire's names of message types, by torch's."""


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """The options of the backend FAULTY_TENSORPIPE: those of TENSORPIPE, and faults.

    Args:
        num_worker_threads: as of TENSORPIPE.
        rpc_timeout: likewise.
        init_method: likewise.
        messages_to_fail: torch's names of the message types whose first sends on this worker fail.
        messages_to_delay: the delay of each send in seconds, by torch's name of the message type.
        num_fail_sends: how many sends of each message type in `messages_to_fail` fail.
    """

    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: Sequence[str],
        messages_to_delay: Mapping[str, float],
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay)
        self.num_fail_sends = num_fail_sends


def start(
    store: TorchStore, name: str, rank: int, world_size: int | None, rpc_backend_options: rpc.RpcBackendOptions
) -> rpc.RpcAgent:
    """Starts an agent with injected faults. Raises TypeError, or ValueError if a message type is unknown."""
    options = rpc_backend_options
    if not isinstance(options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`, but it is {options!r}"
        )
    delays: dict[str, float] = {}
    for message, seconds in options.messages_to_delay.items():
        delays[_translate(message)] = max(seconds, delays.get(_translate(message), 0.0))
    faults = FaultyRpcBackendOptions(
        **{each.name: getattr(options, each.name) for each in fields(rpc.RpcBackendOptions)},
        messages_to_fail=sorted({_translate(message) for message in options.messages_to_fail}),
        num_fail_sends=options.num_fail_sends,
        messages_to_delay=delays,
    )
    return start_faulty_agent(store, name, rank, world_size, faults, TORCH_STYLE_EXTENSIONS)


def construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = 16,
    messages_to_fail: Sequence[str] = (),
    messages_to_delay: Mapping[str, float] | None = None,
    num_fail_sends: int = 0,
    **_others: object,
) -> FaultyTensorPipeRpcBackendOptions:
    """Makes the options of the backend; ignores unknown ones, as torch does."""
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail, messages_to_delay or {}, num_fail_sends
    )


def _translate(message: str) -> str:
    if message not in MESSAGE_TYPES:
        raise ValueError(
            f"message type {message!r} cannot fail or be delayed: give one of {', '.join(MESSAGE_TYPES)}"
        )
    return MESSAGE_TYPES[message]
