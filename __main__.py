"""Prints installed versions and the engines available here; with arguments, it is the command `gradwire`.

python -m gradwire
python -m gradwire COMMAND...
"""

import platform
import sys
from collections.abc import Sequence

from . import __version__
from .cli.doctor import ROOT, check_engines, check_versions
from .cli.group import gradwire, run_command

__all__ = ["describe", "main"]


def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    if arguments:
        run_command(gradwire, arguments, "python -m gradwire")
    else:
        print(describe())


def describe() -> str:
    """Returns the report, as lines of text."""
    lines = [f"gradwire {__version__} in {ROOT}", f"on {platform.system()} {platform.machine()}", ""]
    for title, check in (("Packages", check_versions), ("Engines of process groups", check_engines)):
        lines += [title, *(f"  {each.check:<12} {each.text}" for each in check()), ""]
    lines += ["Commands: gradwire --help; gradwire doctor checks this machine"]
    if (ROOT / "examples").is_dir():  # in a checkout; a wheel has no examples and docs
        lines += ["", f"Examples  {ROOT / 'examples'}", f"Docs      {ROOT / 'docs'}; first {ROOT / 'README.md'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
