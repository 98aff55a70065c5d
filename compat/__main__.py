"""`python -m gradwire.compat` is `gradwire run`."""

import sys
from collections.abc import Sequence

from ..cli.group import run_command
from ..cli.run import command

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    run_command(command, arguments, "python -m gradwire.compat")


if __name__ == "__main__":
    main(sys.argv[1:])
