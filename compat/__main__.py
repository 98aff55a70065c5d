"""Runs an unmodified torch.distributed.rpc program on gradwire, with all processes that it starts.

python -m gradwire.compat [options] script.py arguments...
python -m gradwire.compat [options] -m module arguments...

Options, the first two for workers on several hosts (docs/hosts.md):

--insecure      allow workers on several hosts without encryption and authentication: everybody who can connect
                to a worker can run code in it
--host ADDRESS  the address at which the other hosts reach this host's workers; by default the source address of
                connections to MASTER_ADDR
--transports NAMES
                what may carry messages: some of unix,tcp,grpc with commas between them, and grpc in any case. With
                grpc alone, each worker needs one port, or none on one host
"""

import sys
from dataclasses import replace

from ..rpc.contracts.options import TRANSPORTS
from .defaults import Defaults
from .launch import run_module, run_script

__all__ = ["main"]

USAGE = (
    "usage: python -m gradwire.compat [--insecure] [--host ADDRESS] [--transports NAMES] "
    "(script.py | -m module) [arguments...]"
)


def main(arguments: list[str], values: Defaults = Defaults()) -> None:  # noqa: B008 - only read
    """Runs the command line; `values` are those of the options before `arguments`."""
    match arguments:
        case ["-h" | "--help", *_]:
            print(__doc__)
        case ["--insecure", *rest]:
            main(rest, replace(values, insecure=True))
        case ["--host", host, *rest] if not host.startswith("-"):
            main(rest, replace(values, host=host))
        case ["--transports", names, *rest] if {"grpc"} <= set(names.split(",")) <= set(TRANSPORTS):
            main(rest, replace(values, transports=names.split(",")))
        case ["-m", name, *rest]:
            run_module(name, rest, values)
        case [path, *rest] if not path.startswith("-"):
            run_script(path, rest, values)
        case _:
            sys.exit(USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
