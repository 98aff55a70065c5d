"""What the benchmarks have in common as commands: options, what they print, and the files that they write."""

import argparse
import json
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .systems import GRADWIRE, TORCH

__all__ = ["Report", "add_rounds", "arguments_of", "make_parser", "resident_bytes"]

TEXT_WIDTH = 104


def make_parser(module: str, description: str | None, saved: str = "") -> argparse.ArgumentParser:
    """Returns a parser of --json and, if there is a file that it writes, of --save."""
    parser = argparse.ArgumentParser(
        f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures; times in seconds")
    if saved:
        parser.add_argument("--save", type=Path, metavar="FOLDER", help=f"where to write {saved}")
    return parser


def add_rounds(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
    """Adds --rounds and --seconds, with these defaults."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each system or row ({rounds})")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"length of a round ({seconds:g})")


def arguments_of(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments; ends the program if the common ones are wrong."""
    arguments = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("workers", 2), ("peers", 1), ("in_flight", 1)):
        if (value := getattr(arguments, name, least)) < least:
            parser.error(f"--{name.replace('_', '-')} is {value}: give at least {least}")
    save = getattr(arguments, "save", None)
    if save is not None and not save.is_dir():
        parser.error(f"--save {save} is no folder")
    return arguments


def load_average() -> str:
    """Returns the load averages of the last 1, 5 and 15 minutes."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return psutil.Process().memory_info().rss


class Report:
    """What a benchmark prints: facts about the machine, what the figures are, and a table."""

    def __init__(self, text: str, header: str, **facts: str) -> None:
        """Prints all that is above the rows: facts about machine and run, what is measured, and the header."""
        self.facts = {
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python "
            f"{platform.python_version()}",
            "gradwire": GRADWIRE.version,
            "torch": TORCH.version,
            "load average before": load_average(),
            **facts,
        }
        self.measured: list[Mapping[str, Any]] = []
        """All figures, for --json."""
        self._lines: list[str] = []
        self.print(*(f"{name}: {value}" for name, value in self.facts.items()), "")
        self.print(*textwrap.wrap(text, TEXT_WIDTH), "", header)

    def print(self, *lines: str) -> None:
        """Prints lines, such as those of the table."""
        self._lines += lines
        print("\n".join(lines), flush=True)

    def close(self, arguments: argparse.Namespace, saved: str = "") -> None:
        """Prints the load, and writes the file for --json and the text, named `saved`, for --save."""
        self.facts["load average after"] = f"{load_average()} (the benchmark's own included)"
        self.print("", f"load average after: {self.facts['load average after']}")
        if saved and arguments.save is not None:
            (arguments.save / saved).write_text("\n".join(self._lines) + "\n")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"facts": self.facts, "measured": self.measured}, indent=1))
