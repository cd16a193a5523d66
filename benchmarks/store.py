"""What the store costs: appending a step, sealing, and reading a large run back.

    python benchmarks/store.py                                 100,000 steps x 1,000 sites: about 11 GB in --folder
    python benchmarks/store.py --steps 2000 --sites 200        small, for a look

The large run is written segment by segment through the store's own segment writer, as the sealer would leave it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sonde.core import schema
from sonde.records import Block, RunHeader, Site
from sonde.store import RunWriter, layout, lease, list_runs, open_run, verify
from sonde.store.header import write_header
from sonde.store.log import table
from sonde.store.log.attempts import Attempt
from sonde.store.log.retention import MAX_SEGMENT_BYTES
from sonde.store.log.segment_format import Origin, write_segment

HEADER = RunHeader(schema_version=1, created=time.time(), sonde_version="benchmark", model={"name": "synthetic"})
QUANTITIES = ("parameter", "gradient", "update", "output")


def make_sites(count: int) -> list[Site]:
    sites = [
        Site(
            id=i,
            name=f"blocks.{i // 4}.attention.weight",
            quantity=QUANTITIES[i % 4],
            shape=(768, 768),
            dtype="float32",
        )
        for i in range(count - 1)
    ]
    return [*sites, Site(id=count - 1, name="loss", quantity="scalar")]


def make_block(step: int, num_sites: int, *, hist: bool, rng: np.random.Generator) -> Block:
    bins = np.zeros((num_sites, schema.NUM_BINS), dtype=np.uint64)
    if hist:  # a bell over some twenty powers of two, as gradients have
        centre, k = rng.integers(25, 45, (num_sites, 1)), np.arange(schema.NUM_BINS)
        bins[:] = np.maximum(0, 5e5 * np.exp(-(((k - centre) / 4.0) ** 2)) - 0.5).astype(np.uint64)
    return Block(
        step=step,
        time=time.time(),
        sites=np.arange(num_sites, dtype=np.uint32),
        rows=rng.random((num_sites, schema.NUM_COLUMNS)),
        bins=bins,
        binned=np.full(num_sites, hist),
    )


def measure(action: Callable[[], object], repeats: int) -> float:
    """Return the median of some repeats, in seconds."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


class Table:
    """Lines of a name and a figure."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []

    def add(self, name: str, figure: str) -> None:
        self._lines.append((name, figure))
        print(f"  {name:<58}{figure:>16}", flush=True)


def bench_append(out: Table, folder: Path, sites: int, *, hist: bool) -> None:
    path, rng, steps = folder / f"append-{hist}", np.random.default_rng(0), 600
    shutil.rmtree(path, ignore_errors=True)
    what = f"{sites} sites, {'with' if hist else 'no'} histograms"
    writer = RunWriter(path, HEADER, journal_bytes=1 << 40, max_disk_bytes=1 << 50)
    writer.take_sites(make_sites(sites))
    blocks = [make_block(step, sites, hist=hist, rng=rng) for step in range(50)]
    taken = []
    for step in range(steps):
        block = blocks[step % 50]
        object.__setattr__(block, "step", step)
        begin = time.perf_counter()
        writer.take_block(block)
        taken.append(time.perf_counter() - begin)
    journal = (writer.folder / layout.journal_name(0)).stat().st_size
    begin = time.perf_counter()
    writer.close(600)
    sealing = time.perf_counter() - begin
    sealed = sum(file.stat().st_size for file in writer.folder.glob("seg-*"))
    out.add(f"take_block, {what}: median", f"{statistics.median(taken) * 1e6:,.0f} us")
    out.add(f"take_block, {what}: 99th of 100", f"{np.percentile(taken, 99) * 1e6:,.0f} us")
    out.add(f"journal, {what}: a step", f"{journal / steps:,.0f} bytes")
    out.add(f"segment, {what}: a step", f"{sealed / steps:,.0f} bytes")
    out.add(f"sealing in the background, {what}: a step", f"{sealing / steps * 1e6:,.0f} us")
    shutil.rmtree(path)


def bench_sealing_beside(out: Table, folder: Path, sites: int) -> None:
    """Append while the sealer works: what the recording thread feels of it."""
    path, rng = folder / "beside", np.random.default_rng(0)
    shutil.rmtree(path, ignore_errors=True)
    writer = RunWriter(path, HEADER, max_disk_bytes=1 << 50)
    writer.take_sites(make_sites(sites))
    block, taken = make_block(0, sites, hist=False, rng=rng), []
    for step in range(3000):
        object.__setattr__(block, "step", step)
        begin = time.perf_counter()
        writer.take_block(block)
        taken.append(time.perf_counter() - begin)
        time.sleep(0.001)  # the step of a fast loop
    writer.close(600)
    out.add("take_block while sealing and compacting: median", f"{statistics.median(taken) * 1e6:,.0f} us")
    out.add("take_block while sealing and compacting: 99th of 100", f"{np.percentile(taken, 99) * 1e6:,.0f} us")
    shutil.rmtree(path)


def build(path: Path, steps: int, sites: int) -> None:
    """Write a run as a long training would leave it: segments as large as the sealer makes them."""
    folder = layout.rank_folder(path, 0)
    folder.mkdir(parents=True)
    write_header(path, HEADER)
    known = make_sites(sites)
    per_segment = max(1, int(MAX_SEGMENT_BYTES * 0.7) // (sites * 108))
    rng = np.random.default_rng(0)
    noise = rng.random((schema.NUM_COLUMNS, sites * per_segment))
    for number, first in enumerate(range(0, steps, per_segment)):
        count = min(per_segment, steps - first)
        step = np.arange(first, first + count, dtype=np.int64)
        rows = sites * count
        ones = np.ones(rows, np.uint32)
        none = np.zeros(rows, np.uint8)
        sealed = table.Table(
            site=np.arange(sites, dtype=np.uint32),
            offset=np.arange(0, rows + 1, count, dtype=np.uint64),
            step=np.tile(step, sites),
            span=ones,
            merged=ones,
            stats=np.ascontiguousarray(noise[:, :rows]),
            hist_lo=none,
            hist_len=none,
            hist_offset=np.zeros(rows + 1, np.uint64),
            hist=np.zeros(0, np.uint32),
            blocks=table.Blocks(
                step, step * 1.0, np.zeros(count, np.int64), np.zeros(count, bool), np.ones(count, np.uint32)
            ),
        )
        origin = Origin(sites=known, attempts=[Attempt(0, 0, 0.0)])
        write_segment(folder / layout.segment_name(number, number), sealed, origin)
    lease.write(folder, replace(lease.mine("finished", 0, time.time()), blocks=steps, last_step=steps - 1))


def drop_cache(path: Path) -> None:
    """Forget a run's pages, so that the next read comes from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bench_reading(out: Table, path: Path, sites: int) -> None:
    files = list(layout.rank_folder(path, 0).glob("seg-*"))
    out.add("segments", f"{len(files)} files")
    out.add("bytes", f"{sum(file.stat().st_size for file in files) / 1e9:,.2f} GB")
    drop_cache(path)
    out.add("open_run, cold", f"{measure(lambda: open_run(path), 1) * 1e3:,.1f} ms")
    out.add("open_run, warm", f"{measure(lambda: open_run(path), 5) * 1e3:,.1f} ms")
    run = open_run(path)
    key = run.sites[sites // 2].key
    drop_cache(path)
    out.add("one series of all steps, cold", f"{measure(lambda: run.series(key, 'std'), 1) * 1e3:,.1f} ms")
    out.add("one series of all steps, warm", f"{measure(lambda: run.series(key, 'std'), 5) * 1e3:,.1f} ms")
    fresh = [site.key for site in run.sites[10:15]]
    [open_run(path).series(name, "std") for name in fresh]
    first = iter(fresh)
    out.add(
        "one series, warm, its checksums not yet seen",
        f"{measure(lambda: run.series(next(first), 'std'), 5) * 1e3:,.1f} ms",
    )
    out.add(
        "the last 1,000 steps of one series",
        f"{measure(lambda: run.series(key, 'std', start=int(run.steps[-1]) - 999), 5) * 1e3:,.1f} ms",
    )
    bench_moments(out, run, path)
    out.add("list_runs", f"{measure(lambda: list_runs(path.parent), 3) * 1e3:,.1f} ms")
    out.add("refresh with nothing new", f"{measure(run.refresh, 5) * 1e3:,.1f} ms")
    out.add("verify", f"{measure(lambda: verify(path), 1):,.1f} s")


def bench_moments(out: Table, run, path: Path) -> None:
    last = int(run.steps[-1])
    drop_cache(path)
    out.add("all sites at a step, cold", f"{measure(lambda: run.at(last // 2), 1) * 1e3:,.1f} ms")
    run.at(last // 3)
    again = iter(range(last // 3, last))
    out.add("all sites at a step, warm", f"{measure(lambda: run.at(next(again)), 9) * 1e3:,.1f} ms")
    other = open_run(path)
    out.add(
        "all sites at a step, first in its segment, warm", f"{measure(lambda: other.at(last // 3), 1) * 1e3:,.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-store"))
    parser.add_argument("--keep", action="store_true", help="leave the run there, and use one that is there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    out = Table()
    print(f"Store: {os.cpu_count()} cores, numpy {np.__version__}, {options.folder}")
    for hist in (False, True):
        bench_append(out, options.folder, options.sites, hist=hist)
    bench_sealing_beside(out, options.folder, options.sites)
    path = options.folder / f"large-{options.steps}-{options.sites}"
    if not (options.keep and path.exists()):
        shutil.rmtree(path, ignore_errors=True)
        begin = time.perf_counter()
        build(path, options.steps, options.sites)
        out.add(
            f"{options.steps:,} steps x {options.sites:,} sites: written in", f"{time.perf_counter() - begin:,.1f} s"
        )
    bench_reading(out, path, options.sites)
    if not options.keep:
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
