"""The channel for tensors on CUDA devices of one host, and how those of other hosts go by way of host memory."""
