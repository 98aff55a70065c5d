"""The Gloo engine: CPU collectives and messages over TCP, on torch's ProcessGroupGloo."""
