"""`gradwire certs`: makes the credentials of a job."""

import secrets
from pathlib import Path

import click

from ..net.peer_text import problem_of_name
from .group import Group

__all__ = ["command"]

CA_DAYS = 365.0
WORKER_DAYS = 30.0
MAX_DAYS = 36_500.0
TOKEN_BYTES = 32


def _check_name(_ctx: click.Context, _argument: click.Parameter, name: str) -> str:
    if problem := problem_of_name(name):
        raise click.BadParameter(f"{problem}, but it is {name!r}")
    return name


FOLDER = click.Path(path_type=Path)
DAYS = click.FloatRange(0, MAX_DAYS, min_open=True)


@click.group(
    "certs",
    cls=Group,
    epilog="""
    gradwire certs token > token           # for GRADWIRE_TOKEN_FILE; a secret that all workers share
    gradwire certs ca DIR                  # or: makes DIR/ca.pem and DIR/ca-key.pem
    gradwire certs worker NAME --ca DIR    # makes DIR/NAME.pem and DIR/NAME-key.pem
    gradwire certs names NAME              # prints the DNS names that another CA has to certify
    """,
)
def command() -> None:
    """Makes the credentials of a job: a token, or a CA and certificates of its workers.

    Files can be read and written by their owner only, and are not overwritten.
    """


@command.command(
    "token",
    epilog="""
    (umask 077; gradwire certs token > token)     # then copied to all hosts
    export GRADWIRE_TOKEN_FILE=$PWD/token
    """,
)
def _token() -> None:
    """Prints a new token, of 256 random bits."""
    click.echo(secrets.token_urlsafe(TOKEN_BYTES))


@command.command(
    "ca",
    epilog="""
    gradwire certs ca job --days 90
    """,
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--days", type=DAYS, default=CA_DAYS, show_default=True, help="Days of validity.")
def _ca(folder: Path, days: float) -> None:
    """Makes a CA: DIR/ca.pem, which all workers get, and DIR/ca-key.pem, which none gets."""
    from .authority import make_authority

    key, certificate = make_authority(folder, days)
    click.echo(f"{certificate}: for all workers\n{key}: signs certificates; keep it away from the workers")


@command.command(
    "worker",
    epilog="""
    gradwire certs worker trainer0 --ca job --days 7
    """,
)
@click.argument("name", callback=_check_name)
@click.option("--ca", "authority", metavar="DIR", type=FOLDER, required=True, help="The folder of the CA.")
@click.option("--out", metavar="DIR", type=FOLDER, help="Where its files go; by default the folder of the CA.")
@click.option("--days", type=DAYS, default=WORKER_DAYS, show_default=True, help="Days of validity.")
@click.option("--replace", is_flag=True, help="Replace files that exist. Workers that run use the new ones.")
def _worker(*, name: str, authority: Path, out: Path | None, days: float, replace: bool) -> None:
    """Makes the certificate of the worker NAME, and prints the variables to set for it."""
    from .authority import make_worker

    key, certificate = make_worker(name, authority, out or authority, days, replace=replace)
    click.echo(f"GRADWIRE_CA={authority / 'ca.pem'}\nGRADWIRE_CERTIFICATE={certificate}\nGRADWIRE_KEY={key}")


@command.command(
    "names",
    epilog="""
    gradwire certs names trainer0          # for a CA of yours, which signs the certificates
    """,
)
@click.argument("name", callback=_check_name)
def _names(name: str) -> None:
    """Prints the DNS names that the certificate of the worker NAME has."""
    from ..net.security.identity import host_names

    click.echo("\n".join(host_names(name)))
