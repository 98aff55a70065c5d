"""Commands whose help ends with examples, which stay as they are written."""

from inspect import cleandoc

import click

__all__ = ["Command", "Group"]


class Command(click.Command):
    """A command whose epilog has examples, one a line."""

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples."""
        _write_examples(self, formatter)


class Group(click.Group):
    """A group of such commands, which has examples itself."""

    command_class = Command

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples."""
        _write_examples(self, formatter)


def _write_examples(command: click.Command, formatter: click.HelpFormatter) -> None:
    with formatter.section("Examples"):
        for line in cleandoc(command.epilog or "").splitlines():
            formatter.write(f"{' ' * formatter.current_indent}{line}\n")
