"""Importing gradwire defines names, and changes nothing else in the process."""

import subprocess
import sys

PROGRAM = """
import atexit, copyreg, logging, os, signal, sys, threading, warnings
import torch, torch.distributed.rpc  # so that only gradwire's own effects are seen
import numpy

def process_state():
    loggers = [logging.root, *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    return {
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "import hooks": list(sys.meta_path),
        "log handlers": [h for logger in loggers for h in logger.handlers if type(h) is not logging.NullHandler],
        "log levels": {logger.name: logger.level for logger in loggers if logger.level},
        "warning filters": list(warnings.filters),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "exit handlers": atexit._ncallbacks(),
        "reducers": dict(copyreg.dispatch_table),
        "names of torch's RPC": dict(vars(torch.distributed.rpc)),
    }

before = process_state()
import gradwire
gradwire.c10d.Credentials.from_environment()
assert "cryptography" not in sys.modules  # where there are no credentials: it takes 50 ms of each process
import gradwire.compat
after = process_state()
print([name for name in before if before[name] != after[name]])
"""


def test_importing_gradwire_has_no_effects_and_loads_nothing_for_credentials():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=110
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
