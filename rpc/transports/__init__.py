"""Transports: how envelopes get from one worker to another, by a gRPC stream or within one process."""
