"""All parsers of bytes that others send. Each package has its own in modules here."""

from tests.fuzz.c10d_targets import C10D_TARGETS
from tests.fuzz.rpc_message_targets import RPC_MESSAGE_TARGETS
from tests.fuzz.rpc_payload_targets import RPC_PAYLOAD_TARGETS
from tests.fuzz.rpc_socket_targets import RPC_SOCKET_TARGETS
from tests.fuzz.rpc_value_targets import RPC_VALUE_TARGETS
from tests.fuzz.rpc_wire_targets import RPC_WIRE_TARGETS
from tests.fuzz.target import Target
from tests.fuzz.tracing_targets import TRACING_TARGETS

__all__ = ["TARGETS"]

TARGETS: tuple[Target, ...] = (
    *C10D_TARGETS,
    *RPC_WIRE_TARGETS,
    *RPC_SOCKET_TARGETS,
    *RPC_PAYLOAD_TARGETS,
    *RPC_VALUE_TARGETS,
    *RPC_MESSAGE_TARGETS,
    *TRACING_TARGETS,
)
