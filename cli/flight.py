"""`gradwire flight`: what the flight recorders of a job have written."""

from pathlib import Path

import click

from .group import Command

__all__ = ["command"]


@click.command(
    "flight",
    cls=Command,
    epilog="""
    gradwire flight /tmp/flights
    gradwire flight node0/flight-node0-71.json node1/flight-node1-96.json
    """,
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def command(paths: tuple[Path, ...]) -> None:
    """Reports from flight recorder files which rank is stuck where.

    PATHS are files, or folders with files that are called flight-HOST-PID.json. Processes write them by
    c10d.dump_flight_recorder, or when a group with a dump_folder in its options fails.
    """
    from ..c10d.debug.flight_recorder import read_files, report
    from ..net.peer_text import printable

    try:
        files = read_files(paths)
        text = report(files)
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise click.ClickException(
            f"these are no flight recorder files: {type(error).__name__}: {printable(error)}"
        ) from None
    if not files:
        raise click.ClickException("there are no such files: flight recorders write flight-HOST-PID.json")
    click.echo(text)
