"""A pickled value and the bytes of its tensors as one piece of bytes, for collectives that move bytes."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from .parsing import parse_tensors
from .pickling import Packed
from .tensors import decode_tensors, encode_tensors

__all__ = ["can_flatten", "flatten", "unflatten"]


def can_flatten(packed: Packed) -> bool:
    """Returns whether a value has no references, which must be counted, and no tensors on other devices."""
    return not packed.references and all(tensor.device.type == "cpu" for tensor in packed.tensors)


def flatten(packed: Packed) -> memoryview:
    """Returns a value for which `can_flatten` holds as bytes."""
    payloads: list[pickle.PickleBuffer] = []

    def put(data: memoryview) -> agent_pb2.Payload:
        payloads.append(pickle.PickleBuffer(data))
        return agent_pb2.Payload(local=len(payloads) - 1)

    tensors = [
        message.SerializeToString() for message in encode_tensors(packed.tensors, put, leaves=packed.leaves)
    ]
    written = _Written()
    pickle.Pickler(written, protocol=5).dump((packed.body, tensors, payloads))
    return memoryview(written.data)


class _Written:
    """What a pickler has written. If a view of a BytesIO is in cyclic garbage, Python 3.12 crashes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.write = self.data.extend


def unflatten(
    data: bytes | bytearray, load: Callable[[bytes | bytearray], Any] = pickle.loads
) -> tuple[Buffer, list[torch.Tensor]]:
    """Returns body and tensors of a flattened value. They do not share memory with `data`.

    Args:
        data: the flattened value.
        load: unpickles what is accepted from the worker that has flattened it.

    Raises:
        ValueError: it is no flattened value.
        Exception: whatever `load` raises.
    """
    value = load(data)
    if not _is_flattened(value):
        raise ValueError("malformed value: it has no body, tensors and payloads")
    body, tensors, payloads = value

    def take(payload: agent_pb2.Payload) -> Buffer:
        taken: Buffer | None = payloads[payload.local] if payload.local < len(payloads) else None
        if taken is None:
            raise ValueError(f"malformed value: payload {payload.local} is missing, or of several tensors")
        payloads[payload.local] = None
        return taken

    try:
        messages = parse_tensors(tensors)
    except DecodeError as error:
        raise ValueError(f"malformed value: {error}") from None
    return body, decode_tensors(messages, take)


def _is_flattened(value: object) -> bool:
    """Returns whether a value has the types of what `flatten` pickles."""
    return (
        type(value) is tuple
        and [type(part) for part in value] == [bytes, list, list]
        and all(type(each) is bytes for each in value[1])
        and all(type(each) in (bytes, bytearray) for each in value[2])
    )
