"""What gradwire costs, next to what came before it: `python -m benchmarks autograd`."""
