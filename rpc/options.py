"""How an agent behaves."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["ChannelOptions", "RpcBackendOptions"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Where the bytes of bodies and tensors travel.

    inline_threshold: bytes below which a payload travels inside its envelope.
    max_inline_bytes: bytes of payloads that one envelope carries inside at most; the rest is chunked.
    chunk_bytes: bytes of one chunk of a larger payload.
    max_payload_bytes: bytes of the largest payload a worker accepts from another; nothing larger is allocated.
    """

    inline_threshold: int = 128 * KIB
    max_inline_bytes: int = MIB
    chunk_bytes: int = MIB
    max_payload_bytes: int = 16 * GIB

    def __post_init__(self) -> None:
        _at_least(self, 1)
        if self.max_inline_bytes > 32 * MIB or self.chunk_bytes > 32 * MIB:
            raise ValueError("max_inline_bytes and chunk_bytes can be 32 MiB at most: gRPC frames hold no more")


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcBackendOptions:
    """The options of `init_rpc`.

    rpc_timeout: seconds after which a call without a timeout of its own fails; 0 is never.
    init_method: the URL workers meet at: env://, tcp://host:port or file:///path.
    init_timeout: seconds to wait for all workers to join.
    num_worker_threads: threads that run incoming calls side by side. More are started while these wait for
        other calls, so nesting never runs dry.
    host: the address to listen on and to be called at. By default the loopback address.
    insecure: allow a host that other machines can reach, although nothing proves who calls. Anybody who
        reaches a worker can run code in it.
    channels: where tensor bytes travel.
    """

    rpc_timeout: float = 60.0
    init_method: str = "env://"
    init_timeout: float = 300.0
    num_worker_threads: int = 16
    host: str = "127.0.0.1"
    insecure: bool = False
    channels: ChannelOptions = field(default_factory=ChannelOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.rpc_timeout < math.inf:
            raise ValueError(f"rpc_timeout is {self.rpc_timeout!r}: give seconds, or 0 for no timeout")
        if not 0 < self.init_timeout < math.inf:
            raise ValueError(f"init_timeout is {self.init_timeout!r}: give seconds, more than 0")
        if self.num_worker_threads < 1:
            raise ValueError(f"num_worker_threads is {self.num_worker_threads!r}: at least 1 is needed")
        if not isinstance(self.channels, ChannelOptions):
            raise TypeError(f"channels is {self.channels!r}: give a ChannelOptions")


def _at_least(options: Any, least: int) -> None:
    for option in fields(options):
        value = getattr(options, option.name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{option.name} is {value!r}: give a whole number of bytes, at least {least}")
