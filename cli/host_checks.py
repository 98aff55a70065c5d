"""What `gradwire doctor` looks at on this host: network, ports, sockets, shared memory, limits."""

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress

from .findings import Finding, ok, problem, warning
from .store import DEFAULT_PORT

__all__ = ["check_limits", "check_memory", "check_network", "check_ports", "check_sockets"]

MIB = 1 << 20
SMALL_SHARED_MEMORY_BYTES = 64 * MIB
"""What Docker gives a container in /dev/shm."""

FEW_FILES = 1024
"""A worker opens some files for each other worker."""


def check_network() -> Iterator[Finding]:
    """Yields the interfaces, the address that other hosts are told, and whether names can be resolved."""
    from ..errors import ProcessGroupError, StoreError
    from ..net.addresses import INTERFACE_VARIABLE, address_for_others, interface_addresses, is_local, resolve

    interfaces = ", ".join(f"{name} {' '.join(found)}" for name, found in interface_addresses().items())
    yield ok("interfaces", interfaces or "none has an address")
    choose = f"to choose another interface, set {INTERFACE_VARIABLE}"
    try:
        address = address_for_others()
    except ProcessGroupError as error:
        yield problem(
            "address for other hosts", str(error), f"set {INTERFACE_VARIABLE} to an interface, or unset it"
        )
    else:
        if is_local(address):
            text = f"{address}, which only this host reaches"
            yield warning("address for other hosts", text, f"for several hosts, connect a network; {choose}")
        else:
            yield ok("address for other hosts", f"{address} ({choose})")
    if host := os.environ.get("MASTER_ADDR"):
        try:
            yield ok("MASTER_ADDR", f"{host} is {', '.join(sorted(resolve(host)))}")
        except StoreError as error:
            yield problem("MASTER_ADDR", str(error), "set it to an address of rank 0's host")


def check_ports() -> Iterator[Finding]:
    """Yields whether this process can listen on TCP ports."""
    from ..errors import ProcessGroupError
    from ..net.addresses import LOOPBACK, address_for_others

    addresses = [LOOPBACK]
    with suppress(ProcessGroupError):
        addresses.append(address_for_others())
    for address in dict.fromkeys(addresses):
        if (error := _bind_error(address, 0)) is None:
            yield ok(address, "can listen on a port that the system chooses")
        else:
            yield problem(address, f"cannot listen: {error}", "allow this process to listen on TCP ports")
    text = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if not text.isdecimal() or int(text) > 65535:
        yield problem("MASTER_PORT", f"{text!r} is no port", "set it to a number from 1 to 65535")
    elif error := _bind_error(LOOPBACK, int(text)):
        advice = "if that is not the store of this job, set MASTER_PORT to a free port on all workers"
        yield warning(f"port {text}", f"cannot be used: {error}", advice)
    else:
        yield ok(f"port {text}", "is free for a store")


def check_sockets() -> Iterator[Finding]:
    """Yields the directory for the unix sockets of this host's workers."""
    from ..net.user_sockets import SocketDirectory, UnsafePathError

    try:
        directory = SocketDirectory.of_this_user()
    except UnsafePathError as error:
        yield problem("directory", str(error), "make it yours with mode 0700, or set XDG_RUNTIME_DIR")
    else:
        yield ok("directory", f"{directory.path}, which only user {os.geteuid()} can use")


def check_memory() -> Iterator[Finding]:
    """Yields whether workers of this host can share memory."""
    try:
        os.close(os.memfd_create("gradwire-doctor", os.MFD_ALLOW_SEALING))
    except OSError as error:
        advice = "allow memfd_create in the sandbox of this process; large tensors take a slower way without it"
        yield warning("memfd", f"cannot be made: {error.strerror}", advice)
    else:
        yield ok("memfd", "can be made, for large tensors between workers of this host")
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        advice = "mount it, for the DataLoaders of torch and for MPI; gradwire itself does without"
        yield warning("/dev/shm", f"cannot be used: {error.strerror}", advice)
        return
    text = f"{usage.free // MIB} MiB free of {usage.total // MIB}; gradwire itself does not use it"
    if usage.free < SMALL_SHARED_MEMORY_BYTES:
        advice = "enlarge it for the DataLoaders of torch and for MPI: docker run --shm-size=8g, or --ipc=host"
        yield warning("/dev/shm", text, advice)
    else:
        yield ok("/dev/shm", text)


def check_limits() -> Iterator[Finding]:
    """Yields how many files this process may open, and how much memory it may lock."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        text = f"{soft}; a worker opens several for each other worker"
        yield warning("open files", text, f"ulimit -n {FEW_FILES if hard < FEW_FILES else hard}")
    else:
        yield ok("open files", _limit(soft))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = os.listdir("/sys/class/infiniband") if os.path.isdir("/sys/class/infiniband") else []
    if devices and soft != resource.RLIM_INFINITY:
        text = f"{_limit(soft, MIB)} MiB, with InfiniBand ({', '.join(sorted(devices))})"
        yield warning("locked memory", text, "for NCCL and MPI by InfiniBand: ulimit -l unlimited")
    else:
        yield ok("locked memory", _limit(soft, MIB) + " MiB" * (soft != resource.RLIM_INFINITY))


def _bind_error(address: str, port: int) -> str | None:
    """Returns why nobody can listen on an address; None if this process can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)
