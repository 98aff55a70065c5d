"""The child processes of single threads.

Linux counts a child to the thread that has started it, whatever has done that: `os.fork`, `subprocess`,
multiprocessing or a library in C. If that thread ends, the child gets the signal that it has chosen by
PR_SET_PDEATHSIG.
"""

import os

__all__ = ["has_children_of_thread"]

WNOTHREAD = 0x20000000
WALL = 0x40000000
"""Options of waitid(2) without names in Python: only children of this thread, and those made by clone(2) too."""


def has_children_of_thread() -> bool:
    """Returns whether the calling thread has a child that it, or another thread, has not waited for.

    True if the system cannot tell.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | WNOTHREAD | WALL)
    except ChildProcessError:
        return False
    except OSError:
        return True
    return True
