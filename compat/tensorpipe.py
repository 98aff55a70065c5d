"""The options of the backend TENSORPIPE, and the backend, which starts gradwire's agent."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, final

from .. import rpc
from ..c10d.torch_types import TorchStore
from ..rpc.agent.grpc_agent import GrpcAgent
from ..rpc.contracts.devices import Device
from ..rpc.contracts.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT, TRANSPORTS
from ..rpc.grpc_backend import start_agent
from .extensions import TORCH_STYLE_EXTENSIONS

__all__ = [
    "Defaults",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "construct_options",
    "defaults",
    "start",
]

log = logging.getLogger(__name__)


@final
@dataclass(slots=True)
class Defaults:
    """Defaults of options that torch lacks, by the options' names, for programs written without them."""

    insecure: bool = False
    host: str | None = None
    transports: Sequence[str] = TRANSPORTS


defaults: Final = Defaults()
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


def construct_options(rpc_timeout: float, init_method: str, **options: Any) -> TensorPipeRpcBackendOptions:
    """Makes the options of the backend; ignores unknown ones, as torch does."""
    known = ("num_worker_threads", "_transports", "_channels")
    given = {name: options[name] for name in known if name in options}
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **given)


def start(
    store: TorchStore, name: str, rank: int, world_size: int | None, rpc_backend_options: rpc.RpcBackendOptions
) -> rpc.RpcAgent:
    """Starts an agent. Raises TypeError if the options are not a TensorPipeRpcBackendOptions."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, but it is {rpc_backend_options!r}"
        )
    make_agent = partial(GrpcAgent, extensions=TORCH_STYLE_EXTENSIONS)
    return start_agent(store, name, rank, world_size, rpc_backend_options, make_agent)
