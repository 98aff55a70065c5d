"""Runs a program written for torch.distributed.rpc on gradwire, with all processes that it starts.

python -m gradwire.compat [options] script.py arguments...
python -m gradwire.compat [options] -m module arguments...

Options, for workers on several hosts (docs/hosts.md):

--insecure      allow workers on several hosts, although nothing is encrypted and nothing proves who calls: whoever
                reaches a worker can run code in it
--host ADDRESS  the address of this host at which the others are to reach its workers, if it is not the one from
                which it reaches MASTER_ADDR
"""

import sys
from dataclasses import replace

from .defaults import Defaults
from .launch import run_module, run_script

__all__ = ["main"]

USAGE = "usage: python -m gradwire.compat [--insecure] [--host ADDRESS] (script.py | -m module) [arguments...]"


def main(arguments: list[str], given: Defaults = Defaults()) -> None:  # noqa: B008 - only read
    """The command line; `given` is what has been read of it."""
    match arguments:
        case ["-h" | "--help", *_]:
            print(__doc__)
        case ["--insecure", *rest]:
            main(rest, replace(given, insecure=True))
        case ["--host", host, *rest] if not host.startswith("-"):
            main(rest, replace(given, host=host))
        case ["-m", name, *rest]:
            run_module(name, rest, given)
        case [path, *rest] if not path.startswith("-"):
            run_script(path, rest, given)
        case _:
            sys.exit(USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
