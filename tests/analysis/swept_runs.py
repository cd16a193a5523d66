"""A sweep made up for tests: three rates with two seeds each, one run that failed and one that ends with NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tests.analysis.made_run import START, Recipe, write_run

from sonde.core import schema
from sonde.records import Event, RunHeader, Site

RATES, SEEDS = (0.001, 0.01, 0.1), (0, 1)


def accuracy(rate: float, seed: int, step: int) -> float:
    """The accuracy that a run of the sweep logs: the middle rate is best, and its best step is the tenth."""
    return {0.001: 0.5, 0.01: 0.9, 0.1: 0.7}[rate] + 0.02 * seed - 0.001 * abs(step - 10)


@dataclass
class Swept(Recipe):
    """One run of the sweep."""

    steps: int = 12
    layers: int = 1
    dies_at: int | None = None
    nan_at: int | None = None
    rate: float = 0.001

    def sites(self) -> list[Site]:
        sites = super().sites()
        return [*sites, Site(id=len(sites), name="val_acc", quantity="scalar")]

    def run_header(self) -> RunHeader:
        config = {"user": {"lr": self.rate, "seed": self.seed, "batch": 64}}
        return replace(super().run_header(), config=config, created=START + 100 * self.rate + self.seed)

    def _reading(self, site, step, depth, rng):
        if site.name == "val_acc":
            return schema.row_of_value(accuracy(self.rate, self.seed, step)), np.zeros(64, dtype=np.uint64)
        row, bins = super()._reading(site, step, depth, rng)
        if site.quantity == "output" and site.name == "head":  # the layer that differs between the rates
            row[schema.M2] *= (self.rate / 0.001) ** 2
        return row, bins


def write_sweep(folder: Path) -> Path:
    """Write the sweep."""
    for rate in RATES:
        for seed in SEEDS:
            write_run(folder / f"lr{rate}-seed{seed}", Swept(rate=rate, seed=seed))
    write_run(folder / "nan", Swept(rate=0.1, seed=2, nan_at=12))
    failed = write_run(folder / "failed", Swept(rate=0.1, seed=3, steps=5), close=False)
    trace = 'Traceback:\n  File "/home/me/train.py", line 7, in <module>\n    step()\nValueError: shapes do not match\n'
    message = "ValueError: shapes do not match"
    failed.take_event(
        Event(event_type="exception", message=message, step=5, timestamp=START, data={"traceback": trace})
    )
    failed.final_state = "failed"
    failed.close()
    return folder
