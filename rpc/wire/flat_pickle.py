"""A pickled value and the bytes of its tensors as one piece of bytes, for collectives that move bytes."""

import io
import pickle

import torch

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
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
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=5).dump((packed.body, tensors, payloads))
    return stream.getbuffer()


def unflatten(data: bytes | bytearray) -> tuple[Buffer, list[torch.Tensor]]:
    """Returns body and tensors of a flattened value. They do not share memory with `data`."""
    body, tensors, payloads = pickle.loads(data)
    messages = map(agent_pb2.Tensor.FromString, tensors)
    return body, decode_tensors(messages, lambda payload: payloads[payload.local])
