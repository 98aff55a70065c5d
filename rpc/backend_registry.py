"""The registry of RPC backends, which `init_rpc` starts by name."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

from ..errors import RpcError
from .contracts.agent import RpcAgent
from .contracts.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT, RpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions that make a backend's options and start its agent."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., RpcAgent]


class _Backends(type):
    """The metaclass of BackendType, which makes it an enumeration that grows by registration."""

    _members: dict[str, "BackendType"]

    @property
    def __members__(cls) -> Mapping[str, "BackendType"]:
        return MappingProxyType(cls._members)

    def __getitem__(cls, name: str) -> "BackendType":
        return cls._members[name]

    def __getattr__(cls, name: str) -> "BackendType":
        try:
            return cls._members[name]
        except KeyError:
            known = ", ".join(cls._members)
            raise AttributeError(f"no RPC backend {name!r} is registered; registered are: {known}") from None

    def __iter__(cls) -> Iterator["BackendType"]:
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)


@final
class BackendType(metaclass=_Backends):
    """The registered backends: `BackendType.GRADWIRE`, or by name `BackendType["GRADWIRE"]`.

    name: the registered name.
    value: the functions that make its options and start its agent.
    """

    _members: dict[str, "BackendType"] = {}  # noqa: RUF012 - the registry

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)


def _named(name: str) -> BackendType:
    return BackendType[name]


def backend_registered(backend_name: str) -> bool:
    """Returns whether a backend of this name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., RpcAgent],
) -> BackendType:
    """Registers a backend.

    Args:
        backend_name: its name, which becomes a member of BackendType.
        construct_rpc_backend_options_handler: called as `(rpc_timeout, init_method, **options)` by
            `construct_rpc_backend_options`.
        init_backend_handler: called as `(store=, name=, rank=, world_size=, rpc_backend_options=)` by `init_rpc`
            once it is connected to the store; returns an agent that has joined its group. In a dynamic group
            rank is -1 unless the caller gives one, and world_size is None.

    Returns:
        The member of BackendType.

    Raises:
        RpcError: the name is registered already.
    """
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    backend = BackendType._members[backend_name] = BackendType(backend_name, value)
    return backend


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Returns a backend's options.

    Args:
        backend: the backend.
        rpc_timeout: seconds that a call may take by default, 0 for no limit.
        init_method: the URL of the rendezvous.
        kwargs: further options of the backend.
    """
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> RpcAgent:
    """Starts a backend's agent with these arguments, and returns it once it has joined its group."""
    return backend.value.init_backend_handler(*args, **kwargs)
