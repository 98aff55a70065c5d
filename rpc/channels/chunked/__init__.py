"""The channel for large payloads where there are no other connections for them: chunks on gRPC streams."""
