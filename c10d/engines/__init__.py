"""Engines carry out the operations of process groups: one contract (base), one folder per implementation."""

from ..pending import PendingOperation
from .base import Engine, Setup

__all__ = ["Engine", "PendingOperation", "Setup"]
