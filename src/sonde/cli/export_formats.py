"""The file formats of `sonde export`: each writes pieces of a long table to one file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from sonde.errors import MissingExtra

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
def open_writer(kind: str, path: Path, stats: Sequence[str]) -> Iterator[Writer]:
    """Open a file of a format (`parquet`, `csv` or `json`) with the columns of `IDENTITY` and of `stats`."""
    if kind == "parquet":
        with _open_parquet(path, stats) as writer:
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


class _Csv:
    """Comma-separated values; what is not known is empty."""

    def __init__(self, file: IO[str], stats: Sequence[str]) -> None:
        self._rows = csv.writer(file, lineterminator="\n")
        self._rows.writerow((*IDENTITY, *stats))

    def write(self, rows: SiteRows) -> None:
        self._rows.writerows(["" if _unknown(value) else value for value in row] for row in _plain_rows(rows))


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


class _Parquet:
    """Parquet, one row group for each piece; what is not known is null."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self._writer, self._schema = writer, schema

    def write(self, rows: SiteRows) -> None:
        import pyarrow

        if not len(rows):
            return
        epochs = pyarrow.array(rows.epochs, mask=rows.epochs < 0)
        head = [pyarrow.array(rows.steps), pyarrow.array(rows.spans), pyarrow.array(rows.times), epochs]
        # The labels are the same in all rows of a piece: as dictionaries they take no room.
        same = pyarrow.array([0] * len(rows), pyarrow.int32())
        names = (rows.site.key, rows.site.name, rows.site.quantity)
        labels = [pyarrow.DictionaryArray.from_arrays(same, pyarrow.array([name])) for name in names]
        ranks = pyarrow.array([rows.rank] * len(rows), pyarrow.int32())
        stats = [pyarrow.array(values, from_pandas=True) for values in rows.stats.values()]
        self._writer.write_table(pyarrow.Table.from_arrays([*head, ranks, *labels, *stats], schema=self._schema))


@contextmanager
def _open_parquet(path: Path, stats: Sequence[str]) -> Iterator[Writer]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "export", "Writing Parquet") from None
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    whole = pyarrow.int64()
    kinds = [whole, whole, pyarrow.float64(), whole, pyarrow.int32(), text, text, text]
    fields: list[tuple[str, Any]] = [*zip(IDENTITY, kinds, strict=True), *((name, pyarrow.float64()) for name in stats)]
    schema = pyarrow.schema(fields)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        yield _Parquet(writer, schema)
