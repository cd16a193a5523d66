"""The samples of a datapoint, and the part of a batch's outputs that belongs to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sonde.capture import PerSample, part_of
from sonde.store.pages import Datapoint

SampleId = Datapoint


def per_sample(entries: list[Any]) -> Any:
    """Return one entry for each sample; for a batch of one, the entry itself."""
    return entries[0] if len(entries) == 1 else PerSample(entries)


def sample_ids(datapoint: Mapping[str, Any]) -> list[SampleId]:
    """Return the names of the samples: `meta_info.idx`, which is a number, a text, or a list, tuple, array or tensor.

    Raises:
        AssertionError: `meta_info` or its `idx` is missing.
        ValueError: It is empty, or holds something that is neither a number nor text.

    """
    assert "meta_info" in datapoint, f"the datapoint has no 'meta_info', only {sorted(map(str, datapoint))}"
    meta_info = datapoint["meta_info"]
    if isinstance(meta_info, list | tuple):  # not collated: one for each sample
        found = [name for each in meta_info for name in _ids(each)]
    else:
        found = _ids(meta_info)
    if not found:
        raise ValueError("meta_info['idx'] names no sample.")
    return found


def _ids(meta_info: Any) -> list[SampleId]:
    assert "idx" in meta_info, f"meta_info has no 'idx', only {sorted(map(str, meta_info))}"
    given = meta_info["idx"]
    if isinstance(given, Tensor | np.ndarray | np.generic):
        given = given.tolist()
    many = given if isinstance(given, list | tuple | range) else [given]
    return [_id(name) for name in many]


def _id(name: Any) -> SampleId:
    if isinstance(name, Tensor | np.ndarray | np.generic):
        name = name.tolist()
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise ValueError(f"A sample is named by a whole number or a text; meta_info['idx'] holds {name!r:.80}.")
    return name


def split_samples(outputs: Mapping[str, Any], samples: Sequence[SampleId]) -> list[dict[str, Any]]:
    """Return what belongs to each sample of a batch, in the shape it would have if the sample had come alone."""
    batch = tuple(samples)
    return [{name: part_of(value, at, batch) for name, value in outputs.items()} for at in range(len(batch))]
