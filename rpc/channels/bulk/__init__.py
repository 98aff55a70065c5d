"""Bulk connections: TCP connections of their own for large payloads between hosts."""
