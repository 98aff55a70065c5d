"""Runs a program written for torch.distributed.rpc on gradwire, with all processes that it starts.

python -m gradwire.compat script.py arguments...
python -m gradwire.compat -m module arguments...
"""

import sys

from .launch import run_module, run_script

__all__ = ["main"]

USAGE = "usage: python -m gradwire.compat (script.py | -m module) [arguments...]"


def main(arguments: list[str]) -> None:
    """The command line."""
    match arguments:
        case ["-h" | "--help", *_]:
            print(__doc__)
        case ["-m", name, *rest]:
            run_module(name, rest)
        case [path, *rest] if not path.startswith("-"):
            run_script(path, rest)
        case _:
            sys.exit(USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
