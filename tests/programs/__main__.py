"""Runs unmodified programs for torch.distributed.rpc on torch's own agent and on gradwire, and compares them.

python -m tests.programs                    # all of them
python -m tests.programs rnn pipeline       # these
python -m tests.programs rnn --verbose      # with its output

Prints a table. Fails if a program succeeds on only one of the agents, or prints different results. A program that
fails on both is listed, and is not a difference.
"""

import argparse
import signal
import sys

from .catalog import PROGRAMS
from .report import Comparison, table
from .runner import run

RULE = "-" * 100


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__.partition("\n")[0])
    names = [program.name for program in PROGRAMS]
    parser.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help=f"programs to run, out of {', '.join(names)}"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the programs print")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the programs")
    arguments = parser.parse_args()
    if unknown := set(arguments.programs) - set(names):
        parser.error(f"unknown program {', '.join(sorted(unknown))}: give some of {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running program is killed as well
    comparisons = []
    for program in PROGRAMS:
        if arguments.programs and program.name not in arguments.programs:
            continue
        here = run(program, on_gradwire=True, python=arguments.python)
        there = run(program, on_gradwire=False, python=arguments.python)
        if here.succeeded and not there.succeeded:
            # In torch's shutdown, a worker may ask the store of another one that has ended by then.
            there = run(program, on_gradwire=False, python=arguments.python)
        comparison = Comparison(program, there, here)
        comparisons.append(comparison)
        print(" | ".join(comparison.row), flush=True)
        for name, outcome in (("torch's agent", comparison.torch), ("gradwire", comparison.gradwire)):
            if arguments.verbose or comparison.difference:
                print(f"{RULE}\n{program.name} on {name}:\n{outcome.output}\n{RULE}", flush=True)
    print(f"\n{table(comparisons)}")
    differences = [comparison for comparison in comparisons if comparison.difference]
    print(f"\n{len(comparisons)} programs, {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
