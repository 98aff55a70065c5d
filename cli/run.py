"""`gradwire run`: runs a program that was written for torch.distributed.rpc."""

import os
import sys
from collections.abc import Callable

import click

from .examples import Command

__all__ = ["command"]

TRANSPORTS = ("unix", "tcp", "grpc")
"""As in `rpc.RpcBackendOptions`, whose module needs torch."""


def _parse_transports(_ctx: click.Context, _option: click.Parameter, text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TRANSPORTS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(TRANSPORTS)}")
    if "grpc" not in names:
        raise click.BadParameter(f"{text!r} is without grpc, by which workers connect in any case: add it")
    return names


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    cls=Command,
    epilog="""
    gradwire run train.py --epochs 3
    gradwire run -m torch.distributed.run --nproc-per-node 2 train.py
    gradwire run --insecure --host 10.0.0.2 train.py     # on a network that you trust
    """,
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow workers on several hosts without encryption and authentication: everybody who can connect to a "
    "worker can run code in it.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    help="The address at which the other hosts reach this host's workers. By default the source address of "
    "connections to MASTER_ADDR.",
)
@click.option(
    "--transports",
    metavar="NAMES",
    default=",".join(TRANSPORTS),
    callback=_parse_transports,
    help="What may carry messages: some of unix,tcp,grpc with commas between them, and grpc in any case. With "
    "grpc alone, each worker needs one port, or none on one host.",
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is the name of a module, as for `python -m`.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    insecure: bool,
    host: str | None,
    transports: list[str],
    is_module: bool,
    program: str,
    arguments: tuple[str, ...],
) -> Callable[[], None]:
    """Runs an unmodified torch.distributed.rpc program on gradwire, with all processes that it starts.

    Options come before PROGRAM; what follows it are its own arguments.
    """
    if not is_module and not os.path.exists(program):
        raise click.ClickException(f"there is no file {program!r}")

    def run() -> None:
        from ..compat.defaults import Defaults
        from ..compat.launch import run_module, run_script

        values = Defaults(insecure=insecure, host=host, transports=transports)
        if not is_module:
            run_script(program, arguments, values)
            return
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()  # where `python -m` looks first; a console script has its own folder there
        run_module(program, arguments, values)

    return run
