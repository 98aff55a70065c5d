"""The systems that are compared. Their Python API is the same, so one program runs on both."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
import gradwire.autograd
import gradwire.optim
import gradwire.rpc
import torch
import torch.distributed.autograd
import torch.distributed.optim
import torch.distributed.rpc

__all__ = [
    "GRADWIRE",
    "GRADWIRE_GRPC",
    "GRADWIRE_TCP",
    "SYSTEMS",
    "TORCH",
    "TORCH_UV",
    "System",
    "gradwire_system",
    "start",
    "system_here",
    "torch_system",
    "worker_name",
]


@dataclass(frozen=True, slots=True)
class System:
    """One of the systems, as a program sees it.

    rpc, autograd: its modules.
    optimizer_class: its class of distributed optimizers.
    options: makes the options of an agent from the URL of the rendezvous.
    """

    name: str
    version: str
    rpc: Any
    autograd: Any
    optimizer_class: Any
    options: Callable[[str], Any]

    def start(self, rank: int, world_size: int, url: str) -> None:
        """Joins the RPC group as one of the system's workers, with one thread for torch's operations."""
        global _here  # noqa: PLW0603
        _here = self
        torch.set_num_threads(1)
        _drop_warnings_of_torch()
        self.rpc.init_rpc(
            worker_name(rank), rank=rank, world_size=world_size, rpc_backend_options=self.options(url)
        )


def _drop_warnings_of_torch() -> None:
    """Has warnings about what torch itself calls not shown. Filters do not do: torch overrides them."""
    show = warnings.showwarning
    folder = str(Path(torch.__file__).parent)

    def show_others(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if not filename.startswith(folder):
            show(message, category, filename, *rest)

    warnings.showwarning = show_others


_here: System | None = None


def system_here() -> System:
    """Returns the system that this process is a worker of; for functions that other workers call."""
    assert _here is not None, "no system has been started"
    return _here


def worker_name(rank: int) -> str:
    """Returns the name of the worker with this rank."""
    return f"worker{rank}"


def torch_system(name: str, **options: Any) -> System:
    """Returns TensorPipe with these options."""
    return System(
        name,
        torch.__version__,
        torch.distributed.rpc,
        torch.distributed.autograd,
        torch.distributed.optim.DistributedOptimizer,
        lambda url: torch.distributed.rpc.TensorPipeRpcBackendOptions(init_method=url, **options),
    )


def gradwire_system(name: str, **options: Any) -> System:
    """Returns gradwire with these options."""
    return System(
        name,
        gradwire.__version__,
        gradwire.rpc,
        gradwire.autograd,
        gradwire.optim.DistributedOptimizer,
        lambda url: gradwire.rpc.RpcBackendOptions(init_method=url, **options),
    )


GRADWIRE = gradwire_system("gradwire")
"""gradwire with its default options: a unix socket and shared memory on one host."""

GRADWIRE_TCP = gradwire_system("gradwire-tcp", transports=("tcp", "grpc"))
"""gradwire over TCP, as between hosts."""

GRADWIRE_GRPC = gradwire_system("gradwire-grpc", transports=("grpc",))
"""gradwire over its gRPC stream alone."""

TORCH = torch_system("torch")
"""TensorPipe with its default options: through shared memory on one host, with threads that spin."""

TORCH_UV = torch_system("torch-tcp", _transports=["uv"], _channels=["basic"])
"""TensorPipe over TCP, as between hosts. It does not spin."""

SYSTEMS = {system.name: system for system in (GRADWIRE, GRADWIRE_TCP, GRADWIRE_GRPC, TORCH, TORCH_UV)}


def start(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group of one of SYSTEMS: starts a worker of a WorkerSet. Returns what leaves it."""
    SYSTEMS[name].start(rank, size, url)
    return SYSTEMS[name].rpc.shutdown  # type: ignore[no-any-return]
