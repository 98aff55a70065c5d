"""Keeps torch.compile from tracing code that torch's C++ calls back.

While a compiled program runs, Dynamo traces every Python function that is called. Functions of a process group,
such as a broadcast that DDP starts, are not part of the program: they cannot be traced, and need not be.
"""

import inspect

from ...torch_internals import skip_in_dynamo

__all__ = ["exclude_from_dynamo"]


def exclude_from_dynamo(*classes: type) -> None:
    """Excludes the methods of these classes, and what they call, from tracing.

    torch.compiler.disable does the same, but imports the compiler and costs time with every call.
    """
    for each in classes:
        skip_in_dynamo(method for method in vars(each).values() if inspect.isfunction(method))
