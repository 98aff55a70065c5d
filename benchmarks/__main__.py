"""Compares gradwire with torch.distributed.rpc on TensorPipe, all cases in one run and one table.

python -m benchmarks                             # the table on stdout
python -m benchmarks -k echo backward            # only the cases with one of these words in their names
python -m benchmarks --systems gradwire torch    # only these systems
python -m benchmarks --rounds 15 --seconds 1     # more steps: 25 minutes in place of four
python -m benchmarks --json FILE                 # also the time of every step, in seconds
python -m benchmarks --save docs/benchmarks      # also the table as a page, and a plot
python -m benchmarks --cases my_cases            # the list CASES of another module
"""

import argparse
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from . import autograd, calls, many_tensors
from .harness import Case, compare
from .machine import load_average, machine_facts
from .report import DESCRIPTION, Table, figures, plot
from .systems import SYSTEMS
from .worker_sets import preload

PAGE, PLOT = "figures.md", "figures.png"
"""The files that `--save` writes."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    arguments = _arguments(argv)
    systems = [SYSTEMS[name] for name in dict.fromkeys(arguments.systems)]
    facts = machine_facts()
    facts["measured"] = f"{arguments.rounds} rounds of {arguments.seconds:g} s of each case on each system"
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    table = Table(systems)
    print(f"\n{DESCRIPTION}\n\n{table.text_header()}", flush=True)
    comparisons = []
    cases = _cases(arguments.cases, arguments.k)
    for comparison in compare(cases, systems, rounds=arguments.rounds, seconds=arguments.seconds):
        comparisons.append(comparison)
        print(table.text_row(comparison), flush=True)
    facts["load average after"] = f"{load_average()} (the benchmark's own included)"
    print(f"\nload average after: {facts['load average after']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures(facts, comparisons), indent=1))
    if arguments.save is not None:
        (arguments.save / PAGE).write_text(table.page(facts, comparisons, PLOT))
        plot(arguments.save / PLOT, comparisons)


def _cases(module: str | None, words: Sequence[str]) -> list[type[Case]]:
    """Returns the cases of a module, or of this package, whose names have one of the words in them."""
    cases = [*calls.CASES, *many_tensors.CASES, *autograd.CASES]
    if module is not None:
        cases = getattr(importlib.import_module(module), "CASES", [])
        if not cases:
            raise SystemExit(f"module {module!r} has no list CASES of cases, or an empty one")
    chosen = [case for case in cases if not words or any(word in case.name for word in words)]
    if not chosen:
        raise SystemExit(f"no case has {' or '.join(map(repr, words))} in its name")
    return sorted(chosen, key=lambda case: case.workers)  # so that they share their processes


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each system (5)")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a round (0.3)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="all of them")
    parser.add_argument("-k", nargs="+", default=[], metavar="WORD", help="words in the names of cases")
    parser.add_argument("--cases", metavar="MODULE", help="a module with a list CASES, instead of all cases here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help=f"where to write {PAGE} and {PLOT}")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}: give at least 1")
    if arguments.save is not None and not arguments.save.is_dir():
        parser.error(f"--save {arguments.save} is no folder")
    if arguments.save is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--save plots with matplotlib: pip install matplotlib")
    return arguments


if __name__ == "__main__":
    preload()
    main()
