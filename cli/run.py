"""`gradwire run`: runs a program that was written for torch.distributed.rpc."""

import os

import click

from ..compat.launch import become_program
from .group import Command

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
) -> None:
    """Runs an unmodified torch.distributed.rpc program on gradwire, with all processes that it starts.

    Options come before PROGRAM; what follows it are its own arguments. PROGRAM may be whatever Python runs: a
    script, a folder or an archive with a `__main__.py`, or `-` for standard input.
    """
    if not is_module and program != "-" and not os.path.exists(program):
        raise click.ClickException(f"there is no file {program!r}")
    python_arguments = [*(["-m"] if is_module else []), program, *arguments]
    try:
        become_program(python_arguments, insecure=insecure, host=host, transports=transports)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
