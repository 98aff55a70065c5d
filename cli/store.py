"""`gradwire store`: a store that is a process of its own."""

import signal
import threading

import click

from .group import Command

__all__ = ["command"]

DEFAULT_PORT = 29500
"""MASTER_PORT of torchrun, if it is not told another one."""


@click.command(
    "store",
    cls=Command,
    epilog="""
    gradwire store --log job.store                    # on 127.0.0.1, for workers of this host
    gradwire store --host node0 --log job.store       # for several hosts, with GRADWIRE_TOKEN set
    """,
)
@click.option(
    "--log",
    required=True,
    metavar="FILE",
    help="Where the store keeps its changes; it goes on from a file that exists. Each job needs one of its own: "
    "keys of an earlier job would confuse it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address or name to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0 for a free one."
)
@click.option("--sync", is_flag=True, help="Write each change to the disk before answering it.")
@click.option("--insecure", is_flag=True, help="Listen for other hosts without credentials; trusts the network.")
def command(*, log: str, host: str, port: int, sync: bool, insecure: bool) -> None:
    """Runs a store as a process of its own, until Ctrl-C or SIGTERM.

    No worker takes it with it when it dies, and it can be restarted with the same log: clients wait up to 60 s
    for it, and what they have in flight is done exactly once. Workers find it by GRADWIRE_STORE=host:port, or by
    init_method="store://host:port?rank=0&world_size=2"; rank 0 does not host a store then.
    """
    from ..c10d.stores.durable import serve

    stopped = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        serve(log, host, port, stopped, sync=sync, insecure=insecure)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
