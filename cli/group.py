"""The command `gradwire`, which loads a subcommand when it is called.

The subcommand NAME is `command` in the module `NAME.py` of this folder. To add one, write that module, and add a
line to COMMANDS. What a subcommand imports at the top of its module counts for `gradwire NAME --help`; torch takes
seconds, so what needs it is imported in the function that runs.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any

import click

from .. import __version__
from ..logs import set_levels_from_environment

__all__ = ["COMMANDS", "Command", "Group", "gradwire", "main", "run_command"]

INTERRUPTED_STATUS = 130
"""The exit status after Ctrl-C, as shells have it."""


class Command(click.Command):
    """A command whose epilog has examples, one a line."""

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples."""
        with formatter.section("Examples"):
            for line in cleandoc(self.epilog or "").splitlines():
                formatter.write(f"{' ' * formatter.current_indent}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. What gradwire refuses, such as credentials, is shown without a traceback."""
        try:
            return super().invoke(ctx)
        except RuntimeError as error:
            from ..errors import GradwireError

            if isinstance(error, GradwireError):
                raise click.ClickException(str(error)) from None
            raise


class Group(Command, click.Group):
    """A group of such commands, which has examples itself."""

    command_class = Command


COMMANDS = {
    "bench": "Measures calls and backward passes next to torch's own agent.",
    "certs": "Makes a token, or a CA and certificates, for workers on several hosts.",
    "doctor": "Checks whether gradwire can run here, and says what to do if not.",
    "flight": "Reports from flight recorder files which rank is stuck where.",
    "run": "Runs an unmodified torch.distributed.rpc program on gradwire.",
    "spawn": "Starts several processes of a program on this host.",
    "store": "Runs a store that outlives the workers of a job.",
    "top": "Shows in the terminal what the workers of a running job do.",
}
"""The subcommands, with the line for each in `gradwire --help`."""


class _Commands(click.Group):
    """The subcommands in COMMANDS."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f".{cmd_name}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands)
@click.version_option(__version__, message="gradwire %(version)s", help="Show the version and exit.")
@click.pass_context
def gradwire(ctx: click.Context) -> None:
    """RPC and distributed autograd for PyTorch: what helps to run programs.

    gradwire COMMAND --help explains a command, with examples.
    """
    try:
        set_levels_from_environment()
    except ValueError as error:
        if ctx.invoked_subcommand != "doctor":  # which reports it with all else that is wrong
            raise click.ClickException(str(error)) from None


def main() -> None:
    """Runs the command line of this process."""
    run_command(gradwire, sys.argv[1:], "gradwire")


def run_command(command: click.Command, arguments: Sequence[str], name: str) -> None:
    """Runs a command line, and what the command returns if that is a function, such as a user's program.

    That function runs outside of click, so that its exceptions end the process as they do in any program.

    Raises:
        SystemExit: the arguments are wrong, the command has failed, or it has been interrupted.
    """
    try:
        result: Callable[[], Any] | int | None = command.main(
            list(arguments), name, standalone_mode=False, help_option_names=["-h", "--help"]
        )
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED_STATUS)
    if callable(result):
        result()
    elif result:
        sys.exit(result)
