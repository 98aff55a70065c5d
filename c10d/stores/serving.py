"""Serves a store from a process of its own, which outlives the workers and can be restarted."""

import threading

from ...net.addresses import format_address, host_for_listening, require_trusted
from ...net.event_loop import acquire_event_loop
from ...net.security import Credentials
from .durable import DurableState
from .limits import StoreLimits
from .server import StoreServer

__all__ = ["serve"]


def serve(
    log: str, host: str, port: int, stopped: threading.Event, *, sync: bool = False, insecure: bool = False
) -> None:
    """Serves a store until an event is set. Prints its address in one line when it listens.

    Args:
        log: the path of its log, from which it goes on if it exists. Its folder must exist.
        host: name or address to listen on.
        port: to listen on; 0 for a free one.
        stopped: ends it.
        sync: whether each change is on the disk before it is answered. Without, changes survive this process, and
            the last ones may be lost when the host fails.
        insecure: allows an address that is not a loopback address, without credentials.

    Raises:
        StoreError: the log cannot be used, or the address needs credentials or `insecure`.
        StoreNetworkError: the port is in use.
        CredentialsError: the credentials in the environment are not valid.
    """
    credentials = Credentials.from_environment()
    identity = credentials.identity() if credentials is not None else None
    is_protected = insecure or identity is not None
    require_trusted(host, insecure=is_protected, action="hosting a store on", how_to_allow="pass --insecure")
    limits = StoreLimits()
    state = DurableState(log, limits, sync=sync)
    try:
        server = StoreServer(limits, state)
        loop = acquire_event_loop()
        try:
            where = host_for_listening(host, insecure=is_protected)
            bound = loop.run(server.start(where, port, identity, insecure=insecure))
            print(f"store on {format_address(host, bound)}, log {log}", flush=True)
            stopped.wait()
            loop.run(server.stop())
        finally:
            loop.release()
    finally:
        state.close()
