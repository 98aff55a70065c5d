"""`gradwire bench`: the benchmarks of a checkout."""

import subprocess
import sys
from pathlib import Path

import click

from .doctor import ROOT
from .group import Command

__all__ = ["command"]

SHORT_CASES = ("noop", "two tensors", "RRef method", "tiny")
SHORT_ROUNDS = 3
FULL_ROUNDS = 5


@click.command(
    "bench",
    cls=Command,
    epilog="""
    gradwire bench                            # some minutes
    gradwire bench -k noop -k stream          # cases that have one of these words in their names
    gradwire bench --full --json figures.json
    """,
)
@click.option("-k", "words", multiple=True, metavar="WORD", help="Only cases with this in their name; repeatable.")
@click.option("--full", is_flag=True, help="All cases, in five rounds.")
@click.option("--rounds", type=click.IntRange(1), help=f"Rounds of each system; by default {SHORT_ROUNDS}.")
@click.option(
    "--json",
    "path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures to it.",
)
def command(*, words: tuple[str, ...], full: bool, rounds: int | None, path: Path | None) -> int:
    """Measures calls and backward passes on gradwire and on torch's TensorPipe agent, in turns.

    The benchmarks are in a checkout of gradwire only. The machine should have nothing else to do meanwhile. By
    default, some cases are measured briefly.
    """
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise click.ClickException(
            f"there are no benchmarks in {ROOT}, because packages do not have them: clone "
            "https://github.com/gradwire/gradwire, run `pip install -e .` there, and then gradwire bench"
        )
    arguments = ["--rounds", str(rounds or (FULL_ROUNDS if full else SHORT_ROUNDS))]
    if words := words or (() if full else SHORT_CASES):
        arguments += ["-k", *words]
    if path is not None:
        arguments += ["--json", str(path.absolute())]
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, check=False).returncode
