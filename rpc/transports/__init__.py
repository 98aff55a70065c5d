"""How envelopes travel between two workers: over a gRPC stream, or within one process."""
