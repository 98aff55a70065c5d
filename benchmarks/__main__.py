"""Compares gradwire with torch.distributed.rpc on TensorPipe, in one run.

python -m benchmarks calls                        # a table on stdout
python -m benchmarks autograd
python -m benchmarks calls --system gradwire-grpc # over the gRPC stream alone
python -m benchmarks autograd --json FILE         # and the figures of every round in a file
python -m benchmarks autograd --peer torch-tcp    # TensorPipe over TCP, as between hosts
"""

import argparse
import importlib
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .harness import Comparison, compare
from .systems import GRADWIRE, SYSTEMS

SUBJECTS = ["autograd", "calls"]
"""Modules of this package with a list CASES."""

MILLISECONDS = 1e3


def main() -> None:
    """Runs the command line."""
    arguments = _arguments()
    system, peer = SYSTEMS[arguments.system], SYSTEMS[arguments.peer]
    subject = importlib.import_module(f".{arguments.subject}", __package__)
    cases = [case for case in subject.CASES if arguments.k in case.name]
    if not cases:
        raise SystemExit(f"no case of {arguments.subject} has {arguments.k!r} in its name")
    facts = machine_facts()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(
        f"\n{system.name} against {peer.name}, {arguments.rounds} rounds of {arguments.seconds:g} s each; "
        f"milliseconds of a step;\nratios of medians, p99 and processor time, below 1 {system.name} is faster; in "
        "brackets, the lowest\nand the highest ratio of the medians of a round\n"
    )
    print(header(system.name, peer.name), flush=True)
    comparisons = []
    for comparison in compare(cases, (system, peer), rounds=arguments.rounds, seconds=arguments.seconds):
        comparisons.append(comparison)
        print(row(comparison), flush=True)
    facts["load average after"] = _load()
    print(f"\nload average after (the benchmark's own included): {facts['load average after']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures(facts, comparisons), indent=1))


def machine_facts() -> dict[str, str]:
    """Returns the facts about machine and versions that the figures depend on."""
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
        "gradwire": GRADWIRE.version,
        "torch": SYSTEMS["torch"].version,
        "load average before": _load(),
    }


def header(first: str, second: str) -> str:
    """Returns the header of the table."""
    columns = "".join(f"{name + ' median':>21}{'p99':>9}{'cpu':>9}" for name in (first, second))
    return f"{'case':40}{columns}{'ratio':>8}{'p99':>7}{'cpu':>7}"


def row(comparison: Comparison) -> str:
    """Returns a line of the table."""
    columns = "".join(
        f"{comparison.median(name) * MILLISECONDS:21.3f}{comparison.p99(name) * MILLISECONDS:9.3f}"
        f"{comparison.cpu_of_step(name) * MILLISECONDS:9.3f}"
        for name in comparison.rounds
    )
    first, second = comparison.rounds
    p99 = comparison.p99(first) / comparison.p99(second)
    cpu = comparison.cpu_of_step(first) / comparison.cpu_of_step(second)
    low, high = min(comparison.ratios), max(comparison.ratios)
    return f"{comparison.case:40}{columns}{comparison.ratio:8.2f}{p99:7.2f}{cpu:7.2f}  ({low:.2f} to {high:.2f})"


def figures(facts: dict[str, str], comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Returns all figures as JSON-compatible values; times are in seconds."""
    return {
        "facts": facts,
        "cases": [
            {
                "case": comparison.case,
                "workers": comparison.workers,
                "ratio": comparison.ratio,
                "ratios": comparison.ratios,
                "largest difference of results": comparison.difference,
                "systems": {
                    name: {
                        "median": comparison.median(name),
                        "p99": comparison.p99(name),
                        "cpu": comparison.cpu_of_step(name),
                        "rounds": comparison.rounds[name],
                        "results": [
                            {"shape": result.shape, "norm": float(np.linalg.norm(result))}
                            for result in comparison.results[name]
                        ],
                    }
                    for name in comparison.rounds
                },
            }
            for comparison in comparisons
        ],
    }


def _load() -> str:
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each system (15)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a round (1)")
    parser.add_argument("--system", choices=[n for n in SYSTEMS if n.startswith("gradwire")], default="gradwire")
    parser.add_argument("--peer", choices=list(SYSTEMS), default="torch")
    parser.add_argument("-k", default="", metavar="WORD", help="only the cases with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}: give at least 1")
    return arguments


if __name__ == "__main__":
    main()
