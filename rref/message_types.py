"""The types of the messages about references.

A name of a module is found faster than one of the protobuf enum.
"""

from ..rpc.contracts.messages import MessageType

__all__ = ["RREF_CREATE", "RREF_FETCH"]

RREF_CREATE: MessageType.ValueType = MessageType.RREF_CREATE
RREF_FETCH: MessageType.ValueType = MessageType.RREF_FETCH
