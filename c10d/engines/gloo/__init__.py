"""The Gloo engine: collectives over TCP, on torch's ProcessGroupGloo."""
