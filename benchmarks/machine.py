"""What figures depend on: the machine, its load and the versions of what is measured."""

import os
import platform

from .systems import GRADWIRE, TORCH

__all__ = ["load_average", "machine_facts", "resident_bytes", "thread_count"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def machine_facts() -> dict[str, str]:
    """Returns the facts about machine and versions that the figures depend on."""
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
        "gradwire": GRADWIRE.version,
        "torch": TORCH.version,
        "load average before": load_average(),
    }


def load_average() -> str:
    """Returns the load averages of the last 1, 5 and 15 minutes."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES


def thread_count() -> int:
    """Returns the number of threads of this process, those of C++ libraries included."""
    return len(os.listdir("/proc/self/task"))
