"""The NCCL engine: collectives and messages of CUDA tensors, through cupy."""

from .engine import NcclEngine

__all__ = ["NcclEngine"]
