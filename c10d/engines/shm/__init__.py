"""The shared-memory engine: collectives and messages among processes of one host."""
