"""Threads, timeouts and futures: where incoming calls run and how callers wait for results."""
