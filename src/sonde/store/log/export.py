"""Convert a run to one long table, for pandas and Arrow: a row for each reading of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.core import schema, statistics
from sonde.errors import MissingExtra
from sonde.records import Site
from sonde.store import series
from sonde.store.series import ALL_COLUMNS, Readings

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from sonde.store.log.reader import Run

LABELS = ("site", "name", "quantity")


def columns(run: Run, sites: Sequence[Site], stats: Sequence[str] | None) -> tuple[dict[str, Any], list[Site], Any]:
    """Return the columns of the table, the sites it is about, and which of them each line belongs to."""
    for stat in stats or ():
        statistics.find(stat)
    parts: dict[str, list[Any]] = {}
    which = []
    for at, site in enumerate(sites):
        for rank in run.ranks_of(site):
            found = run.stored(site, ALL_COLUMNS, bins=bool(stats), rank=rank)
            for name, values in _part(found, rank, stats).items():
                parts.setdefault(name, []).append(values)
            which.append(np.full(len(found), at, dtype=np.int32))
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    if not joined:
        joined = {name: np.zeros(0) for name in ("step", "span", "rank", *(stats or schema.COLUMNS))}
    at_block = np.clip(np.searchsorted(run.blocks.step, joined["step"]), 0, max(0, len(run.blocks) - 1))
    times = {name: getattr(run.blocks, name)[at_block] for name in ("time", "epoch")}
    head = {name: joined.pop(name) for name in ("step", "span", "rank")}
    return {**head, **times, **joined}, list(sites), np.concatenate(which) if which else np.zeros(0, np.int32)


def _part(found: Readings, rank: int, stats: Sequence[str] | None) -> dict[str, Any]:
    head = {"step": found.step, "span": found.span, "rank": np.full(len(found), rank, dtype=np.int32)}
    if stats is None:
        return head | {name: found.rows[:, i] for i, name in enumerate(schema.COLUMNS)}
    return head | {stat: series.compute(stat, found) for stat in stats}


def to_pandas(run: Run, sites: Sequence[Site], stats: Sequence[str] | None) -> pandas.DataFrame:
    """Return the table as a pandas DataFrame."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", "export", "A pandas table") from None
    values, about, which = columns(run, sites, stats)
    labels = {
        "site": pandas.Categorical.from_codes(which, pandas.Index([site.key for site in about])),
        **{name: np.array([getattr(site, name) for site in about], dtype=object)[which] for name in LABELS[1:]},
    }
    epoch = pandas.array(values.pop("epoch"), dtype="Int64")
    epoch[epoch < 0] = pandas.NA
    head = {name: values.pop(name) for name in ("step", "span", "time")}
    return pandas.DataFrame({**head, "epoch": epoch, "rank": values.pop("rank"), **labels, **values})


def _label(site: Site, name: str) -> str:
    return site.key if name == "site" else str(getattr(site, name))


def to_arrow(run: Run, sites: Sequence[Site], stats: Sequence[str] | None) -> pyarrow.Table:
    """Return the table as an Arrow table."""
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra("pyarrow", "export", "An Arrow table") from None
    values, about, which = columns(run, sites, stats)
    epoch = values.pop("epoch")
    head = {name: values.pop(name) for name in ("step", "span", "time")}
    labels = {
        name: pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(which), pyarrow.array([_label(site, name) for site in about], pyarrow.string())
        )
        for name in LABELS
    }
    known = pyarrow.array(epoch, mask=epoch < 0)
    return pyarrow.table({**head, "epoch": known, "rank": values.pop("rank"), **labels, **values})
