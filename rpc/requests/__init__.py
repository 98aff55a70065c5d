"""Requests, those of this worker and those of others, from their making to their answers."""
