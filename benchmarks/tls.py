"""Measures what encryption between hosts costs a call, and what it costs on one host where nothing is set up.

python -m benchmarks.tls                         # a table on stdout: half a minute
python -m benchmarks.tls --rounds 200            # longer, for less noise
python -m benchmarks.tls --save docs/benchmarks  # also writes the table to tls.txt in that folder

The hosts are two network namespaces, joined by a pair of virtual interfaces (veth), which takes root; the kernel
removes a namespace with the last process in it, so nothing is left however the benchmark ends. Without root, both
workers are on this host, and use TCP on the loopback address. Each row has workers of its own, in alternating
rounds of one run; the others are stopped.
"""

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gradwire import rpc
from gradwire.c10d import Credentials

from .calls import PEER, Noop, noop, noop_times
from .command_line import Report, add_rounds, arguments_of, make_parser
from .harness import RATIO_HEADER, Comparison, measure_rounds
from .systems import worker_name
from .worker_sets import WorkerSet, preload, take_turns

SAVED = "tls.txt"
"""The file that `--save` writes."""

VARIABLES = ("TOKEN", "TOKEN_FILE", "CA", "CERTIFICATE", "KEY")
"""Of the environment, after GRADWIRE_: with them, all rows would have credentials."""

HEADER = f"{'':24}{'carried by':>11}{'calls':>9}{'median':>9}{'p99':>9}{'cpu':>9}{RATIO_HEADER}"


_NEW_NET = 0x40000000
"""The flag of setns(2) for network namespaces."""

COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Variant:
    """How two workers are connected, the options, and the name of the variant that this one is compared with."""

    between_hosts: bool
    has_token: bool
    insecure: bool
    baseline: str = ""


VARIANTS = {
    "two hosts, insecure": Variant(between_hosts=True, has_token=False, insecure=True),
    "two hosts, mutual TLS": Variant(
        between_hosts=True, has_token=True, insecure=False, baseline="two hosts, insecure"
    ),
    "one host, insecure": Variant(between_hosts=False, has_token=False, insecure=True),
    "one host, no set-up": Variant(
        between_hosts=False, has_token=False, insecure=False, baseline="one host, insecure"
    ),
}


@dataclass(frozen=True, slots=True)
class Host:
    """A host on which a process can run.

    address: of its interface.
    namespace: the path of its network namespace; None for that of this process.
    """

    address: str
    namespace: str | None = None

    def enter(self) -> None:
        """Moves this process to the host. It must have one thread only."""
        if self.namespace is None:
            return
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NET):
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Context manager that makes two hosts.

    Raises:
        OSError, subprocess.SubprocessError: none can be made; that takes root, `ip`, `unshare` and `nsenter`.
    """
    with contextlib.ExitStack() as stack:
        first, second = processes = [stack.enter_context(_namespace()) for _ in range(2)]
        _run_in(first, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
        hosts = []
        for number, process in enumerate(processes, 1):
            host = Host(f"10.91.0.{number}", f"/proc/{process}/ns/net")
            _run_in(process, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run_in(process, "ip", "link", "set", interface, "up")
            hosts.append(host)
        yield hosts


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Context manager that makes a network namespace; its value is the id of a process in it."""
    command = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]  # which ends with this process
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise PermissionError(f"no network namespace can be made: {holder.stderr.read().decode().strip()}")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _run_in(process: int, *command: str) -> None:
    """Runs a command in the network namespace of a process."""
    inside = ["nsenter", "--net", f"--target={process}", *command]
    subprocess.run(inside, check=True, timeout=COMMAND_TIMEOUT_S, capture_output=True)


def start(hosts: Sequence[Host], token: str, name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group of a variant, on one of the hosts if that is between hosts."""
    torch.set_num_threads(1)
    for variable in VARIABLES:
        os.environ.pop(f"GRADWIRE_{variable}", None)
    variant = VARIANTS[name]
    options = rpc.RpcBackendOptions(
        init_method=url,
        insecure=variant.insecure,
        credentials=Credentials(token=token) if variant.has_token else None,
    )
    if variant.between_hosts:
        hosts[rank].enter()
        options.host, options.transports = hosts[rank].address, ("tcp", "grpc")
    rpc.init_rpc(worker_name(rank), rank=rank, world_size=size, rpc_backend_options=options)
    return rpc.shutdown


def carrier() -> str:
    """Returns what carries the messages to the peer: "unix", "tcp" or "grpc"."""
    rpc.rpc_sync(PEER, noop)
    return str(rpc.debug_info()["transports"][PEER])


def measure(hosts: Sequence[Host], rounds: int, seconds: float) -> tuple[Comparison, dict[str, str]]:
    """Measures all variants. Returns their comparison, and what carries messages, by variant."""
    begin = partial(start, hosts, secrets.token_urlsafe(32))
    with contextlib.ExitStack() as stack:
        sets = [stack.enter_context(WorkerSet(name, 2, begin)) for name in VARIANTS]
        carriers = {worker_set.name: worker_set.ask(carrier) for worker_set in take_turns(sets, 1)}
        return measure_rounds(Noop, sets, rounds, lambda each: each.ask(noop_times, seconds)), carriers


def row(comparison: Comparison, name: str, carrier: str) -> str:
    """Returns the line of a variant."""
    baseline = VARIANTS[name].baseline
    ratios = "" if not baseline else comparison.ratio_columns(name, baseline)
    return f"{name:24}{carrier:>11}{comparison.time_columns(name)}{ratios}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.tls", __doc__, SAVED)
    add_rounds(parser, rounds=48, seconds=0.1)
    parser.add_argument("--loopback", action="store_true", help="do not make network namespaces")
    arguments = arguments_of(parser, argv)
    text = (
        f"Microseconds of a call that carries nothing, in {arguments.rounds} rounds of {arguments.seconds:g} s of "
        "each row; processor time (cpu) is that of both workers together. Ratios are those to the row above: the "
        "median of those of the medians of single rounds; in brackets, the lowest and the highest one."
    )
    with contextlib.ExitStack() as stack:
        hosts, what = _hosts(stack, loopback=arguments.loopback)
        report = Report(text, HEADER, hosts=what)
        comparison, carriers = measure(hosts, arguments.rounds, arguments.seconds)
    for name, carried_by in carriers.items():
        report.print(row(comparison, name, carried_by))
        report.measured.append({"carried by": carried_by, **comparison.figures(name)})
    report.close(arguments, SAVED)


def _hosts(stack: contextlib.ExitStack, *, loopback: bool) -> tuple[list[Host], str]:
    """Makes two hosts where that is possible; returns them, and what they are."""
    if not loopback:
        try:
            return stack.enter_context(two_hosts()), "network namespaces, joined by a pair of virtual interfaces"
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"; {error}"
    else:
        reason = ""
    return [Host("127.0.0.1")] * 2, f"this one, by TCP on the loopback address{reason}"


if __name__ == "__main__":
    preload()
    main()
