"""A run and captures that an earlier version of Sonde wrote, read to the last bit.

`golden/` was written once, by the code of 2026-11-16: two ranks, a second attempt that replaces the end of the first, a
journal that a crash left open with a torn tail, events, findings, a sealed page and one that was never sealed.
`golden.json` is what that code read from it, except that copies of a parameter on several ranks now count once (they
were added up). A change that breaks this test breaks the runs people have.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sonde.store import load_debug_outputs, open_run, verify
from sonde.store.pages import Preview

HERE = Path(__file__).parent
STATISTICS = ("mean", "std", "min", "max", "norm", "l1", "abs_max", "zero_share", "ge_one_share", "seen", "count")


def read_fields(record: object, names: str) -> list:
    return [getattr(record, name) for name in names.split()]


def read_run(path: Path) -> dict:
    run = open_run(path, clock=lambda: 1_700_001_000.0)
    return {
        "header": read_fields(run.header, "created sonde_version model config"),
        "status": run.status,
        "ranks": run.ranks,
        "sites": [read_fields(site, "id key kind shape dtype aliases same_as") for site in run.sites],
        "blocks": [column.tolist() for column in read_fields(run.blocks, "step time epoch skipped span")],
        "attempts": [read_fields(each, "number start_step time") for each in run.attempts],
        "events": [read_fields(each, "event_type message step timestamp data") for each in run.events],
        "findings": [
            [
                *read_fields(each, "kind severity confidence step last_step sites cause fix refute explains data"),
                [[str(item.value), *read_fields(item, "name threshold relation series")] for item in each.evidence],
            ]
            for each in run.findings
        ],
        "series": {
            f"{site.key} {rank}": [run.series(site, stat, rank=rank).values.tolist() for stat in STATISTICS]
            for site in run.sites
            for rank in (None, *run.ranks_of(site))
        },
        "bins": {site.key: run.histogram(site)[1].tolist() for site in run.sites},
        "problems": run.problems,
    }


def describe(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), list(np.shape(value)), np.asarray(value).tobytes().hex()]
    if isinstance(value, dict):
        return [[repr(key), describe(inside)] for key, inside in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(describe, value)]
    return repr(value)


def show(preview: Preview) -> list:
    levels = None if preview.thumbnail is None else preview.thumbnail.tolist()
    return [list(preview.shape), preview.dtype, repr(preview.stats), levels, preview.channels, preview.num_tiles]


def read_captures(folder: Path) -> dict:
    captured = load_debug_outputs(folder)
    assert captured.problems == []
    previews = {point: captured.previews(point) for point in captured}
    return {
        repr(point): [
            describe(dict(captured[point])),
            describe(captured.info(point)),
            {name: {path: show(each) for path, each in found.items()} for name, found in previews[point].items()},
        ]
        for point in captured
    }


def test_an_old_run_reads_as_it_did_when_it_was_written():
    expected = json.loads((HERE / "golden.json").read_text())
    read = {"run": read_run(HERE / "golden"), "captures": read_captures(HERE / "golden" / "epoch_0" / "debugger")}
    assert json.loads(json.dumps(read)) == expected


def test_every_checksum_of_an_old_run_is_right():
    report = verify(HERE / "golden")
    assert report.ok, report
    assert (report.num_blocks, report.num_captures, len(report.torn_tails)) == (12, 4, 1)
