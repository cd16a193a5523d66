"""A large run for the viewer: many sites and steps in sealed segments, scores of many samples, captures of a few."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from store import HEADER, make_sites

from sonde.core import schema
from sonde.records import Site
from sonde.store import layout, lease
from sonde.store.header import write_header
from sonde.store.log import table
from sonde.store.log.attempts import Attempt
from sonde.store.log.retention import MAX_SEGMENT_BYTES
from sonde.store.log.segment_format import Origin, write_segment

ELEMENTS = 768 * 768
ROW_BYTES = 108


def window_for(steps: int, sites: int, budget: int) -> int:
    """Return the window that thinning would arrive at: the first power of two that fits."""
    window = 1
    while steps // window * sites * ROW_BYTES > budget:
        window *= 2
    return window


def with_long_names(sites: list[Site]) -> list[Site]:
    """Return the sites with names as wrappers and large models give them."""
    roles = (
        "self_attention.query_key_value",
        "self_attention.output_projection",
        "feed_forward.up",
        "feed_forward.down",
    )
    long = [
        f"module.model.transformer.decoder.layers.{i // 4}.{roles[i % 4]}.weight" for i in range(len(sites) // 4 + 1)
    ]
    return [replace(site, name=long[site.id // 4]) if site.quantity != "scalar" else site for site in sites]


def write_large(path: Path, steps: int, sites: int, budget: int) -> int:
    """Write a run as a long training leaves it when its budget is spent; return the window."""
    window = window_for(steps, sites, budget)
    folder = layout.rank_folder(path, 0)
    folder.mkdir(parents=True)
    known = with_long_names(make_sites(sites))
    names = dict.fromkeys(site.name.removesuffix(".weight") for site in known if site.quantity != "scalar")
    modules = [{"name": name, "kind": "Linear"} for name in names]
    write_header(
        path, replace(HEADER, model={"name": "synthetic", "modules": modules, "num_parameters": ELEMENTS * sites // 4})
    )
    per_segment = max(1, int(MAX_SEGMENT_BYTES * 0.7) // (sites * ROW_BYTES))
    firsts = np.arange(0, steps, window, dtype=np.int64)
    origin = Origin(sites=known, attempts=[Attempt(0, 0, 0.0)], window=window)
    rng = np.random.default_rng(0)
    for number, begin in enumerate(range(0, len(firsts), per_segment)):
        block_steps = firsts[begin : begin + per_segment]
        write_segment(
            folder / layout.segment_name(number, number), _table(block_steps, sites, window, steps, rng), origin
        )
    done = replace(lease.mine("finished", 0, time.time()), blocks=len(firsts), last_step=steps - 1)
    lease.write(folder, done)
    return window


def _table(steps: np.ndarray, sites: int, window: int, last: int, rng: np.random.Generator) -> table.Table:
    count, rows = len(steps), sites * len(steps)
    none = np.zeros(rows, np.uint8)
    # Smaller in the depth, smaller with time, and some noise: what gradients look like from afar.
    depth = np.repeat(np.exp(-3.0 * np.arange(sites) / sites), count)
    scale = 1e-2 * depth * np.tile(np.exp(-2.0 * steps / last), sites) * np.exp(0.2 * rng.standard_normal(rows))
    stats = np.zeros((schema.NUM_COLUMNS, rows))
    total = float(ELEMENTS * window)
    stats[schema.SEEN], stats[schema.COUNT] = window, total
    stats[schema.MIN], stats[schema.MAX], stats[schema.MEAN] = -4 * scale, 4 * scale, 0.01 * scale
    stats[schema.M2], stats[schema.ABS_SUM] = total * scale**2, 0.8 * total * scale
    spans = np.full(count, window, np.uint32)
    return table.Table(
        site=np.arange(sites, dtype=np.uint32),
        offset=np.arange(0, rows + 1, count, dtype=np.uint64),
        step=np.tile(steps, sites),
        span=np.tile(spans, sites),
        merged=np.tile(spans, sites),
        stats=stats,
        hist_lo=none,
        hist_len=none,
        hist_offset=np.zeros(rows + 1, np.uint64),
        hist=np.zeros(0, np.uint32),
        blocks=table.Blocks(steps, steps * 0.1, np.zeros(count, np.int64), np.zeros(count, bool), spans),
    )


def write_samples(path: Path, samples: int, epochs: int = 3, captured: int = 32) -> None:
    """Write scores of many samples for some epochs, and captures of a few of the last one."""
    rng = np.random.default_rng(0)
    for epoch in range(epochs):
        folder = path / f"epoch_{epoch}"
        folder.mkdir(parents=True)
        losses = rng.exponential(1.0 / (epoch + 1), samples)
        scores = {"loss": losses.round(5).tolist(), "accuracy": (losses < 0.7).astype(float).tolist()}
        reply = {
            "aggregated": {name: float(np.mean(values)) for name, values in scores.items()},
            "per_datapoint": scores,
            "ids": list(range(samples)),
            "directions": {"loss": -1, "accuracy": 1},
        }
        (folder / "validation_scores.json").write_text(json.dumps(reply))
    worst = np.argsort(-losses)[:captured].tolist()
    _capture(path / f"epoch_{epochs - 1}" / "debugger", worst)


def _capture(folder: Path, samples: list[int]) -> None:
    import torch

    from sonde.capture import Capture

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    with Capture(page_bytes=100 << 20) as capture:
        capture.open(folder)
        for sample in samples:
            maps = {"features": torch.randn(64, 28, 28, generator=generator), "mean": 0.5}
            capture.add(sample, {"layer": maps})
