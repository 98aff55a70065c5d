"""Debugging of groups: flight recorder, consistency check of calls, and a barrier that names absent ranks."""
