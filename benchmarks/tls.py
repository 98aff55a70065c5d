"""Measures what encryption between hosts costs a call, and what it costs on one host where nothing is set up.

python -m benchmarks.tls                         # a table on stdout: half a minute
python -m benchmarks.tls --rounds 200            # longer, for less noise
python -m benchmarks.tls --save docs/benchmarks  # also writes the table to tls.txt in that folder

The hosts are two network namespaces, which takes root; without, both workers are on this host, and use TCP on the
loopback address. Each row has workers of its own, in alternating rounds of one run; the others are stopped.
"""

import contextlib
import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire import rpc
from gradwire.c10d import Credentials

from .calls import PEER, noop, noop_times
from .harness import Comparison
from .machine import machine_facts
from .systems import worker_name
from .text_report import arguments_of, make_parser, publish
from .two_hosts import Host, two_hosts
from .worker_sets import WorkerSet, preload, take_turns

SAVED = "tls.txt"
"""The file that `--save` writes."""

VARIABLES = ("TOKEN", "TOKEN_FILE", "CA", "CERTIFICATE", "KEY")
"""Of the environment, after GRADWIRE_: with them, all rows would have credentials."""

HEADER = (
    f"{'':24}{'carried by':>11}{'calls':>9}{'median':>9}{'p99':>9}{'cpu':>9}"
    f"  | ratio: {'median':>7}  {'(rounds)':14}{'p99':>7}{'cpu':>7}"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """How two workers are connected.

    between_hosts: whether they are on two hosts.
    encrypted: whether they have a token.
    insecure: the option.
    """

    name: str
    between_hosts: bool
    encrypted: bool
    insecure: bool


IN_THE_CLEAR = Variant("two hosts, insecure", between_hosts=True, encrypted=False, insecure=True)
MUTUAL_TLS = Variant("two hosts, mutual TLS", between_hosts=True, encrypted=True, insecure=False)
INSECURE = Variant("one host, insecure", between_hosts=False, encrypted=False, insecure=True)
NO_SETUP = Variant("one host, no set-up", between_hosts=False, encrypted=False, insecure=False)
PAIRS = ((IN_THE_CLEAR, MUTUAL_TLS), (INSECURE, NO_SETUP))
"""What is compared: the first is the baseline."""

VARIANTS = {variant.name: variant for pair in PAIRS for variant in pair}


def start(hosts: Sequence[Host], token: str, name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group of a variant, on one of the hosts if that is between hosts."""
    torch.set_num_threads(1)
    for variable in VARIABLES:
        os.environ.pop(f"GRADWIRE_{variable}", None)
    variant = VARIANTS[name]
    options = rpc.RpcBackendOptions(
        init_method=url,
        insecure=variant.insecure,
        credentials=Credentials(token=token) if variant.encrypted else None,
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


def measure(hosts: Sequence[Host], rounds: int, seconds: float) -> tuple[list[Comparison], dict[str, str]]:
    """Measures all variants. Returns the comparison of each pair, and what carries messages, by variant."""
    times: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    cpu: dict[str, list[float]] = {name: [] for name in VARIANTS}
    begin = partial(start, hosts, secrets.token_urlsafe(32))
    with contextlib.ExitStack() as stack:
        sets = [stack.enter_context(WorkerSet(name, 2, begin)) for name in VARIANTS]
        carriers = {worker_set.name: worker_set.ask(carrier) for worker_set in take_turns(sets, 1)}
        for worker_set in take_turns(sets, rounds):
            before = sum(worker_set.ask_all(time.process_time))
            measured, uncounted = worker_set.ask(noop_times, seconds)
            used = sum(worker_set.ask_all(time.process_time)) - before
            times[worker_set.name].append(measured)
            cpu[worker_set.name].append(used / (len(measured) + uncounted))
    comparisons = [
        Comparison(
            other.name,
            2,
            {each.name: times[each.name] for each in (baseline, other)},
            cpu={each.name: cpu[each.name] for each in (baseline, other)},
        )
        for baseline, other in PAIRS
    ]
    return comparisons, carriers


def rows(comparison: Comparison, carriers: dict[str, str]) -> Iterator[str]:
    """Yields the line of the baseline, and the line of what is compared with it."""
    baseline, other = comparison.rounds
    for name in (baseline, other):
        line = f"{name:24}{carriers[name]:>11}{sum(map(len, comparison.rounds[name])):9}"
        line += "".join(
            f"{value(name) * 1e6:9.1f}" for value in (comparison.median, comparison.p99, comparison.cpu_of)
        )
        if name == other:
            ratios = comparison.ratios(other, baseline)
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            line += f"  |        {comparison.ratio(other, baseline):7.2f}  {spread:14}"
            line += f"{comparison.p99(other) / comparison.p99(baseline):7.2f}"
            line += f"{comparison.cpu_of(other) / comparison.cpu_of(baseline):7.2f}"
        yield line


def figures(comparison: Comparison, carriers: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the figures of a pair, in seconds."""
    return [
        {
            "variant": name,
            "carried by": carriers[name],
            "calls": sum(map(len, rounds)),
            "median": comparison.median(name),
            "p99": comparison.p99(name),
            "cpu": comparison.cpu_of(name),
            "medians of rounds": [statistics.median(each) for each in rounds],
        }
        for name, rounds in comparison.rounds.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("tls", __doc__, SAVED, rounds=48, seconds=0.1)
    parser.add_argument("--loopback", action="store_true", help="do not make network namespaces")
    arguments = arguments_of(parser, argv)
    facts = machine_facts()
    with contextlib.ExitStack() as stack:
        hosts, facts["hosts"] = _hosts(stack, loopback=arguments.loopback)
        comparisons, carriers = measure(hosts, arguments.rounds, arguments.seconds)
    text = (
        f"Microseconds of a call that carries nothing, in {arguments.rounds} rounds of {arguments.seconds:g} s of "
        "each row; processor time (cpu) is that of both workers together. Ratios are those to the row above; in "
        "brackets, the lowest and the highest ratio of the medians of a round."
    )
    table = [HEADER, *(line for comparison in comparisons for line in rows(comparison, carriers))]
    measured = [each for comparison in comparisons for each in figures(comparison, carriers)]
    publish(arguments, SAVED, facts, text, table, measured)


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
