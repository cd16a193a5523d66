"""Which axis of a module's output holds its channels, and which ones are places."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


def channel_axis(module: nn.Module | None, tensor: Tensor) -> int | None:
    """Return the axis of channels or features of a batch of outputs; None if it has none (rank 0 or 1).

    Rank alone cannot tell `[batch, channels, length]` from `[batch, tokens, features]`. The layers inside the module
    can: a convolution or a batch norm of that width says 1, a linear layer or a layer norm of that width says last.
    Without a witness, rank 3 is read as tokens and higher ranks as maps.

    >>> import torch
    >>> channel_axis(nn.Conv1d(3, 8, 1), torch.ones(2, 8, 5)), channel_axis(nn.Linear(3, 8), torch.ones(2, 5, 8))
    (1, 2)
    """
    last = tensor.dim() - 1
    if last <= 1:
        return last if last == 1 else None
    return witnessed_axis(module, tensor) or (1 if last >= 3 else last)


def witnessed_axis(module: nn.Module | None, tensor: Tensor) -> int | None:
    """Return the axis of channels that the layers inside the module tell; None if none of them does."""
    for is_first, width in _witnesses(module):
        axis = 1 if is_first else tensor.dim() - 1
        if tensor.shape[axis] == width:
            return axis
    return None


def place_axes(tensor: Tensor, channels: int | None) -> tuple[int, ...]:
    """Return all axes but the batch and the channels."""
    return tuple(axis for axis in range(1, tensor.dim()) if axis != channels)


def _witnesses(module: nn.Module | None) -> Iterator[tuple[bool, int]]:
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
