"""Pickled values, and the bytes of what was taken out of them, in one piece."""

import io
import pickle

import torch

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from .pickling import Packed
from .tensors import decode_tensors, encode_tensors

__all__ = ["can_flatten", "flatten", "unflatten"]


def can_flatten(packed: Packed) -> bool:
    """Has it neither references, which must be counted, nor tensors that go to devices?"""
    return not packed.references and all(tensor.device.type == "cpu" for tensor in packed.tensors)


def flatten(packed: Packed) -> memoryview:
    """The whole of a pickled value, which `can_flatten`."""
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
    """Body and tensors, in memory of their own."""
    body, tensors, payloads = pickle.loads(data)
    messages = map(agent_pb2.Tensor.FromString, tensors)
    return body, decode_tensors(messages, lambda payload: payloads[payload.local])
