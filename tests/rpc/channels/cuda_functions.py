"""Functions that tests of CUDA tensors call on other workers."""

import os

import torch

kept: list[torch.Tensor] = []


def set_environment(environment: dict[str, str]) -> None:
    """Sets variables before anything uses CUDA. (Importing a test module for GPUs may do that.)"""
    os.environ.update(environment)


def describe(tensor: torch.Tensor) -> tuple[str, float, tuple[int, ...], tuple[int, ...], bool]:
    """Returns device, sum, shape, strides, and whether the tensor requires grad."""
    total = tensor.detach().cpu().double().sum().item()
    return str(tensor.device), total, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


def describe_all(tensors: list[torch.Tensor]) -> list[tuple[str, float, tuple[int, ...], tuple[int, ...], bool]]:
    return [describe(tensor) for tensor in tensors]


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def overwrite(tensor: torch.Tensor) -> torch.Tensor:
    tensor.fill_(-1.0)
    return tensor


def keep(tensor: torch.Tensor, *_: object) -> None:
    kept.append(tensor)


def kept_sums() -> list[float]:
    return [tensor.cpu().double().sum().item() for tensor in kept]
