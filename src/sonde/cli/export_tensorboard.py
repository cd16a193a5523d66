"""`sonde export RUN --to tensorboard`: curves and histograms of a run, as TensorBoard shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.analysis import has_stat, keys_of, usual_stat
from sonde.cli.export_formats import replacing
from sonde.errors import MissingExtra, OptionError
from sonde.records import Site
from sonde.store import Run

_MOST_HISTOGRAMS: Final = 100


def check_folder(out: Path, force: bool) -> None:
    """Refuse a folder that cannot or must not be written to, before any work is done.

    Raises:
        OptionError: It is a file, its parent is missing, or it holds event files already.

    """
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file; --out names the folder that TensorBoard's --logdir is given.")
    if not out.parent.is_dir():
        raise OptionError(f"There is no folder {out.parent} to make {out.name} in. Make it first.")
    if not force and out.is_dir() and any(out.glob("*tfevents*")):
        raise OptionError(f"{out} holds event files already; TensorBoard would mix them. --force writes there anyway.")


def export_tensorboard(run: Run, sites: Sequence[Site], stats: Sequence[str] | None, out: Path) -> dict[str, Any]:
    """Write event files into a folder; return how many tags and points they hold, and the file.

    Scalars keep the names they were logged under. A statistic of a tensor is `gradient_rms/fc.weight`; without `stats`
    each site has the one that says most about it. Histograms are of the logarithm of the magnitude, as a run has them.
    """
    write = _event_writer()
    out.mkdir(exist_ok=True)
    created = run.header.created
    target = out / f"events.out.tfevents.{int(created)}.sonde"
    tags = points = 0
    with replacing(target) as unfinished, unfinished.open("wb") as file:
        write(file, {"wall_time": created, "file_version": "brain.Event:2"})
        for tag, steps, values in _curves(run, sites, stats):
            for step, time, value in zip(steps, _times(run, steps), values, strict=True):
                write(file, _event(step, time, {"tag": tag, "simple_value": float(value)}))
            tags, points = tags + 1, points + len(steps)
        for tag, steps, counts in _histograms(run, sites):
            for step, time, row in zip(steps, _times(run, steps), counts, strict=True):
                write(file, _event(step, time, {"tag": tag, "histo": _histogram(row)}))
            tags, points = tags + 1, points + len(steps)
    return {"file": target, "tags": tags, "points": points}


def _event_writer() -> Callable[[IO[bytes], dict[str, Any]], None]:
    """Return TensorBoard's own way to write an event to a file.

    Raises:
        MissingExtra: TensorBoard is not installed.

    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ModuleNotFoundError:
        raise MissingExtra("tensorboard", "tensorboard", "Writing event files") from None
    return lambda file, fields: RecordWriter(file).write(Event(**fields).SerializeToString())


def _event(step: int, time: float, value: dict[str, Any]) -> dict[str, Any]:
    return {"wall_time": float(time), "step": int(step), "summary": {"value": [value]}}


def _histogram(counts: NDArray[np.float64]) -> dict[str, Any]:
    """Return counts of powers of two as TensorBoard's histogram; its sums are over the middles of the bins."""
    edges = np.arange(schema.FIRST_EXPONENT, schema.FIRST_EXPONENT + schema.NUM_BINS + 1, dtype=np.float64)
    full, middles = np.flatnonzero(counts), (edges[1:] + edges[:-1]) / 2
    return {
        "min": edges[full[0]],
        "max": edges[full[-1] + 1],
        "num": counts.sum(),
        "sum": counts @ middles,
        "sum_squares": counts @ middles**2,
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }


def _times(run: Run, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    # A merged reading bears its first step; the line of that very step may be gone.
    at = np.clip(np.searchsorted(run.blocks.step, steps), 0, max(len(run.blocks) - 1, 0))
    times: NDArray[np.float64] = run.blocks.time[at]
    return times


def _curves(
    run: Run, sites: Sequence[Site], stats: Sequence[str] | None
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    keys = keys_of(run)
    for site in sites:
        wanted = [usual_stat(site, keys)] if stats is None else stats
        for stat in wanted:
            if not has_stat(site, stat, keys):
                continue
            series = run.series(site, stat)
            # A scalar that was logged as NaN was NaN; a statistic that is NaN is not known.
            known = np.ones(len(series.steps), np.bool_) if site.quantity == "scalar" else np.isfinite(series.values)
            if known.any():
                yield tag_of(site, stat), series.steps[known], series.values[known]


def tag_of(site: Site, stat: str) -> str:
    """Return how a curve is called in TensorBoard: what stands before the first slash is its section.

    >>> tag_of(Site(id=0, name="fc.weight", quantity="gradient"), "rms")
    'gradient_rms/fc.weight'
    >>> tag_of(Site(id=0, name="val/accuracy", quantity="scalar"), "value")
    'val/accuracy'
    """
    if site.quantity == "scalar" and stat == "value":
        return site.key.replace(":scalar", "")
    return f"{site.quantity}_{stat}/{site.key.replace(f':{site.quantity}', '', 1)}"


def _histograms(run: Run, sites: Sequence[Site]) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    for site in sites:
        if site.quantity in ("scalar", "vital"):
            continue
        steps, bins = run.histogram(site)
        full = bins.any(axis=1)
        steps, counts = steps[full], bins[full].astype(np.float64)
        if not len(steps):
            continue
        starts = np.unique(np.linspace(0, len(steps), min(_MOST_HISTOGRAMS, len(steps)), endpoint=False).astype(int))
        yield tag_of(site, "log2_magnitude"), steps[starts], np.add.reduceat(counts, starts, axis=0)
