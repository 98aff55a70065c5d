"""Prints installed versions and the engines available here; with arguments, it is the command `gradwire`.

python -m gradwire
python -m gradwire COMMAND...
"""

import platform
import sys
from collections.abc import Sequence

from . import __version__
from .cli.group import gradwire, run_command
from .cli.installation import OPTIONAL_PACKAGES, REQUIRED_PACKAGES, ROOT, engines, version_of

__all__ = ["describe", "main"]


def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    if arguments:
        run_command(gradwire, arguments, "python -m gradwire")
    else:
        print(describe())


def describe() -> str:
    """Returns the report, as lines of text."""
    packages = (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)
    lines = [
        f"gradwire {__version__} in {ROOT}",
        f"on Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "",
        "Packages",
        *(f"  {name:<12} {version_of(name) or 'not installed'}" for name in packages),
        "",
        "Engines of process groups",
        *(
            f"  {name:<12} {'available' if reason is None else f'not available: {reason}'}"
            for name, reason in engines().items()
        ),
        "",
        "Commands: gradwire --help; gradwire doctor checks this machine",
    ]
    if (ROOT / "examples").is_dir():  # in a checkout; a wheel has no examples and docs
        lines += ["", f"Examples  {ROOT / 'examples'}", f"Docs      {ROOT / 'docs'}; first {ROOT / 'README.md'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
