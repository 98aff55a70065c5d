"""Engines carry out the operations of process groups: one contract (base), a module or folder for each."""

from .base import Engine, PendingOperation, Setup

__all__ = ["Engine", "PendingOperation", "Setup"]
