"""How large recordings are, and how long it takes to append to them and to read from them: a part of compare.py."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pages
import store
import torch
from programs import Program, cnn
from watchers import folder_bytes, tensorboard, watched

import sonde
from sonde.store import RunWriter

SITES = 200
SAMPLES = 40


def measure_storage(*, quick: bool) -> dict[str, Any]:
    """Return, for Sonde, TensorBoard and pickled files, what one training, one step and one sample take."""
    with tempfile.TemporaryDirectory(prefix="sonde-compare-") as scratch:
        folder = Path(scratch)
        steps = 100 if quick else 300
        found = {"steps": steps, "sites": SITES, "sample_bytes": pages.DATAPOINT_BYTES}
        found["training"] = {
            "Sonde": _training(watched(budget=None), _read_sonde, folder / "sonde", steps),
            "TensorBoard": _training(tensorboard, _read_tensorboard, folder / "tensorboard", steps),
        }
        found["append_s"] = {"Sonde": _append_sonde(folder / "a"), "TensorBoard": _append_tensorboard(folder / "b")}
        found["sample_s"] = _read_samples(folder)
    return found


# ------------------------------------------------------------------ one training


def _training(watcher: Any, read: Callable[[Path], float], folder: Path, steps: int) -> dict[str, float]:
    program: Program = cnn()
    with watcher(program, folder) as after:
        for _ in range(steps):
            after(program.step())
    return {"bytes": folder_bytes(folder), "read_s": min(read(folder) for _ in range(2))}


def _read_sonde(folder: Path) -> float:
    begin = time.perf_counter()
    run = sonde.open_run(folder)
    assert len(run.series(run.find("*:gradient")[0], "norm").values)
    return time.perf_counter() - begin


def _read_tensorboard(folder: Path) -> float:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    begin = time.perf_counter()
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    assert events.Histograms(events.Tags()["histograms"][0])
    return time.perf_counter() - begin


# ------------------------------------------------------------------ one step, already summed up


def _append_sonde(folder: Path) -> float:
    """Return the median time to append a step of readings with histograms to the journal."""
    rng = np.random.default_rng(0)
    writer = RunWriter(folder, store.HEADER)
    writer.take_sites(store.make_sites(SITES))
    taken = []
    for step in range(200):
        block = store.make_block(step, SITES, hist=True, rng=rng)
        begin = time.perf_counter()
        writer.take_block(block)
        taken.append(time.perf_counter() - begin)
    writer.close(60)
    return statistics.median(taken)


def _append_tensorboard(folder: Path) -> float:
    """Return the median time to hand the same histograms, already counted, to TensorBoard's writer."""
    from torch.utils.tensorboard import SummaryWriter

    block = store.make_block(0, SITES, hist=True, rng=np.random.default_rng(0))
    limits = (2.0 ** np.arange(block.bins.shape[1])).tolist()
    counts = [row.tolist() for row in block.bins]
    taken = []
    with SummaryWriter(str(folder)) as writer:
        for step in range(60):
            begin = time.perf_counter()
            for site, row in enumerate(counts):
                writer.add_histogram_raw(f"site/{site}", 0.0, 1.0, sum(row), 1.0, 1.0, limits, row, step)
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


# ------------------------------------------------------------------ one captured sample


def _read_samples(folder: Path) -> dict[str, float]:
    """Return the median time to read one captured tensor of one sample, each time from opening the file."""
    import joblib

    captures = [pages.make(at) for at in range(SAMPLES)]
    pages.write_pages(folder / "pages", captures, sync=False)
    pages.write_joblib(folder / "joblib", captures, sync=False)
    torch.save(captures, folder / "all.pt")
    (page,) = (folder / "joblib").glob("page_0.pkl")
    chosen = [7 * at % SAMPLES for at in range(9)]
    known = joblib.load(page)
    readers: dict[str, Callable[[int], object]] = {
        "Sonde": lambda at: sonde.load_debug_outputs(folder / "pages").tensor(at, "features"),
        "joblib, in pages of 100 MB": lambda at: joblib.load(page)[at % len(known)]["features"],
        "torch.save, one file": lambda at: torch.load(folder / "all.pt", weights_only=True)[at]["features"],
        "torch.save, mapped into memory": lambda at: torch.load(folder / "all.pt", weights_only=True, mmap=True)[at][
            "features"
        ],
    }
    found = {name: pages.time_of(read, chosen, []) for name, read in readers.items()}
    shutil.rmtree(folder / "joblib")
    return found


def storage_table(found: dict[str, Any]) -> str:
    """Return the three tables as Markdown."""
    lines = [f"| CNN, {found['steps']} steps | KB per step | one series, from opening the run |", "|---|--:|--:|"]
    for tool, one in found["training"].items():
        lines.append(f"| {tool} | {one['bytes'] / found['steps'] / 1e3:.0f} | {one['read_s'] * 1e3:.0f} ms |")
    lines += ["", f"| append a step of {found['sites']} histograms, already counted | ms |", "|---|--:|"]
    lines += [f"| {tool} | {seconds * 1e3:.2f} |" for tool, seconds in found["append_s"].items()]
    size = found["sample_bytes"] / 1e6
    lines += [
        "",
        f"| one tensor of one captured sample ({size:.1f} MB each, {SAMPLES} samples), warm | ms |",
        "|---|--:|",
    ]
    lines += [f"| {tool} | {seconds * 1e3:.2f} |" for tool, seconds in found["sample_s"].items()]
    return "\n".join(lines)
