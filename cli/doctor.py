"""`gradwire doctor`: checks of this machine: what is installed, the host, its clock, and the credentials."""

import json
import os
import platform
import resource
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten
from typing import Literal, final

import click

from .. import __version__
from ..logs import VARIABLE as LOG_VARIABLE
from ..logs import parse_levels
from .group import Command
from .store import DEFAULT_PORT

__all__ = [
    "ROOT",
    "check_clock",
    "check_credentials",
    "check_engines",
    "check_limits",
    "check_memory",
    "check_network",
    "check_ports",
    "check_versions",
    "command",
]

REQUIRED_PACKAGES = ("torch", "grpcio", "protobuf", "numpy", "cryptography", "click", "psutil")

OPTIONAL_PACKAGES = ("mpi4py", "cupy", "cloudpickle")
"""Import names; on PyPI, cupy is published under one name per CUDA version."""

ALWAYS_THERE = ("gloo", "shm")
"""The engines that need no other package."""

MIB = 1 << 20

SMALL_SHARED_MEMORY_BYTES = 64 * MIB
"""What Docker gives a container in /dev/shm."""

FEW_FILES = 1024
"""A worker opens some files for each other worker."""

SECRET_FILES = ("GRADWIRE_TOKEN_FILE", "GRADWIRE_KEY")

CERTIFICATES = ("GRADWIRE_CA", "GRADWIRE_CERTIFICATE")

SOON = timedelta(days=2)

RENEW = "make another with `gradwire certs`; workers that run use it for new connections"

STORE_VARIABLE = "GRADWIRE_STORE"

MAX_OFFSET_S = 1.0
"""Seconds by which clocks may differ: log lines and certificates then say much the same everywhere."""

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@final
@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the report.

    level: whether all is well, something does not work or is slow in some programs, or nothing works.
    check: what has been looked at, in few words.
    text: what was found.
    advice: what to do; empty if all is well.
    """

    level: Literal["ok", "warning", "problem"]
    check: str
    text: str
    advice: str = ""


def _ok(check: str, text: str) -> _Finding:
    """Returns that all is well."""
    return _Finding("ok", check, text)


def _warning(check: str, text: str, advice: str) -> _Finding:
    """Returns that something does not work, or is slow, in some programs."""
    return _Finding("warning", check, text, advice)


def _problem(check: str, text: str, advice: str) -> _Finding:
    """Returns that nothing works."""
    return _Finding("problem", check, text, advice)


ROOT = Path(__file__).parent.parent
"""The folder of the package, which is also that of a checkout."""


OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The releases on which gradwire is tested."""


def _version_of(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    if package == "torch":
        import torch

        return torch.__version__  # includes the CUDA version of the build
    for name in (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_versions() -> Iterator[_Finding]:
    """Yields what is installed."""
    yield _ok("gradwire", f"{__version__} in {ROOT}, on Python {platform.python_version()}")
    for package in REQUIRED_PACKAGES:
        try:
            found = _version_of(package)
        except (ImportError, OSError) as error:  # torch, or a library that it needs, is missing
            yield _problem(package, f"cannot be imported: {error}", f"install {package} anew")
            continue
        if found is None:
            yield _problem(package, "not installed", f"pip install {package}")
        elif package == "torch" and not OLDEST_TORCH <= _release(found) <= NEWEST_TORCH:
            tested = " to ".join(".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
            yield _warning(package, f"{found}, which is not tested", f"install one of {tested}")
        else:
            yield _ok(package, found)
    for package in OPTIONAL_PACKAGES:
        yield _ok(package, _version_of(package) or "not installed (optional)")


def check_engines() -> Iterator[_Finding]:
    """Yields which engines run here. mpi and nccl need packages that are optional."""
    from ..c10d.groups.backends import BUILTIN_ENGINES, why_unavailable

    for engine in sorted(BUILTIN_ENGINES):
        reason = why_unavailable(engine)
        text = "available" if reason is None else f"not available: {shorten(reason, 200, placeholder=' …')}"
        if reason is not None and engine in ALWAYS_THERE:
            yield _warning(engine, text, "use another engine for process groups")
        else:
            yield _ok(engine, text)


def _release(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version such as 2.13.0+cpu."""
    return tuple(int(number) for number in text.split(".")[:2])


def check_network() -> Iterator[_Finding]:
    """Yields the interfaces, the address that other hosts are told, and whether names can be resolved."""
    from ..errors import ProcessGroupError, StoreError
    from ..net.addresses import INTERFACE_VARIABLE, address_for_others, interface_addresses, is_local, resolve

    interfaces = ", ".join(f"{name} {' '.join(found)}" for name, found in interface_addresses().items())
    yield _ok("interfaces", interfaces or "none has an address")
    choose = f"to choose another interface, set {INTERFACE_VARIABLE}"
    try:
        address = address_for_others()
    except ProcessGroupError as error:
        yield _problem(
            "address for other hosts", str(error), f"set {INTERFACE_VARIABLE} to an interface, or unset it"
        )
    else:
        if is_local(address):
            text = f"{address}, which only this host reaches"
            yield _warning("address for other hosts", text, f"for several hosts, connect a network; {choose}")
        else:
            yield _ok("address for other hosts", f"{address} ({choose})")
    if host := os.environ.get("MASTER_ADDR"):
        try:
            yield _ok("MASTER_ADDR", f"{host} is {', '.join(sorted(resolve(host)))}")
        except StoreError as error:
            yield _problem("MASTER_ADDR", str(error), "set it to an address of rank 0's host")


def check_ports() -> Iterator[_Finding]:
    """Yields whether this process can listen on TCP ports."""
    from ..errors import ProcessGroupError
    from ..net.addresses import LOOPBACK, address_for_others

    addresses = [LOOPBACK]
    with suppress(ProcessGroupError):
        addresses.append(address_for_others())
    for address in dict.fromkeys(addresses):
        if (error := _bind_error(address, 0)) is None:
            yield _ok(address, "can listen on a port that the system chooses")
        else:
            yield _problem(address, f"cannot listen: {error}", "allow this process to listen on TCP ports")
    text = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if not text.isdecimal() or int(text) > 65535:
        yield _problem("MASTER_PORT", f"{text!r} is no port", "set it to a number from 1 to 65535")
    elif error := _bind_error(LOOPBACK, int(text)):
        advice = "if that is not the store of this job, set MASTER_PORT to a free port on all workers"
        yield _warning(f"port {text}", f"cannot be used: {error}", advice)
    else:
        yield _ok(f"port {text}", "is free for a store")


def _check_sockets() -> Iterator[_Finding]:
    """Yields the directory for the unix sockets of this host's workers."""
    from ..net.user_sockets import SocketDirectory, UnsafePathError

    try:
        directory = SocketDirectory.of_this_user()
    except UnsafePathError as error:
        yield _problem("directory", str(error), "make it yours with mode 0700, or set XDG_RUNTIME_DIR")
    else:
        yield _ok("directory", f"{directory.path}, which only user {os.geteuid()} can use")


def check_memory() -> Iterator[_Finding]:
    """Yields whether workers of this host can share memory."""
    try:
        os.close(os.memfd_create("gradwire-doctor", os.MFD_ALLOW_SEALING))
    except OSError as error:
        advice = "allow memfd_create in the sandbox of this process; large tensors take a slower way without it"
        yield _warning("memfd", f"cannot be made: {error.strerror}", advice)
    else:
        yield _ok("memfd", "can be made, for large tensors between workers of this host")
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        advice = "mount it, for the DataLoaders of torch and for MPI; gradwire itself does without"
        yield _warning("/dev/shm", f"cannot be used: {error.strerror}", advice)
        return
    text = f"{usage.free // MIB} MiB free of {usage.total // MIB}; gradwire itself does not use it"
    if usage.free < SMALL_SHARED_MEMORY_BYTES:
        advice = "enlarge it for the DataLoaders of torch and for MPI: docker run --shm-size=8g, or --ipc=host"
        yield _warning("/dev/shm", text, advice)
    else:
        yield _ok("/dev/shm", text)


def check_limits() -> Iterator[_Finding]:
    """Yields how many files this process may open, and how much memory it may lock."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        text = f"{soft}; a worker opens several for each other worker"
        yield _warning("open files", text, f"ulimit -n {FEW_FILES if hard < FEW_FILES else hard}")
    else:
        yield _ok("open files", _limit(soft))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = os.listdir("/sys/class/infiniband") if os.path.isdir("/sys/class/infiniband") else []
    if devices and soft != resource.RLIM_INFINITY:
        text = f"{_limit(soft, MIB)} MiB, with InfiniBand ({', '.join(sorted(devices))})"
        yield _warning("locked memory", text, "for NCCL and MPI by InfiniBand: ulimit -l unlimited")
    else:
        yield _ok("locked memory", _limit(soft, MIB) + " MiB" * (soft != resource.RLIM_INFINITY))


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


VARIABLES = (
    *SECRET_FILES,
    *CERTIFICATES,
    "GRADWIRE_ADVERTISED_HOST",
    "GRADWIRE_COMPAT",
    "GRADWIRE_HOST",
    "GRADWIRE_INSECURE",
    "GRADWIRE_LOG",
    "GRADWIRE_OTEL",
    "GRADWIRE_PORTS",
    "GRADWIRE_SPAWN_STORE",
    "GRADWIRE_STORE",
    "GRADWIRE_SUSPECT_AFTER",
    "GRADWIRE_TOKEN",
    "GRADWIRE_VIEW",
    "GRADWIRE_VIEW_KEY",
    "GRADWIRE_WORKER_NAME",
)
"""What gradwire reads from the environment, or sets in it."""


def check_credentials() -> Iterator[_Finding]:
    """Yields which credentials there are, and whether they can be used."""
    from ..errors import CredentialsError
    from ..net.addresses import INSECURE_VARIABLE, allows_insecure
    from ..net.security import Credentials

    yield from _unknown_variables()
    try:
        parse_levels(os.environ.get(LOG_VARIABLE) or "warning")
    except ValueError as error:
        yield _problem(LOG_VARIABLE, str(error), "correct it, or unset it: gradwire cannot be imported with it")
    try:
        if allows_insecure(insecure=False):
            text, advice = "process groups trust the network", "unset it where there are credentials"
            yield _warning(INSECURE_VARIABLE, text, advice)
    except ValueError as error:
        yield _problem(INSECURE_VARIABLE, str(error), "set it to 1, or unset it")
    try:
        credentials = Credentials.from_environment()
        if credentials is not None:
            credentials.identity()
    except CredentialsError as error:
        yield _problem("credentials", str(error), "make others with `gradwire certs`, or unset the variables")
        return
    if credentials is None:
        yield _ok("credentials", "none: for workers of one host only. For several hosts: gradwire certs token")
        return
    yield _ok("credentials", "a token" if credentials.token is not None else "certificates")
    for variable in SECRET_FILES:
        if path := os.environ.get(variable):
            yield _check_private(variable, Path(path))
    for variable in CERTIFICATES:
        if path := os.environ.get(variable):
            yield _check_validity(variable, Path(path))


def _unknown_variables() -> Iterator[_Finding]:
    for name in sorted(os.environ):
        if name.startswith("GRADWIRE_") and name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, 1)
            advice = f"did you mean {near[0]}?" if near else "unset it"
            yield _warning(name, "gradwire does not know this variable", advice)


def _check_private(variable: str, path: Path) -> _Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return _warning(variable, f"{path} has mode {mode:04o}: others can use it", f"chmod 600 {path}")
    return _ok(variable, f"{path}, for its owner only")


def _check_validity(variable: str, path: Path) -> _Finding:
    """Returns until when certificates are valid; those of the past are refused by `Credentials.identity`."""
    from cryptography import x509

    end = min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(path.read_bytes()))
    text = f"{path}, valid until {end:%Y-%m-%d %H:%M} UTC"
    if end < datetime.now(UTC):
        return _problem(variable, text, RENEW)
    return _warning(variable, text, RENEW) if end < datetime.now(UTC) + SOON else _ok(variable, text)


def check_clock(store: str | None = None) -> Iterator[_Finding]:
    """Yields how far the clock of this host differs from that of the store's.

    Args:
        store: host and port of the store; None for GRADWIRE_STORE.
    """
    given = store or os.environ.get(STORE_VARIABLE, "")
    if not given:
        text = f"not compared: run `gradwire store`, and set {STORE_VARIABLE} or pass --store HOST:PORT"
        yield _ok("clock", text)
        return
    host, _, port = given.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        yield _problem("store", f"{given!r} is no address", f"give HOST:PORT, by --store or {STORE_VARIABLE}")
        return
    from ..c10d.stores.remote import clock_offset
    from ..errors import CredentialsError, StoreError

    try:
        found = clock_offset(host.strip("[]"), int(port))
    except (StoreError, CredentialsError) as error:
        yield _warning("clock", f"cannot be compared: {error}", "start the store, or correct its address")
        return
    text = (
        f"that of {host} is {abs(found.seconds):.3f} s {'ahead' if found.seconds >= 0 else 'behind'}, "
        f"give or take {found.error:.3f} s"
    )
    if abs(found.seconds) - found.error > MAX_OFFSET_S:
        advice = "synchronize the clocks of all hosts (chrony, systemd-timesyncd): certificates count on them"
        yield _warning("clock", text, advice)
    else:
        yield _ok("clock", text)


SECTIONS: dict[str, Callable[[], Iterable[_Finding]]] = {
    "Versions": check_versions,
    "Engines of process groups": check_engines,
    "Network": check_network,
    "Ports": check_ports,
    "Sockets of one host": _check_sockets,
    "Shared memory": check_memory,
    "Limits": check_limits,
    "Credentials": check_credentials,
}


@click.command(
    "doctor",
    cls=Command,
    epilog="""
    gradwire doctor
    gradwire doctor --store node0:29500       # compares the clock with that host's
    gradwire doctor --json | jq '.[] | select(.level != "ok")'
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects: level, check, text, advice.")
@click.option(
    "--store", metavar="HOST:PORT", help=f"A running `gradwire store`; by default that of {STORE_VARIABLE}."
)
def command(*, as_json: bool, store: str | None) -> int:
    """Checks whether gradwire can run here, and says what to do if not.

    Each line is ok, a warning (something will not work, or be slow, in some programs) or a problem (nothing will
    work). The exit status is 1 if there is a problem. The environment counts, so run it as the program is run.
    """
    checks: dict[str, Callable[[], Iterable[_Finding]]] = {**SECTIONS, "Clock": partial(check_clock, store)}
    sections: dict[str, list[_Finding]] = {}
    for name, check in checks.items():
        sections[name] = list(check())
        if name == "Versions" and _has_problem(sections[name]):
            break  # the other checks need what is missing
    findings = [finding for section in sections.values() for finding in section]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for name, section in sections.items():
            click.echo(name)
            for finding in section:
                _show(finding)
        counts = {level: sum(finding.level == level for finding in findings) for level in ("warning", "problem")}
        click.echo(f"problems: {counts['problem']}, warnings: {counts['warning']}")
    return int(_has_problem(findings))


def _has_problem(findings: Iterable[_Finding]) -> bool:
    return any(finding.level == "problem" for finding in findings)


def _show(finding: _Finding) -> None:
    click.echo(f"  {click.style(f'{finding.level:<8}', fg=COLORS[finding.level])} {finding.check}: {finding.text}")
    if finding.advice:
        click.echo(f"           {finding.advice}")
