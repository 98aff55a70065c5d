"""Unpickles messages whose tensors and references travel beside the pickle, by index.

In the pickle, each of them is a call of a placeholder function with its index. The unpickler of a message resolves
the placeholders to look-ups in that message, so that no state is shared between messages or threads.

Persistent ids of pickle would do the same. But a `persistent_id` hook is called for every object that is pickled,
which makes large plain values ten times as slow to pickle (a list of 10,000 integers: 750 µs in place of 70 µs).
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn, final

import torch
from torch import nn

from ..contracts.messages import Buffer

__all__ = [
    "ONE_TENSOR",
    "PICKLE_PROTOCOL",
    "as_parameter",
    "parameter_placeholder",
    "reference_placeholder",
    "tensor_placeholder",
    "unpickle",
]

PICKLE_PROTOCOL = 5

READ_BYTES = 1 << 16
"""Bytes of a large body that are read at a time: those of one frame of pickle."""


def unpickle(body: Buffer, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> Any:
    """Returns the value of a message, given its tensors and references by index. Raises what unpickling raises."""
    if not tensors and not references:
        return pickle.loads(body)
    if body == ONE_TENSOR and len(tensors) == 1:
        return tensors[0]
    return _MessageUnpickler(body, tensors, references).load()


def tensor_placeholder(index: int) -> NoReturn:
    """Stands in a pickle for a tensor of the message."""
    raise pickle.UnpicklingError(f"malformed message: it has no tensor {index}")


def parameter_placeholder(index: int, requires_grad: bool) -> NoReturn:  # noqa: ARG001
    """Stands in a pickle for a tensor of the message that is a Parameter."""
    raise pickle.UnpicklingError(f"malformed message: it has no tensor {index}")


def as_parameter(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Returns a Parameter; or the tensor itself if gradients flow back through it to the sender."""
    if tensor.grad_fn is not None:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad)


def reference_placeholder(index: int) -> NoReturn:
    """Stands in a pickle for a reference of the message."""
    raise pickle.UnpicklingError(f"malformed message: it has no reference {index}")


class _OneTensor:
    """Is pickled as the tensor of a message that is nothing else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tensor_placeholder, (0,)


ONE_TENSOR = pickle.dumps(_OneTensor(), PICKLE_PROTOCOL)
"""The body of a message whose value is a tensor that travels beside it, such as the result of most functions."""


@final
class _MessageUnpickler(pickle.Unpickler):
    """Resolves placeholders to the tensors and references of one message."""

    def __init__(self, body: Buffer, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> None:
        # BytesIO shares bytes, but copies any other buffer. Those are large.
        super().__init__(
            io.BytesIO(body) if isinstance(body, bytes) else io.BufferedReader(_MemoryReader(body), READ_BYTES)
        )
        self._tensors = tensors
        self._references = references

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__:
            if global_name == "tensor_placeholder":
                return self._tensors.__getitem__
            if global_name == "parameter_placeholder":
                return self._parameter
            if global_name == "reference_placeholder":
                return self._references.__getitem__
        return super().find_class(module_name, global_name)

    def _parameter(self, index: int, requires_grad: bool) -> torch.Tensor:
        """Returns a Parameter; or the tensor itself if gradients flow back through it to the sender."""
        return as_parameter(self._tensors[index], requires_grad=requires_grad)


@final
class _MemoryReader(io.RawIOBase):
    """Reads a memoryview."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        part = self._data[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)
