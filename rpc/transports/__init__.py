"""Transports carry envelopes between two workers."""
