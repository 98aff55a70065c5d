"""torch.profiler and the autograd profiler across workers."""
