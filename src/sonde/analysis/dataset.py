"""Many runs as a dataset of Parquet tables that query engines read as they are.

Each table is a folder with one file per run. The file in `runs/` is written last and holds the fingerprint of what was
exported, so an export that was interrupted, or a run that changed since, is exported again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sonde.analysis import SiteRows, ending_of, events_of, find_loss, read_rows, windows
from sonde.analysis.export_formats import open_writer, replacing
from sonde.analysis.sweep import read_row
from sonde.core import files
from sonde.core.statistics import STATISTICS
from sonde.errors import MissingExtra, OptionError, RunError
from sonde.records import Finding, RunHeader
from sonde.store import Run, open_run
from sonde.store.remote import mirror
from sonde.store.remote.address import ObjectStore, as_address
from sonde.version import VERSION

if TYPE_CHECKING:
    import pyarrow

TABLES: Final = ("runs", "series", "findings", "events")
_MARKER: Final = "dataset.json"
_FORMAT: Final = {"format": "sonde-dataset", "version": 1}
LABELS: Final = {"run_id": "string", "run": "string", "project": "string", "folder": "string"}
# Columns and their Arrow types; `series` has those of `sonde export --to parquet`. Times are seconds since the epoch.
FINDING_COLUMNS: Final = LABELS | {
    "kind": "string",
    "severity": "string",
    "step": "int64",
    "last_step": "int64",
    "time": "float64",
    "confidence": "float64",
    "exact": "bool",
    "sites": "list",
    "cause": "string",
    "fix": "string",
}
_EVENT_COLUMNS: Final = LABELS | {
    "event_type": "string",
    "message": "string",
    "step": "int64",
    "time": "float64",
    "data": "string",
}
_RUN_COLUMNS: Final = LABELS | {
    "status": "string",
    "created": "float64",
    "model": "string",
    "steps": "int64",
    "last_step": "int64",
    "last_loss": "float64",
    "ending": "string",
    "settings": "string",
    "metrics": "string",
    "problem": "string",
    "fingerprint": "string",
}
_PLACELESS_FOLDERS: Final = ("runs", "")
"""Names of folders that name no project."""


# --------------------------------------------------------------------------------
# What identifies a run, and whether it changed.


def fingerprint(place: str | Path) -> str:
    """Return a hash of the names, sizes and versions of the files of a run, and of the version of Sonde that reads it.

    Args:
        place: The folder of the run, or its address in an object store, of which nothing is fetched.

    """
    address = as_address(place)
    if address is None:
        found = _files_below(str(place))
    else:
        objects = ObjectStore(address).objects()
        found = [f"{name}\0{objects[name].size}\0{objects[name].version}" for name in sorted(objects)]
    return hashlib.sha256("\n".join([VERSION, *found]).encode(errors="surrogateescape")).hexdigest()[:32]


def _files_below(run: str) -> list[str]:
    parts = []
    for folder, _, names in sorted(os.walk(run)):
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118 - there may be millions
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue  # its writer has just replaced it; the next call finds the new file
            parts.append(f"{os.path.relpath(path, run)}\0{found.st_size}\0{found.st_mtime_ns}")
    return parts


def labels_of(place: str | Path, header: RunHeader | None = None) -> dict[str, str]:
    """Return the columns that every table has: what identifies a run, and what it belongs to.

    The project is the setting `project` of the run's config; otherwise the nearest folder above that is not called
    `runs`.

    >>> labels_of("/home/a/mnist/runs/first")["project"], labels_of("s3://bucket/speech/first")["folder"]
    ('mnist', 's3://bucket/speech')
    """
    text = str(place)
    user = {} if header is None else header.config.get("user")
    named = user.get("project") if isinstance(user, Mapping) else None
    folder, _, _ = text.rpartition("/")
    above = next((name for name in reversed(folder.split("/")) if name not in _PLACELESS_FOLDERS), "")
    return {
        "run_id": hashlib.sha256(os.fsencode(text)).hexdigest()[:16],
        "run": files.utf8(text),
        "project": named if isinstance(named, str) and named else files.utf8(above),
        "folder": files.utf8(folder),
    }


def describe_finding(run: Run, finding: Finding) -> dict[str, Any]:
    """Return a finding as a row of the table of findings, without the columns that identify the run."""
    at = int(run.blocks.step.searchsorted(finding.step))
    time = float(run.blocks.time[min(at, len(run.blocks) - 1)]) if len(run.blocks) else float(run.header.created)
    names = ("kind", "severity", "step", "last_step", "confidence", "exact", "cause", "fix")
    return {name: getattr(finding, name) for name in names} | {"time": time, "sites": list(finding.sites)}


# --------------------------------------------------------------------------------
# Writing the tables.


def open_dataset(out: Path) -> dict[str, str]:
    """Make the folder of a dataset if there is none, and return the fingerprints of the runs in it by their ids.

    Raises:
        MissingExtra: pyarrow is not installed.
        OptionError: The folder holds something else.

    """
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtra("pyarrow", "export", "Writing Parquet") from None
    make_folder(out)
    for table in TABLES:
        (out / table).mkdir(exist_ok=True)
    known: dict[str, str] = {}
    for file in (out / "runs").glob("*.parquet"):
        found = parquet.read_table(file, columns=["run_id", "status", "fingerprint"], partitioning=None)
        # A run that was live may have died since, which changes no file.
        known |= {row["run_id"]: row["fingerprint"] for row in found.to_pylist() if row["status"] != "live"}
    return known


def make_folder(out: Path) -> None:
    """Make a folder for results, and mark it as such.

    Raises:
        OptionError: It exists and holds something else.

    """
    if out.exists() and not (out / _MARKER).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists and was not made by this command; name a new or empty folder.")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _MARKER).is_file():
        files.write(out / _MARKER, _FORMAT)


def write_tables(place: str, out: Path) -> dict[str, Any]:
    """Write the files of one run, replacing those of an earlier export; return its row of the table of runs."""
    # Taken before the run is read: what is written to it meanwhile is exported the next time.
    mark = {"fingerprint": fingerprint(place)}
    try:
        run = open_run(place)
    except (RunError, OSError) as error:
        return _write_all(out, labels_of(place), None, mark | {"problem": str(error)})
    try:
        return _write_all(out, labels_of(place, run.header), run, mark | _describe_run(run))
    finally:
        run.close()
        mirror.forget(run.path)


def _write_all(out: Path, labels: dict[str, str], run: Run | None, about: dict[str, Any]) -> dict[str, Any]:
    target = {table: out / table / f"{labels['run_id']}.parquet" for table in TABLES}
    stats = tuple(STATISTICS)
    with replacing(target["series"]) as unfinished, open_writer("parquet", unfinished, stats, labels) as writer:
        for rows in _series(run, stats):
            writer.write(rows)
    findings = [] if run is None else [describe_finding(run, each) for each in run.findings]
    _write(target["findings"], FINDING_COLUMNS, [labels | row for row in findings])
    _write(target["events"], _EVENT_COLUMNS, [labels | row for row in _describe_events(run)])
    _write(target["runs"], _RUN_COLUMNS, [labels | about])
    return labels | about


def _series(run: Run | None, stats: Sequence[str]) -> Iterator[SiteRows]:
    if run is None:
        return
    for site, part in product([each for each in run.sites if each.same_as is None], list(windows(run))):
        yield from read_rows(run, site, stats, part)


def _describe_events(run: Run | None) -> Iterator[dict[str, Any]]:
    for event in () if run is None else events_of(run):
        plain = {name: getattr(event, name) for name in ("event_type", "message", "step")}
        yield plain | {"time": event.timestamp, "data": files.text(event.data)}


def _describe_run(run: Run) -> dict[str, Any]:
    row, ending, loss = read_row(run), ending_of(run), find_loss(run.sites)
    values = run.series(loss, "value").values.tolist() if loss is not None else []
    return {
        "status": run.status,
        "created": float(run.header.created),
        "model": str(run.header.model.get("name", "")),
        "steps": len(run.steps),
        "last_step": row.last_step,
        "last_loss": values[-1] if values else None,
        "ending": None if ending is None else ending.text,
        "settings": files.text(row.settings),
        "metrics": files.text({name: asdict(metric) for name, metric in row.metrics.items()}),
        "problem": "\n".join(run.problems) or None,
    }


def make_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> pyarrow.Table:
    """Return rows as an Arrow table with exactly these columns; what a row lacks is null."""
    import pyarrow

    kinds: dict[str, Any] = {
        "bool": pyarrow.bool_(),
        "float64": pyarrow.float64(),
        "int64": pyarrow.int64(),
        "list": pyarrow.list_(pyarrow.string()),
        "string": pyarrow.string(),
    }
    fields = [(name, kinds[kind]) for name, kind in columns.items()]
    return pyarrow.Table.from_pylist(
        [{name: _utf8(row.get(name)) for name in columns} for row in rows], pyarrow.schema(fields)
    )


def _utf8(value: Any) -> Any:
    """Return texts so that a column can hold them; anything else as it is."""
    if isinstance(value, list):
        return [_utf8(each) for each in value]
    return files.utf8(value) if isinstance(value, str) else value


def _write(target: Path, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow.parquet as parquet

    with replacing(target) as unfinished:
        parquet.write_table(make_table(columns, rows), unfinished, compression="zstd")
