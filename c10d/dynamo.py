"""Keeps torch.compile out of code that torch's C++ calls back.

While a compiled program runs, Dynamo traces every Python function that is called. Those of a process group, such
as a broadcast that DDP asks for, are not part of the program: they cannot be traced, and need not be.
"""

import inspect

from ..torch_internals import skip_in_dynamo

__all__ = ["exclude_from_dynamo"]


def exclude_from_dynamo(*classes: type) -> None:
    """Has the methods of these classes, and what they call, run as they are.

    As torch.compiler.disable does, which would import the compiler, and costs time with every call.
    """
    for each in classes:
        skip_in_dynamo(method for method in vars(each).values() if inspect.isfunction(method))
