"""The command line, and the page of plain text, of benchmarks whose rows are measured in rounds."""

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import load_average

__all__ = ["arguments_of", "make_parser", "publish"]

TEXT_WIDTH = 104


def make_parser(
    module: str, description: str | None, saved: str, rounds: int, seconds: float
) -> argparse.ArgumentParser:
    """Returns a parser of --rounds, --seconds, --json and --save.

    Args:
        module: in benchmarks/, that is run.
        description: of what it does.
        saved: the name of the file that --save writes.
        rounds: of each row, by default.
        seconds: of a round, by default.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each row ({rounds})")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"length of a round ({seconds:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures, in seconds")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help=f"where to write {saved}")
    return parser


def arguments_of(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments; ends the program if they are wrong."""
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}: give at least 1")
    if arguments.save is not None and not arguments.save.is_dir():
        parser.error(f"--save {arguments.save} is no folder")
    return arguments


def publish(
    arguments: argparse.Namespace,
    saved: str,
    facts: Mapping[str, Any],
    text: str,
    table: Sequence[str],
    measured: Sequence[Mapping[str, Any]],
) -> None:
    """Prints a page, and writes what --save and --json ask for.

    Args:
        arguments: of the command line.
        saved: the name of the file that --save writes.
        facts: about the machine, from before the measurement.
        text: says what was measured, and how.
        table: the lines of the table.
        measured: all figures, for --json.
    """
    lines = [f"{name}: {value}" for name, value in facts.items()]
    lines += ["", *textwrap.wrap(text, TEXT_WIDTH), "", *table]
    lines += ["", f"load average after (the benchmark's own included): {load_average()}"]
    print("\n".join(lines))
    if arguments.save is not None:
        (arguments.save / saved).write_text("\n".join(lines) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"facts": facts, "measured": measured}, indent=1))
