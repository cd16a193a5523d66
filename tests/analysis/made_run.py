"""Runs made up for tests: a small transformer whose statistics follow formulas, written through the real store.

`write_run` gives a run with one layer whose gradients die, and one step with NaN in another, unless told otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sonde.core import schema
from sonde.records import Block, Event, RunHeader, Site
from sonde.store import RunWriter

DYING, BROKEN = "blocks.2.mlp", "blocks.5.mlp"
START = 1_700_000_000.0


def gaussian(count: int, scale: float, *, mean: float = 0.0, zeros: float = 0.0, nans: int = 0):
    """Return the row and bins that `count` normal numbers would have, without drawing them."""
    row, bins = np.zeros(schema.NUM_COLUMNS), np.zeros(schema.NUM_BINS, dtype=np.uint64)
    row[schema.SEEN], row[schema.COUNT], row[schema.NAN] = 1, count, nans
    good = count - nans
    if scale == 0:
        row[schema.ZERO] = good
        return row, bins
    row[schema.ZERO] = round(zeros * good)
    row[schema.MEAN], row[schema.M2] = mean, good * scale**2
    row[schema.MIN], row[schema.MAX] = mean - 4 * scale, mean + 4 * scale
    row[schema.ABS_SUM] = good * 0.8 * scale
    below = np.array(
        [math.erf(edge / scale / math.sqrt(2)) if np.isfinite(edge) else 1.0 for edge in schema.bin_edges()]
    )
    bins[:] = np.round(np.diff(below) * (good - row[schema.ZERO])).astype(np.uint64)
    return row, bins


@dataclass
class Recipe:
    """What a made-up run is like."""

    steps: int = 60
    layers: int = 6
    dies_at: int | None = 30
    nan_at: int | None = 45
    seed: int = 0
    every: int = 1
    header: dict = field(default_factory=dict)

    def modules(self) -> list[str]:
        return ["embed", *(f"blocks.{i}.{kind}" for i in range(self.layers) for kind in ("attn", "mlp")), "head"]

    def sites(self) -> list[Site]:
        sites: list[Site] = []

        def add(name: str, quantity: str, **more) -> None:
            sites.append(Site(id=len(sites), name=name, quantity=quantity, **more))

        for module in self.modules():
            for quantity in ("parameter", "gradient", "update"):
                add(f"{module}.weight", quantity, kind="Linear", shape=(256, 256), dtype="float32")
            add(module, "output", kind="Linear", shape=(32, 256), dtype="float32")
        add("loss", "scalar")
        add("optimizer.group0.lr", "scalar")
        return sites

    def run_header(self) -> RunHeader:
        modules = [{"name": name, "kind": "Linear"} for name in self.modules()]
        parameters = [{"name": f"{name}.weight", "shape": [256, 256], "device": "cpu"} for name in self.modules()]
        return RunHeader(
            schema_version=schema.SCHEMA_VERSION,
            created=START,
            sonde_version="0.1.0",
            model={"name": "TinyTransformer", "modules": modules, "parameters": parameters}
            | {"num_parameters": 65_536 * len(modules)},
        )

    def blocks(self) -> Iterator[Block]:
        sites = self.sites()
        rng = np.random.default_rng(self.seed)
        depth = {name: index for index, name in enumerate(self.modules())}
        for step in range(1, self.steps + 1, self.every):
            made = [self._reading(site, step, depth.get(_module(site), 0), rng) for site in sites]
            yield Block(
                step=step,
                time=START + 0.05 * step,
                sites=np.arange(len(sites), dtype=np.uint32),
                rows=np.stack([row for row, _ in made]),
                bins=np.stack([bins for _, bins in made]),
                binned=np.array([site.quantity != "scalar" for site in sites]),
            )

    def _reading(self, site: Site, step: int, depth: int, rng: np.random.Generator):
        noise = math.exp(rng.normal(0.0, 0.08))
        module = _module(site)
        dying = module == DYING and self.dies_at is not None and step > self.dies_at
        fade = math.exp(-12 * min(1.0, (step - self.dies_at) / (0.3 * self.steps))) if dying else 1.0
        nans = 12 if module == BROKEN and step == self.nan_at else 0
        size = int(np.prod(site.shape)) if site.shape else 1
        if site.name == "loss":
            value = 2.4 * math.exp(-3 * step / self.steps) * noise + 0.05
            return schema.row_of_value(float("nan") if step == self.nan_at else value), np.zeros(64, dtype=np.uint64)
        if site.quantity == "scalar":
            warm = min(1.0, (step + 1) / 10)
            return schema.row_of_value(1e-3 * warm), np.zeros(64, dtype=np.uint64)
        if site.quantity == "parameter":
            return gaussian(size, 0.05 * (1 + 0.3 * step / self.steps))
        if site.quantity == "output":
            return gaussian(size, 0.9 * noise, zeros=0.3)
        scale = 2e-3 * 0.93**depth * noise * fade
        if site.quantity == "gradient":
            return gaussian(size, scale, nans=nans)
        return gaussian(size, 5e-5 * noise * fade**0.5)


def _module(site: Site) -> str:
    return site.name.removesuffix(".weight")


def write_run(path: Path, recipe: Recipe | None = None, *, state: str = "finished", close: bool = True) -> RunWriter:
    """Write a made-up run and return its writer, closed unless told otherwise."""
    recipe = recipe or Recipe()
    writer = RunWriter(path, recipe.run_header())
    writer.take_sites(recipe.sites())
    for block in recipe.blocks():
        writer.take_block(block)
    writer.take_event(Event(event_type="epoch", message="epoch 1", step=0, timestamp=START))
    if recipe.nan_at is not None:
        what = f"12 of 65,536 elements of {BROKEN}.weight:gradient are NaN"
        when = START + 0.05 * recipe.nan_at
        writer.take_event(Event(event_type="nonfinite", message=what, step=recipe.nan_at, timestamp=when))
    if close:
        writer.final_state = state
        writer.close()
    return writer
