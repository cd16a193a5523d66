"""Which samples a datapoint holds, and what of a batch's outputs belongs to which of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sonde.probes import dense

SampleId = int | str


@dataclass(frozen=True, slots=True)
class PerSample:
    """One entry for each sample of a batch, cut apart when the batch is.

    For debuggers that know what belongs to which sample. Plain lists are left whole, since a list as long as the batch
    may be anything: the four numbers of a shape, say.
    """

    entries: list[Any]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, sample: int) -> Any:
        return self.entries[sample]


def per_sample(entries: list[Any]) -> Any:
    """Return one entry for each sample; for a sample that came alone just the entry."""
    return entries[0] if len(entries) == 1 else PerSample(entries)


def sample_ids(datapoint: Mapping[str, Any]) -> list[SampleId]:
    """Return the names of the samples: `meta_info.idx`, which is a number, a text, or a list, tuple, array or tensor.

    Raises:
        AssertionError: There is no `meta_info` or no `idx`.
        ValueError: It names nothing, or something that is neither number nor text.

    """
    assert "meta_info" in datapoint, f"the datapoint has no 'meta_info', only {sorted(map(str, datapoint))}"
    meta_info = datapoint["meta_info"]
    if isinstance(meta_info, list | tuple):  # left uncollated: one for each sample
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


def split_samples(outputs: Mapping[str, Any], num_samples: int) -> list[dict[str, Any]]:
    """Return what belongs to each sample of a batch, in the shape it would have if it had come alone.

    Tensors and arrays whose first axis is the batch are cut and keep that axis, with length 1; entries of `PerSample`
    are handed out; everything else belongs to all samples.
    """
    return [{name: _part(value, at, num_samples) for name, value in outputs.items()} for at in range(num_samples)]


def _part(value: Any, at: int, num_samples: int) -> Any:
    if isinstance(value, PerSample):
        return value[at] if len(value) == num_samples else value.entries
    if isinstance(value, Tensor | np.ndarray):
        return value if num_samples == 1 else _cut(value, at, num_samples)
    if isinstance(value, Mapping):
        return {key: _part(item, at, num_samples) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(item, at, num_samples) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_part(item, at, num_samples) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return _part(named, at, num_samples)
    return value


def _cut(value: Any, at: int, num_samples: int) -> Any:
    if value.ndim == 0 or value.shape[0] != num_samples:
        return value
    return (dense(value) if isinstance(value, Tensor) else value)[at : at + 1]
