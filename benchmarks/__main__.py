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
from collections.abc import Sequence

from . import autograd, calls, many_tensors
from .command_line import Report, add_rounds, arguments_of, make_parser
from .harness import Case, compare
from .report import DESCRIPTION, Table, plot
from .systems import SYSTEMS
from .worker_sets import preload

PAGE, PLOT = "figures.md", "figures.png"
"""The files that `--save` writes."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    arguments = _arguments(argv)
    systems = [SYSTEMS[name] for name in dict.fromkeys(arguments.systems)]
    cases = _cases(arguments.cases, arguments.k)
    rounds = f"{arguments.rounds} rounds of {arguments.seconds:g} s of each case on each system"
    table = Table(systems)
    report = Report(DESCRIPTION, table.text_header(), measured=rounds)
    comparisons = []
    for comparison in compare(cases, systems, rounds=arguments.rounds, seconds=arguments.seconds):
        comparisons.append(comparison)
        report.print(table.text_row(comparison))
        report.measured.append(comparison.all_figures())
    report.close(arguments)
    if arguments.save is not None:
        (arguments.save / PAGE).write_text(table.page(report.facts, comparisons, PLOT))
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
    parser = make_parser("benchmarks", __doc__, f"{PAGE} and {PLOT}")
    add_rounds(parser, rounds=5, seconds=0.3)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="all of them")
    parser.add_argument("-k", nargs="+", default=[], metavar="WORD", help="words in the names of cases")
    parser.add_argument("--cases", metavar="MODULE", help="a module with a list CASES, instead of all cases here")
    arguments = arguments_of(parser, argv)
    if arguments.save is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--save plots with matplotlib: pip install matplotlib")
    return arguments


if __name__ == "__main__":
    preload()
    main()
