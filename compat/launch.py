"""Runs a program written for torch.distributed.rpc, and the Python processes it starts, on gradwire.

Imports nothing of gradwire: the process that runs this becomes the program before it has loaded torch.
"""

import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

__all__ = ["SITE_DIRECTORY", "VARIABLE", "become_program", "inherited_defaults", "install_in_children"]

SITE_DIRECTORY: Final = Path(__file__).with_name("site")
"""Has a sitecustomize.py, which Python runs at startup."""

VARIABLE: Final = "GRADWIRE_COMPAT"
"""The environment variable that passes the arguments of `install` on to the processes that a program starts."""


def install_in_children(environment: MutableMapping[str, str], **values: Any) -> None:
    """Makes the Python processes that are started with an environment install the compatibility layer.

    It sets PYTHONPATH, so processes that ignore that variable (`python -E`, `python -I`) run on torch's own agent.
    """
    environment[VARIABLE] = json.dumps(values)
    own = str(SITE_DIRECTORY)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != own]
    environment["PYTHONPATH"] = os.pathsep.join([own, *paths])


def inherited_defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `install` in VARIABLE; empty if it is not set."""
    return dict(json.loads(environment.get(VARIABLE, "{}")))


def become_program(arguments: Sequence[str], **values: Any) -> NoReturn:
    """Replaces this process by `python arguments...`, on gradwire, with the options of this interpreter.

    So the program sees what it sees under Python: its module is `__main__`, its exit is that of the process.
    Raises ValueError if Python would not read PYTHONPATH.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("Python has been started with -E, -I or -S, with which it does not load gradwire")
    install_in_children(os.environ, **values)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *_interpreter_options(), *arguments])


def _interpreter_options() -> list[str]:
    """Returns the options of this interpreter, such as `-u`, without what it runs."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # and what names the program
    return options[:-2] if options[-2:-1] == ["-m"] else options[:-1]
