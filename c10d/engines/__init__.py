"""Engines: one contract (base), one file for each kind."""

from .base import Engine, Pending, Setup

__all__ = ["Engine", "Pending", "Setup"]
