"""`gradwire top`: what a running job does."""

import click

from .group import Command

__all__ = ["command"]


@click.command(
    "top",
    cls=Command,
    epilog="""
    gradwire top http://127.0.0.1:8080/
    GRADWIRE_VIEW_KEY=... gradwire top https://10.0.0.3:8080/
    GRADWIRE_TOKEN_FILE=token gradwire top https://10.0.0.2:8080/
    """,
)
@click.option("--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print the state once, and end.")
@click.argument("url")
def command(url: str, interval: float, *, once: bool) -> None:
    """Shows in the terminal what the workers of a running job do.

    URL is that of the page of the job, as a worker with GRADWIRE_VIEW or the option `view` has logged it. Its key
    is found where the worker runs on this host as your user, or where the credentials of the job have a token.
    Otherwise, GRADWIRE_VIEW_KEY has to be the key.
    """
    from ..view.access import PageClient

    try:
        from ..view.top import show
    except ModuleNotFoundError as error:
        from ..rpc.contracts.options import INSTALL_VIEW

        raise click.ClickException(f"this needs {error.name}: {INSTALL_VIEW}") from None
    credentials = None
    try:
        if url.lower().startswith("https:"):
            from ..net.security import Credentials

            credentials = Credentials.from_environment()
        show(PageClient(url, credentials), interval=interval, once=once)
    except KeyboardInterrupt:
        pass
    except (OSError, ValueError) as error:  # a CredentialsError is a ValueError
        raise click.ClickException(str(error)) from None
