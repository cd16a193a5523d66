"""Find the picture in a row of tokens: how many lead tokens there are, and how high and wide the grid is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

# A class token, a distillation token and up to 14 registers. More leftover tokens than that means another grid.
MAX_LEAD_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """`lead` tokens (class, registers), then `height` x `width` patches, row by row."""

    lead: int
    height: int
    width: int


def find_grid(num_tokens: int, image: tuple[int, int] | None) -> TokenGrid | None:
    """Return the grid with the fewest lead tokens that a picture of this size can be cut into; None if there is none.

    A patch is as high as it is wide, so the grid follows from the picture's shape; without a picture it is square.

    >>> find_grid(201, (224, 224))   # a class token and four registers before 14 x 14 patches
    TokenGrid(lead=5, height=14, width=14)
    >>> find_grid(33, (64, 128))
    TokenGrid(lead=1, height=4, width=8)
    """
    for shapes in _shapes(num_tokens, image):
        fitting = [(num_tokens - height * width, height, width) for height, width in shapes]
        fitting = [grid for grid in fitting if 0 <= grid[0] <= MAX_LEAD_TOKENS]
        if fitting:
            return TokenGrid(*min(fitting))
    return None


def _shapes(num_tokens: int, image: tuple[int, int] | None) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of possible grids, the likeliest list first."""
    if image is None:
        side = math.isqrt(num_tokens)
        yield [(side, side)]
        return
    height, width = image
    patches = range(1, min(height, width) + 1)
    yield [(height // patch, width // patch) for patch in patches if height % patch == width % patch == 0]
    yield [(height // patch, width // patch) for patch in patches]  # the rest of the picture is cut off,
    yield [(-(-height // patch), -(-width // patch)) for patch in patches]  # or it is padded


def picture_size(inputs: Any) -> tuple[int, int] | None:
    """Return the height and width of the first batch of pictures among nested inputs."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[-2], inputs.shape[-1]) if inputs.dim() >= 4 else None
    items = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, list | tuple) else ()
    return next((size for item in items if (size := picture_size(item)) is not None), None)
