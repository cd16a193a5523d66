"""Map samples to two dimensions, from captured vectors."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Method = Literal["pca", "umap"]
_MOST_FEATURES: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Points, and how much of the variance the two directions hold; None where that has no meaning."""

    points: NDArray[np.float64]
    explained: tuple[float, float] | None


def methods() -> list[Method]:
    """Return the methods that can be used here: PCA always, UMAP where it is installed."""
    return ["pca", "umap"] if find_spec("umap") else ["pca"]


def vector_of(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what was captured of a sample as one vector: of a feature map the mean of each channel.

    >>> vector_of(np.ones((3, 4, 4))).shape, vector_of(np.ones((1, 8))).shape
    ((3,), (8,))
    """
    squeezed = np.squeeze(array)
    if squeezed.ndim >= 3:  # channels first
        squeezed = squeezed.reshape(squeezed.shape[0], -1).mean(1)
    return np.nan_to_num(np.atleast_1d(squeezed).reshape(-1)[:_MOST_FEATURES].astype(np.float64))


def embed(vectors: NDArray[np.float64], method: Method = "pca") -> Embedding:
    """Place vectors in the plane, one a row."""
    if method == "umap" and len(vectors) > 3:
        reducer = import_module("umap").UMAP(n_neighbors=min(15, len(vectors) - 1), random_state=0, n_jobs=1)
        return Embedding(np.asarray(reducer.fit_transform(vectors), np.float64), None)
    if not vectors.size:
        return Embedding(np.zeros((len(vectors), 2)), None)
    centred = vectors - vectors.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(vectors), 2))
    width = min(2, len(sizes))
    points[:, :width] = left[:, :width] * sizes[:width]
    total = float((sizes**2).sum()) or 1.0
    shares = [float(size**2 / total) for size in sizes[:2]] + [0.0, 0.0]
    return Embedding(points, (shares[0], shares[1]))
