"""Runs a store as a process of its own, which no worker takes with it when it dies, and which can be restarted.

    python -m gradwire.store --log job.store                    # on 127.0.0.1, for workers of this host
    python -m gradwire.store --host node0 --log job.store       # for several hosts, with GRADWIRE_TOKEN set

Workers find it by GRADWIRE_STORE=host:port, or by init_method="store://host:port?rank=0&world_size=2"; rank 0 does
not host a store then. Clients wait up to 60 s while it is restarted with the same log. What they have in flight
meanwhile is done exactly once. Each job needs a log of its own: keys of an earlier one would confuse it.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from .c10d.addresses import format_address, host_for_listening, require_trusted
from .c10d.event_loop import acquire_event_loop
from .c10d.security import Credentials
from .c10d.stores.durable import DurableState
from .c10d.stores.journal import Journal
from .c10d.stores.limits import StoreLimits
from .c10d.stores.server import StoreServer
from .errors import CredentialsError, StoreError

__all__ = ["main", "serve"]

DEFAULT_PORT = 29500
"""MASTER_PORT of torchrun, if it is not told another one."""


def main(arguments: Sequence[str]) -> None:
    """Runs the command line until SIGINT or SIGTERM."""
    options = _parser().parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve(options.log, options.host, options.port, stopped, sync=options.sync, insecure=options.insecure)
    except (CredentialsError, StoreError) as error:
        sys.exit(f"gradwire.store: {error}")


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
    journal = Journal(log, sync=sync)
    try:
        limits = StoreLimits()
        server = StoreServer(limits, DurableState(journal, limits))
        loop = acquire_event_loop()
        try:
            bound = loop.run(server.start(host_for_listening(host, insecure=is_protected), port, identity))
            print(f"store on {format_address(host, bound)}, log {log}", flush=True)
            stopped.wait()
            loop.run(server.stop())
        finally:
            loop.release()
    finally:
        journal.close()


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give 1 to 65535, or 0 for a free one")
    return port


def _parser() -> argparse.ArgumentParser:
    description, _, examples = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.store",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log", required=True, metavar="FILE", help="its log; it goes on from one that exists")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0 for a free one (default %(default)s)")
    parser.add_argument("--sync", action="store_true", help="write each change to the disk before answering it")
    parser.add_argument(
        "--insecure", action="store_true", help="listen for other hosts without credentials; trusts the network"
    )
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
