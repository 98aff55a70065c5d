"""The shared-memory engine: collectives and point-to-point messages among processes of one host."""
