"""What pages cost, beside pickled pages as joblib writes them: memory, writing, and reading one tensor.

    python benchmarks/pages.py                      2 GB for memory, 533 MB for the rest: about 4 GB of disk in --folder
    python benchmarks/pages.py --memory-mb 200 --datapoints 50        small, for a look

Both sides get the same tensors (a feature map and an attention map, with a few statistics) and the same size of page,
in turn, in the same process. Pickled pages are read in two ways: knowing the page, and as a viewer must without it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PAGE_BYTES = 100 << 20
PENDING_BYTES = 256 << 20
SHAPES = {"features": (64, 56, 56), "attention": (12, 197, 197)}
DATAPOINT_BYTES = sum(4 * a * b * c for a, b, c in SHAPES.values())
# What may wait in memory, and a quarter for the datapoints in hand and for the holes that the allocator leaves.
BOUND_BYTES = PENDING_BYTES * 5 // 4


def make(at: int):
    import torch

    generator = torch.Generator().manual_seed(at)
    maps = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**maps, "stats": {f"s{each}": at / (each + 1) for each in range(8)}}


def measure_memory(folder: Path, num_bytes: int) -> None:
    """Capture so many bytes and print by how much the process has grown at most."""
    import torch

    from sonde.capture import Capture

    torch.set_num_threads(1)
    sources = [make(at) for at in range(4)]
    warm = Capture(page_bytes=PAGE_BYTES)  # what is imported at first use is no part of the bound
    warm.open(folder / "warm")
    warm.add(0, sources[0])
    warm.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    with Capture(page_bytes=PAGE_BYTES, max_pending_bytes=PENDING_BYTES) as capture:
        capture.open(folder / "pages")
        for at in range(num_bytes // DATAPOINT_BYTES):
            source = sources[at % len(sources)]
            capture.add(
                at, {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in source.items()}
            )
    seconds = time.perf_counter() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert capture.dropped == capture.failed == 0
    print(grown * 1024, capture.written * DATAPOINT_BYTES, seconds)


class Table:
    """Lines of a name, our figure, theirs, and how many times better ours is."""

    def __init__(self) -> None:
        print(f"  {'':<52}{'pages':>12}{'joblib':>12}{'ratio':>10}")

    def add(self, name: str, ours: str, theirs: str = "", ratio: float | None = None) -> None:
        shown = f"{ratio:,.1f}x" if ratio is not None else ""
        print(f"  {name:<52}{ours:>12}{theirs:>12}{shown:>10}", flush=True)


def bench_memory(out: Table, folder: Path, num_bytes: int) -> None:
    command = [sys.executable, __file__, "--measure-memory", str(num_bytes), "--folder", str(folder)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    grown, written, seconds = int(answer[0]), int(answer[1]), float(answer[2])
    shutil.rmtree(folder / "pages")
    shutil.rmtree(folder / "warm")
    name = f"peak memory while capturing {written / 1e9:.2f} GB"
    out.add(name, f"{grown / 2**20:,.0f} MiB")
    out.add("  its bound", f"{BOUND_BYTES / 2**20:,.0f} MiB", "", BOUND_BYTES / grown)
    out.add("  captured, written and synced", f"{written / seconds / 1e6:,.0f} MB/s")
    if grown > BOUND_BYTES:
        sys.exit("The bound does not hold.")


def write_pages(folder: Path, captures: list, *, sync: bool) -> None:
    from sonde.capture import to_plain_outputs
    from sonde.store.pages import PageWriter

    with PageWriter(folder, page_bytes=PAGE_BYTES, sync=sync) as writer:
        for at, outputs in enumerate(captures):
            writer.add(at, to_plain_outputs(outputs))


def write_joblib(folder: Path, captures: list, *, sync: bool) -> None:
    from sonde.capture import write_legacy_pages

    write_legacy_pages(folder, enumerate(captures), page_bytes=PAGE_BYTES)
    if sync:
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def bench_writing(out: Table, folder: Path, captures: list, rounds: int) -> None:
    size = len(captures) * DATAPOINT_BYTES
    for sync in (False, True):
        taken: dict[str, list[float]] = {"pages": [], "joblib": []}
        for _ in range(rounds):
            for name, write in (("pages", write_pages), ("joblib", write_joblib)):
                shutil.rmtree(folder / name, ignore_errors=True)
                os.sync()  # nobody pays for what the other one left behind
                begin = time.perf_counter()
                write(folder / name, captures, sync=sync)
                taken[name].append(time.perf_counter() - begin)
        ours, theirs = (statistics.median(taken[name]) for name in ("pages", "joblib"))
        what = "write, synced" if sync else "write"
        out.add(
            f"{what}, with checksums and previews",
            f"{size / ours / 1e6:,.0f} MB/s",
            f"{size / theirs / 1e6:,.0f} MB/s",
            theirs / ours,
        )


def time_of(read: Callable[[int], object], chosen: list[int], cold: list[Path]) -> float:
    """Return the median time of reading, in seconds; with the contents of the `cold` folders forgotten each time."""
    taken = []
    for at in chosen:
        for folder in cold:
            drop_cache(folder)
        begin = time.perf_counter()
        read(at)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def drop_cache(folder: Path) -> None:
    """Forget a folder's contents, so that the next read comes from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bench_reading(out: Table, folder: Path, count: int, repeats: int) -> None:
    import joblib

    from sonde.store.pages import load_debug_outputs

    chance = random.Random(0)
    chosen = [chance.randrange(count) for _ in range(repeats)]
    pages = sorted((folder / "joblib").glob("page_*.pkl"), key=lambda path: int(path.stem.removeprefix("page_")))
    home = {at: path for path in pages for at in joblib.load(path)}
    kept = load_debug_outputs(folder / "pages")

    def fresh(at: int):
        return load_debug_outputs(folder / "pages").tensor(at, "features")

    def open_already(at: int):
        return kept.tensor(at, "features")

    def known_page(at: int):
        return joblib.load(home[at])[at]["features"]

    def all_pages(at: int):  # as a viewer reads that has no index: everything, then one
        everything = {}
        for path in pages:
            everything.update(joblib.load(path))
        return everything[at]["features"]

    assert (fresh(chosen[0]) == known_page(chosen[0]).numpy()).all()

    for state, cold in (("warm", []), ("cold", [folder / "pages", folder / "joblib"])):
        ours_open, ours_fresh = (time_of(read, chosen, cold) for read in (open_already, fresh))
        known, everything = time_of(known_page, chosen, cold), time_of(all_pages, chosen[:3], cold)
        for name, ours, theirs in (
            (f"one tensor, {state}: folder open | page known", ours_open, known),
            (f"one tensor, {state}: folder not open | page known", ours_fresh, known),
            (f"one tensor, {state}: folder not open | page not known", ours_fresh, everything),
        ):
            out.add(name, f"{ours * 1e3:,.2f} ms", f"{theirs * 1e3:,.0f} ms", theirs / ours)
    out.add("previews of one datapoint, warm", f"{time_of(kept.previews, chosen, []) * 1e3:,.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-pages"))
    parser.add_argument("--memory-mb", type=int, default=2000)
    parser.add_argument("--datapoints", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.measure_memory:
        measure_memory(options.folder, options.measure_memory)
        return
    import joblib
    import torch

    versions = f"torch {torch.__version__}, joblib {joblib.__version__}"
    print(f"Pages of {PAGE_BYTES >> 20} MiB: {os.cpu_count()} cores, {versions}; {' '.join(['python', *sys.argv])}")
    torch.set_num_threads(1)
    out = Table()
    bench_memory(out, options.folder, options.memory_mb * 10**6)
    captures = [make(at) for at in range(options.datapoints)]
    bench_writing(out, options.folder, captures, options.rounds)
    del captures
    bench_reading(out, options.folder, options.datapoints, 15)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
