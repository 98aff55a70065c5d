"""NCCL: collectives of GPUs, through cupy."""

from .engine import NcclEngine

__all__ = ["NcclEngine"]
