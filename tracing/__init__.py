"""Traces of calls through several workers: docs/tracing.md."""

from .profile import Profile, profile

__all__ = ["Profile", "profile"]
