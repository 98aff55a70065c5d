"""The place of a call in a trace, as a message carries it: names and values, as in the headers of HTTP."""

from collections.abc import Iterable, Mapping, MutableMapping

from ..proto.v1 import agent_pb2

__all__ = ["MAX_FIELDS", "MAX_FIELDS_BYTES", "add_fields", "read_fields"]

MAX_FIELDS = 16

MAX_FIELDS_BYTES = 10 << 10
"""Characters of all names and values: a baggage may have 8,192 bytes by W3C, and others are beside it."""


def add_fields(fields: Mapping[str, str], envelope: agent_pb2.Envelope) -> None:
    """Adds fields to the envelope of a request, in their order; leaves out those for which there is no room."""
    nbytes = 0
    for name, value in fields.items():
        if len(envelope.trace) == MAX_FIELDS:
            return
        if nbytes + len(name) + len(value) <= MAX_FIELDS_BYTES:
            nbytes += len(name) + len(value)
            envelope.trace.add(name=name, value=value)


def read_fields(trace: Iterable[agent_pb2.TraceField]) -> MutableMapping[str, str]:
    """Returns the fields that a request has carried; none if they are too many, or have too many characters."""
    fields: dict[str, str] = {}
    nbytes = 0
    for field in trace:
        nbytes += len(field.name) + len(field.value)
        if len(fields) == MAX_FIELDS or nbytes > MAX_FIELDS_BYTES:
            return {}
        fields[field.name] = field.value
    return fields
