"""Commands whose help ends with examples, which stay as they are written, and whose errors are one line."""

from inspect import cleandoc
from typing import Any

import click

__all__ = ["Command", "Group"]


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
