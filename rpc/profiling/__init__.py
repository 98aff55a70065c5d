"""torch.profiler and the autograd profiler for calls between workers."""
