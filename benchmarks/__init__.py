"""Benchmarks of gradwire against TensorPipe, Gloo and mpi4py, such as `python -m benchmarks`."""
