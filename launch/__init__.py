"""Starts several processes of a program: on this host, or on the nodes of a Ray cluster. See api.py."""

from .api import Backoff, LaunchedProcess, ray, spawn, this_process

__all__ = ["Backoff", "LaunchedProcess", "ray", "spawn", "this_process"]
