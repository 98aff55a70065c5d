"""The channel for large payloads between workers of one host: segments of shared memory."""
