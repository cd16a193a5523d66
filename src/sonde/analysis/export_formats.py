"""The file formats of `sonde export`: each writes pieces of a long table to one file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sonde.analysis import has_stat, keys_of, tag_of, usual_stat
from sonde.core import files, schema
from sonde.errors import MissingExtra, OptionError, escaped
from sonde.records import Site
from sonde.store import Run

if TYPE_CHECKING:
    from sonde.analysis import SiteRows


# The same columns as `run.to_pandas()` has, in the same order.
IDENTITY = ("step", "span", "time", "epoch", "rank", "site", "name", "quantity")


class Writer(Protocol):
    """Takes the pieces of a table, in order."""

    def write(self, rows: SiteRows) -> None:
        """Append the rows of one site."""


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Give a path to write to that becomes `out` only when all went well."""
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def open_writer(
    kind: str, path: Path, stats: Sequence[str], labels: Mapping[str, str] | None = None
) -> Iterator[Writer]:
    """Open a file of a format (`parquet`, `csv` or `json`) with the columns of `IDENTITY` and of `stats`.

    In Parquet, columns with the same text in all rows may come before them (`labels`).
    """
    if kind == "parquet":
        with _open_parquet(path, stats, labels or {}) as writer:
            yield writer
        return
    with path.open("w", encoding="utf-8", newline="") as file, text_writer(kind, file, stats) as text:
        yield text


@contextmanager
def text_writer(kind: str, file: IO[str], stats: Sequence[str]) -> Iterator[Writer]:
    """Write a format that is text (`csv` or `json`) to an open file."""
    if kind == "csv":
        yield _Csv(file, stats)
    else:
        as_json = _Json(file)
        yield as_json
        as_json.end()


_FORMULA: Final = ("=", "+", "-", "@")


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        # CSV has no escapes of its own, and is often printed. A spreadsheet would run what looks like a formula.
        return f"'{escaped(value)}" if value.startswith(_FORMULA) else escaped(value)
    return "" if _unknown(value) else value


class _Csv:
    """Comma-separated values; what is not known is empty."""

    def __init__(self, file: IO[str], stats: Sequence[str]) -> None:
        self._rows = csv.writer(file, lineterminator="\n")
        self._rows.writerow((*IDENTITY, *stats))

    def write(self, rows: SiteRows) -> None:
        self._rows.writerows([_cell(value) for value in row] for row in _plain_rows(rows))


class _Json:
    """A JSON list with one object on each line, so that it can also be read line by line."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._between = file, "[\n"

    def write(self, rows: SiteRows) -> None:
        names = (*IDENTITY, *rows.stats)
        for row in _plain_rows(rows):
            known = {name: None if _unknown(value) else value for name, value in zip(names, row, strict=True)}
            self._file.write(self._between + json.dumps(known, allow_nan=False))
            self._between = ",\n"

    def end(self) -> None:
        self._file.write("[]\n" if self._between == "[\n" else "\n]\n")


def _unknown(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _plain_rows(rows: SiteRows) -> Iterator[tuple[Any, ...]]:
    labels = (rows.rank, rows.site.key, rows.site.name, rows.site.quantity)
    head = zip(rows.steps.tolist(), rows.spans.tolist(), rows.times.tolist(), rows.epochs.tolist(), strict=True)
    stats = zip(*(values.tolist() for values in rows.stats.values()), strict=True)
    for (step, span, time, epoch), values in zip(head, stats, strict=True):
        yield step, span, time, math.nan if epoch < 0 else epoch, *labels, *values


_ROWS_IN_GROUP: Final = 1 << 16


class _Parquet:
    """Parquet, in row groups of pieces; what is not known is null."""

    def __init__(self, writer: Any, schema: Any, labels: Mapping[str, str]) -> None:
        self._writer, self._schema, self._labels = writer, schema, tuple(labels.values())
        self._waiting: list[Any] = []

    def write(self, rows: SiteRows) -> None:
        import pyarrow

        if not len(rows):
            return
        epochs = pyarrow.array(rows.epochs, mask=rows.epochs < 0)
        head = [pyarrow.array(rows.steps), pyarrow.array(rows.spans), pyarrow.array(rows.times), epochs]
        # The labels are the same in all rows of a piece: as dictionaries they take no room.
        same = pyarrow.array([0] * len(rows), pyarrow.int32())
        of_run, of_site = (
            [pyarrow.DictionaryArray.from_arrays(same, pyarrow.array([files.utf8(name)])) for name in names]
            for names in (self._labels, (rows.site.key, rows.site.name, rows.site.quantity))
        )
        ranks = pyarrow.array([rows.rank] * len(rows), pyarrow.int32())
        stats = [pyarrow.array(values, from_pandas=True) for values in rows.stats.values()]
        columns = [*of_run, *head, ranks, *of_site, *stats]
        self._waiting.append(pyarrow.Table.from_arrays(columns, schema=self._schema))
        if sum(map(len, self._waiting)) >= _ROWS_IN_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one row group."""
        import pyarrow

        if self._waiting:
            self._writer.write_table(pyarrow.concat_tables(self._waiting).unify_dictionaries())
        self._waiting = []


@contextmanager
def _open_parquet(path: Path, stats: Sequence[str], labels: Mapping[str, str]) -> Iterator[Writer]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "export", "Writing Parquet") from None
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    whole = pyarrow.int64()
    kinds = [whole, whole, pyarrow.float64(), whole, pyarrow.int32(), text, text, text]
    fields: list[tuple[str, Any]] = [*zip(IDENTITY, kinds, strict=True), *((name, pyarrow.float64()) for name in stats)]
    schema = pyarrow.schema([*((name, text) for name in labels), *fields])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as file:
        writer = _Parquet(file, schema, labels)
        yield writer
        writer.flush()


# --------------------------------------------------------------------------------
# `sonde export RUN --to tensorboard`: curves and histograms of a run, as TensorBoard shows them.


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
    # A merged reading carries its first step; the row of that step may be gone.
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
                yield files.utf8(tag_of(site, stat)), series.steps[known], series.values[known]


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
        yield files.utf8(tag_of(site, "log2_magnitude")), steps[starts], np.add.reduceat(counts, starts, axis=0)
