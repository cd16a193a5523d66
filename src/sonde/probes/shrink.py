"""Make outputs smaller: average over windows of their places, at any rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonde.probes.axes import channel_axis, place_axes, witnessed_axis


def downsample(tensor: Tensor, factor: int, module: nn.Module | None = None) -> Tensor:
    """Return `tensor` averaged over windows of `factor` along every place axis; a shorter axis becomes one window.

    Where the axes are two maps wide this is `avg_pool2d`: places beyond the last whole window are left out. Outputs
    without places (rank 2 and less) come back as they are.

    >>> import torch
    >>> downsample(torch.ones(1, 8, 7, 2), 4).shape
    torch.Size([1, 8, 1, 1])
    """
    axes = _pooled_axes(tensor, module)
    if factor <= 1 or not axes or tensor.numel() == 0:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.float()
    windows: list[int] = []
    shape: list[int] = []
    for axis, size in enumerate(tensor.shape):
        if axis not in axes:
            shape.append(size)
            continue
        width = min(factor, size)
        tensor = tensor.narrow(axis, 0, size // width * width)
        shape += [size // width, width]
        windows.append(len(shape) - 1)
    return tensor.reshape(shape).mean(dim=windows)


def _pooled_axes(tensor: Tensor, module: nn.Module | None) -> tuple[int, ...]:
    if tensor.dim() < 3:
        return ()
    channels = witnessed_axis(module, tensor)
    if channels is None and tensor.dim() == 3:
        return (1, 2)  # nothing says which axis holds features: a plain stack of maps
    return place_axes(tensor, 1 if channels is None else channels)


def pooled_features(tensor: Tensor, module: nn.Module | None = None, *, token: int | None = None) -> Tensor:
    """Return one feature vector per sample: the mean over places, or the features of one token."""
    channels = channel_axis(module, tensor)
    if tensor.dim() < 3 or channels is None:
        return tensor
    if token is not None:
        flat = tensor.movedim(channels, -1).flatten(1, -2)
        return flat[:, token]
    floats = tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()
    return torch.mean(floats, dim=place_axes(tensor, channels))
