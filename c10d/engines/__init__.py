"""Engines: one contract (base), one file for each kind."""

from .base import Engine, PendingOperation, Setup

__all__ = ["Engine", "PendingOperation", "Setup"]
