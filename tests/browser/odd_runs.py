"""Runs at the edges of what there is: one step, no loss, only numbers that are not, names without end."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sonde.core import schema
from sonde.records import Block, Event, Evidence, Finding, RunHeader, Site
from sonde.store import RunWriter

DEEP = ".".join(["encoder", "layers", "0", *["residual_attention_block_with_a_very_long_name"] * 6, "projection"])


def write_values(path: Path, values: dict[str, list[float]], *, names: tuple[str, ...] = (), steps: int | None = None):
    """Write a run whose scalars are given by name, with gradients of the named modules, and return its writer."""
    count = steps if steps is not None else max((len(each) for each in values.values()), default=0)
    sites = [Site(id=at, name=name, quantity="scalar") for at, name in enumerate(values)]
    sites += [
        Site(id=len(sites) + at, name=f"{name}.weight", quantity="gradient", kind="Linear", shape=(4, 4))
        for at, name in enumerate(names)
    ]
    modules = [{"name": name, "kind": "Linear"} for name in names]
    header = RunHeader(
        schema_version=schema.SCHEMA_VERSION, created=1_700_000_000.0, sonde_version="0",
        model={"name": "Odd", "modules": modules}, config={"lr": 0.1},
    )  # fmt: skip
    writer = RunWriter(path, header)
    writer.take_sites(sites)
    for step in range(1, count + 1):
        row = [each[step - 1] for each in values.values()] + [0.1 / step] * len(names)
        bins = np.zeros((len(row), schema.NUM_BINS), np.uint64)
        writer.take_block(
            Block(
                step=step, time=1_700_000_000.0 + step, sites=np.arange(len(row), dtype=np.uint32),
                rows=schema.rows_of_values(np.array(row)), bins=bins, binned=np.zeros(len(row), bool),
            )
        )  # fmt: skip
    return writer


def long_finding(site: str) -> Finding:
    """Return a finding whose every text is long."""
    return Finding(
        kind="vanishing_gradient", severity="warning", confidence=0.9, step=1, last_step=3, sites=(site,) * 12,
        evidence=(Evidence(name="a reason " * 40, value=float("inf"), threshold=1.0, relation=">"),),
        cause="It goes on and on " * 60, fix="Do this " * 60, refute="See that " * 60, explains=(),
    )  # fmt: skip


def write_all(folder: Path) -> None:
    """Write one run of each kind."""
    write_values(folder / "one step", {"loss": [2.5], "accuracy": [0.1]}, names=("first", "second")).close()
    write_values(folder / "all nan", {"loss": [float("nan")] * 8}, names=("first",)).close()
    broken = [3.0, 2.0, float("inf"), 1.5, float("nan"), float("-inf"), 1.2]
    write_values(folder / "some nan", {"loss": broken, "f1": [float("nan")] * 3 + [0.5] * 4}).close()
    write_values(folder / "no loss", {}, names=("first", "second"), steps=12).close()
    writer = write_values(folder / ("long" + "-and-longer" * 18), {"loss": [3.0, 2.0, 1.0]}, names=(DEEP, f"{DEEP}_2"))
    writer.take_finding(long_finding(f"{DEEP}.weight:gradient"))
    writer.close()
    write_values(folder / "zero steps", {}).close()
    for status, kind, words in (
        ("interrupted", "interrupted", "KeyboardInterrupt"),
        ("failed", "exception", "RuntimeError: <b>shapes</b>"),
    ):
        writer = write_values(folder / f"ended {status}", {"loss": [2.0, 1.0]})
        writer.take_event(Event(event_type=kind, message=words, timestamp=1_700_000_003.0, step=2))
        writer.final_state = status
        writer.close()
