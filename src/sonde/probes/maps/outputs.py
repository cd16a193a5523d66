"""Bring module outputs into a common form: dense layout, channel axis, smaller size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# --------------------------------------------------------------------------------
# Tensors of unusual layouts as plain ones.


def dense(tensor: Tensor) -> Tensor:
    """Return a detached tensor whose elements can be read one after another: quantized and sparse ones are expanded."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


# --------------------------------------------------------------------------------
# Which axis of a module's output holds its channels, and which ones are places.


_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


def channel_axis(module: nn.Module | None, tensor: Tensor) -> int | None:
    """Return the axis of channels or features of a batch of outputs; None if it has none (rank 0 or 1).

    Rank alone cannot tell `[batch, channels, length]` from `[batch, tokens, features]`. The layers inside the module
    can: a convolution or a batch norm of that width means axis 1, a linear layer or a layer norm of that width the
    last one. Without such a layer, rank 3 is read as tokens and higher ranks as maps.

    >>> import torch
    >>> channel_axis(nn.Conv1d(3, 8, 1), torch.ones(2, 8, 5)), channel_axis(nn.Linear(3, 8), torch.ones(2, 5, 8))
    (1, 2)
    """
    last = tensor.dim() - 1
    if last <= 1:
        return last if last == 1 else None
    return axis_from_layers(module, tensor) or (1 if last >= 3 else last)


def axis_from_layers(module: nn.Module | None, tensor: Tensor) -> int | None:
    """Return the axis of channels according to the layers inside the module; None if none of them has its width."""
    for is_first, width in _layer_widths(module):
        axis = 1 if is_first else tensor.dim() - 1
        if tensor.shape[axis] == width:
            return axis
    return None


def place_axes(tensor: Tensor, channels: int | None) -> tuple[int, ...]:
    """Return all axes but the batch and the channels."""
    return tuple(axis for axis in range(1, tensor.dim()) if axis != channels)


def _layer_widths(module: nn.Module | None) -> Iterator[tuple[bool, int]]:
    """Yield (channels come first, width) for the layers of a module, the last one first: it made the output."""
    for layer in reversed(list(module.modules()) if module is not None else []):
        if isinstance(layer, _CHANNELS_FIRST):
            yield True, _first_width(layer)
        elif isinstance(layer, nn.Linear):
            yield False, layer.out_features
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm) and len(layer.normalized_shape) == 1:
            yield False, layer.normalized_shape[0]
        elif isinstance(layer, nn.Embedding):
            yield False, layer.embedding_dim


def _first_width(layer: nn.Module) -> int:
    for name in ("out_channels", "num_features", "num_channels"):
        width = getattr(layer, name, None)
        if isinstance(width, int):
            return width
    return -1


# --------------------------------------------------------------------------------
# Make outputs smaller: average over windows of their places, at any rank.


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
    channels = axis_from_layers(module, tensor)
    if channels is None and tensor.dim() == 3:
        return (1, 2)  # which axis holds features is unknown: a plain stack of maps
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
