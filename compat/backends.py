"""The backends TENSORPIPE and FAULTY_TENSORPIPE, with torch's options, which start gradwire's agent.

gradwire sends calls of torch's operators and of Python functions as messages of one type, so torch's SCRIPT_… and
PYTHON_… message types are equivalent here.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Final, final

from .. import rpc
from ..c10d.torch_types import TorchStore
from ..rpc.agent.grpc_agent import GrpcAgent
from ..rpc.contracts.devices import Device
from ..rpc.contracts.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT, TRANSPORTS
from ..rpc.fault_injection import FaultyRpcBackendOptions, start_faulty_agent
from ..rpc.grpc_backend import start_agent
from .extensions import TORCH_STYLE_EXTENSIONS

__all__ = [
    "FaultyTensorPipeRpcBackendOptions",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "construct_faulty_options",
    "construct_tensorpipe_options",
    "defaults",
    "start_faulty",
    "start_tensorpipe",
]

log = logging.getLogger(__name__)


@final
@dataclass(slots=True)
class _Defaults:
    """Defaults of options that torch lacks, by the options' names, for programs written without them."""

    insecure: bool = False
    host: str | None = None
    transports: Sequence[str] = TRANSPORTS


defaults: Final = _Defaults()
"""The defaults of this process; `install` sets them."""


class RpcBackendOptions(rpc.RpcBackendOptions):
    """Options with the arguments of torch's base class. `insecure` and `host` can be set as attributes."""

    CONSENT: ClassVar[str] = (
        "start the program by `gradwire run --insecure`, call gradwire.compat.install(insecure=True) "
        "before init_rpc, or set `insecure = True` on the rpc_backend_options"
    )

    backend_name: ClassVar[str] = "TensorPipe"

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is {rpc_timeout!r}: give a number of seconds"
            )
        super().__init__(
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            insecure=defaults.insecure,
            host=defaults.host,
            transports=defaults.transports,
        )


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The options of the backend TENSORPIPE: see `gradwire.rpc.RpcBackendOptions`.

    `_transports` and `_channels` name components of TensorPipe. They are ignored, with a log line at level DEBUG.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps = device_maps or {}
        self.devices = devices or ()
        for option, value in (("_transports", _transports), ("_channels", _channels)):
            if value is not None:
                log.debug("%s=%r is ignored: it names components of TensorPipe", option, value)


def construct_tensorpipe_options(
    rpc_timeout: float, init_method: str, **options: Any
) -> TensorPipeRpcBackendOptions:
    """Makes the options of the backend; ignores unknown ones, as torch does."""
    known = ("num_worker_threads", "_transports", "_channels")
    given = {name: options[name] for name in known if name in options}
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **given)


def start_tensorpipe(
    store: TorchStore, name: str, rank: int, world_size: int | None, rpc_backend_options: rpc.RpcBackendOptions
) -> rpc.RpcAgent:
    """Starts an agent. Raises TypeError if the options are not a TensorPipeRpcBackendOptions."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, but it is {rpc_backend_options!r}"
        )
    make_agent = partial(GrpcAgent, extensions=TORCH_STYLE_EXTENSIONS)
    return start_agent(store, name, rank, world_size, rpc_backend_options, make_agent)


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


def start_faulty(
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


def construct_faulty_options(
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
