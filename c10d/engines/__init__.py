"""Engines carry out the operations of process groups: one contract (base), one folder per implementation."""

from .base import Engine, PendingOperation, Setup

__all__ = ["Engine", "PendingOperation", "Setup"]
