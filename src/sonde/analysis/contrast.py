"""Find what separates failed from good samples: the captured statistics whose values differ most.

Each statistic of each layer and channel is compared by ranks (Mann-Whitney), so that neither scale nor a few extreme
values decide, and all p-values are corrected for how many were tried (Benjamini-Hochberg).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.downsample import spaced
from sonde.errors import OptionError, RunDamaged
from sonde.store import DebugOutputs
from sonde.store.pages import Datapoint
from sonde.store.pages.nodes import find_batch_values, path_to_text

Matrix = NDArray[np.float64]

MOST_SAMPLES: Final = 400  # of each group; beyond, evenly spaced ones are read
MOST_CHANNELS: Final = 1024
MOST_ELEMENTS: Final = 1 << 22  # of one tensor
_MOST_FEATURES: Final = 50_000
_FEW: Final = 8  # below this the normal approximation of ranks is rough


@dataclass(frozen=True, slots=True)
class Feature:
    """One number that is known of every sample."""

    debugger: str
    path: str
    """Where in the debugger's output, as `feature_map`."""
    statistic: str
    channel: int | None = None
    """Which channel, feature or element; None for the whole tensor."""
    unit: str = "channel"
    """What is counted: a `channel` of maps, a `feature` of tokens, an `element` of a vector."""

    @property
    def words(self) -> str:
        """The feature in words."""
        where = f"{self.debugger}/{self.path}" if self.path else self.debugger
        return f"{self.statistic} of {where}" + ("" if self.channel is None else f", {self.unit} {self.channel}")


@dataclass(frozen=True, slots=True)
class Separation:
    """How well one feature tells failed from good samples."""

    feature: Feature
    effect: float
    """Rank-biserial correlation: 1 if every failed sample has more of it than any good one, -1 if less, 0 if alike."""
    cohens_d: float
    p: float
    q: float
    """The p-value, corrected for the number of features that were tried."""
    failed_median: float
    good_median: float
    also: tuple[Feature, ...] = ()
    """Features that say the same: they separate the samples in the same order and as far."""


@dataclass(frozen=True, slots=True, eq=False)
class Contrast:
    """What separates two groups of samples."""

    separations: list[Separation]
    """The clearest first."""
    failed: list[Datapoint]
    good: list[Datapoint]
    features: int
    """How many features were tried."""
    is_rough: bool
    """Whether a group is so small that p-values are only rough."""
    of_batches: tuple[str, ...] = ()
    """Captured values that were computed over whole batches, and so say nothing about one sample; they are left out."""
    values: dict[Feature, Matrix] = field(default_factory=dict)
    """By feature: its value for each failed sample, then for each good one."""


def contrast(
    outputs: DebugOutputs, failed: Sequence[Datapoint], good: Sequence[Datapoint], *, most: int = MOST_SAMPLES
) -> Contrast:
    """Compare what was captured of failed and of good samples.

    Args:
        outputs: Captures.
        failed: Samples that failed; those that were not captured are left out.
        good: Samples to compare them with.
        most: How many samples of each group are read.

    Raises:
        OptionError: Fewer than two samples of a group were captured.

    """
    bad = spaced([each for each in failed if each in outputs], most)
    fine = spaced([each for each in good if each in outputs], most)
    if len(bad) < 2 or len(fine) < 2:
        raise OptionError(
            f"{len(bad)} failed and {len(fine)} good samples were captured; two of each are needed. "
            "Choose another epoch, metric or percentile."
        )
    features, values = feature_matrix(outputs, [*bad, *fine])
    found = fold_duplicates(separate(features, values[: len(bad)], values[len(bad) :]))
    columns = dict(zip(features, values.T, strict=True))
    is_rough = min(len(bad), len(fine)) < _FEW
    return Contrast(found, bad, fine, len(features), is_rough, _of_batches(outputs, [*bad, *fine]), columns)


def fold_duplicates(found: Sequence[Separation]) -> list[Separation]:
    """Put features that separate samples alike under the first of them."""
    kept: list[Separation] = []
    seen: dict[tuple[float, float, float], int] = {}
    for each in found:
        key = (each.effect, each.p, float(f"{each.cohens_d:.4g}"))
        if key in seen:
            first = kept[seen[key]]
            kept[seen[key]] = replace(first, also=(*first.also, each.feature))
        else:
            seen[key] = len(kept)
            kept.append(each)
    return kept


def separate(features: Sequence[Feature], failed: Matrix, good: Matrix) -> list[Separation]:
    """Rank features by how well they separate two groups: rows are samples, columns are features.

    Features that are unknown for a sample, or alike everywhere, are left out.
    """
    both = np.concatenate([failed, good])
    useful = np.isfinite(both).all(0) & (both.max(0, initial=-np.inf) > both.min(0, initial=np.inf))
    failed, good = failed[:, useful], good[:, useful]
    kept = [feature for feature, is_useful in zip(features, useful, strict=True) if is_useful]
    if not kept:
        return []
    effect, p = rank_test(failed, good)
    q, d = adjust(p), cohens_d(failed, good)
    middle_failed, middle_good = np.median(failed, 0), np.median(good, 0)
    order = np.lexsort((-np.abs(d), p, -np.abs(effect), q >= 0.05))
    table = np.stack([effect, d, p, q, middle_failed, middle_good], 1).tolist()
    return [Separation(kept[at], *_six(table[at])) for at in order]


def _six(row: Sequence[float]) -> tuple[float, float, float, float, float, float]:
    effect, d, p, q, failed, good = row
    return effect, d, p, q, failed, good


def rank_test(first: Matrix, second: Matrix) -> tuple[Matrix, Matrix]:
    """Compare two groups column by column: rank-biserial correlation and two-sided Mann-Whitney p.

    The p-value is the normal approximation with ties and continuity corrected.
    """
    n, m = len(first), len(second)
    ranks, ties = midranks(np.concatenate([first, second]))
    u = ranks[:n].sum(0) - n * (n + 1) / 2
    total = n + m
    spread = np.sqrt(np.maximum(n * m / 12 * (total + 1 - ties / (total * (total - 1))), 0))
    away = np.maximum(np.abs(u - n * m / 2) - 0.5, 0)
    z = np.divide(away, spread, out=np.zeros_like(away), where=spread > 0)
    p = np.array([math.erfc(each / math.sqrt(2)) for each in z.tolist()])
    return 2 * u / (n * m) - 1, p


def midranks(values: Matrix) -> tuple[Matrix, Matrix]:
    """Return the ranks within each column, equals sharing theirs, and the sum of t³ - t over groups of t equals."""
    rows, columns = values.shape
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, 0)
    ranks, ties = np.empty_like(values), np.zeros(columns)
    starts = np.ones((rows + 1, columns), bool)
    starts[1:rows] = ordered[1:] != ordered[:-1]
    for column in range(columns):
        edges = np.flatnonzero(starts[:, column])
        sizes = np.diff(edges)
        shared = np.repeat((edges[:-1] + edges[1:] + 1) / 2, sizes)
        ranks[order[:, column], column] = shared
        ties[column] = float((sizes.astype(np.float64) ** 3 - sizes).sum())
    return ranks, ties


def cohens_d(first: Matrix, second: Matrix) -> Matrix:
    """Return the difference of means in pooled standard deviations, column by column; infinite without spread."""
    n, m = len(first), len(second)
    pooled = ((n - 1) * first.var(0, ddof=1) + (m - 1) * second.var(0, ddof=1)) / (n + m - 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((first.mean(0) - second.mean(0)) / np.sqrt(pooled))


def adjust(p: Matrix) -> Matrix:
    """Correct p-values for their number, as Benjamini and Hochberg do.

    >>> adjust(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.04, 0.04]
    """
    order = np.argsort(p)
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1)
    return adjusted


def feature_matrix(outputs: DebugOutputs, samples: Sequence[Datapoint]) -> tuple[list[Feature], Matrix]:
    """Read statistics of every captured tensor of some samples; NaN where a sample lacks one."""
    blocks: dict[_Block, Matrix] = {}
    width = 0
    for row, sample in enumerate(samples):
        for block, values in _blocks(outputs, sample):
            if block not in blocks:
                if width + len(values) > _MOST_FEATURES:
                    continue
                width += len(values)
                blocks[block] = np.full((len(samples), len(values)), np.nan)
            blocks[block][row] = values
    features = [feature for block in blocks for feature in block.features()]
    return features, np.concatenate(list(blocks.values()), axis=1) if blocks else np.empty((len(samples), 0))


@dataclass(frozen=True, slots=True)
class _Block:
    """What is measured of one captured value: a few statistics of the whole, and some of each channel."""

    debugger: str
    path: str
    whole: tuple[str, ...]
    by_channel: tuple[str, ...] = ()
    channels: int = 0
    unit: str = "channel"

    def features(self) -> Iterator[Feature]:
        for name in self.whole:
            yield Feature(self.debugger, self.path, name)
        for name in self.by_channel:
            for channel in range(self.channels):
                yield Feature(self.debugger, self.path, name, channel, self.unit)


def _blocks(outputs: DebugOutputs, sample: Datapoint) -> Iterator[tuple[_Block, Matrix]]:
    """Yield what is measured of one sample; what is damaged is left out."""
    try:
        captured = outputs[sample]
    except (RunDamaged, OSError):
        return
    for debugger in captured:
        try:
            value = captured[debugger]
        except (RunDamaged, OSError):
            continue
        for path, leaf in leaves(value):
            measured = _measure(debugger, path, leaf)
            if measured is not None:
                yield measured


def _of_batches(outputs: DebugOutputs, samples: Sequence[Datapoint]) -> tuple[str, ...]:
    """Return where values of whole batches were captured."""
    found: dict[str, None] = {}
    for sample in samples:
        try:
            entry, _ = outputs.entry(sample)
        except (RunDamaged, OSError):
            continue
        for debugger, node in entry.outputs.items():
            found.update((path_to_text((debugger, *path)), None) for path in find_batch_values(node))
    return tuple(found)


def leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and arrays inside a nested value, each with its path."""
    inside: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        inside = iter(value.items())
    elif isinstance(value, list | tuple):
        if value and all(isinstance(each, int | float) for each in value):
            yield path, np.array(value, np.float64)
            return
        inside = iter(enumerate(value))
    if inside is None:
        yield path, value
    elif depth < 16:
        for key, item in inside:
            yield from leaves(item, f"{path}/{key}" if path else str(key), depth + 1)


_MAPS: Final = re.compile(r"cam|saliency|attribution|mask|heat|attention|attn", re.IGNORECASE)
_WHOLE: Final = ("mean", "std", "max", "share of zeros")


def _measure(debugger: str, path: str, leaf: Any) -> tuple[_Block, Matrix] | None:
    if isinstance(leaf, bool | int | float):
        return _Block(debugger, path, ("value",)), np.array([float(leaf)])
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "fiub" or not 0 < leaf.size <= MOST_ELEMENTS:
        return None  # texts, objects, complex numbers, and what is too large to read for every sample
    array = leaf.astype(np.float64)
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if array.size == 1:
        return _Block(debugger, path, ("value",)), array.reshape(1)
    with np.errstate(all="ignore"):
        whole = [array.mean(), array.std(), array.max(), (array == 0).mean()]
        names, channels = ((), []) if _is_picture(debugger, path, leaf, array) else _by_channel(array)
    size = len(channels[0]) if channels else 0
    unit = {1: "element", 2: "feature"}.get(array.ndim, "channel")
    return _Block(debugger, path, _WHOLE, names, size, unit), np.concatenate([whole, *channels])


def _is_picture(debugger: str, path: str, leaf: NDArray[Any], array: Matrix) -> bool:
    """Return whether a plane is a map of pixels, of which a row or column alone says nothing."""
    return array.ndim == 2 and (leaf.dtype.kind in "iub" or bool(_MAPS.search(f"{debugger}/{path}")))


def _by_channel(array: Matrix) -> tuple[tuple[str, ...], list[Matrix]]:
    """Return statistics by channel: elements of a vector, columns of a plane (tokens by features), or planes."""
    if array.ndim == 1:
        return (("value",), [array]) if len(array) <= MOST_CHANNELS else ((), [])
    planes = array.T if array.ndim == 2 else array.reshape(array.shape[0], -1)
    return (("mean", "max"), [planes.mean(1), planes.max(1)]) if len(planes) <= MOST_CHANNELS else ((), [])
