"""The command `gradwire`, with one module for each of its subcommands."""

from .group import main

__all__ = ["main"]
