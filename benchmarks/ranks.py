"""What a run of many ranks costs to write and to read, simulated on one machine: real writers, generated readings.

    python benchmarks/ranks.py                            8, 64 and 1,024 ranks of 60 steps x 65 sites
    python benchmarks/ranks.py --ranks 64 --full 8        one rank in eight records in full

Each rank is written by its own `RunWriter`, with the heartbeat and the step times that a training would write. Each
question is asked in a process of its own, whose peak memory is that of the answer.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from store import HEADER, make_block, make_sites

from sonde.core import heartbeat
from sonde.core.heartbeat import Beat
from sonde.core.step_times import StepTimesFile
from sonde.store import RunWriter, layout

SITE = "blocks.3.attention.weight:gradient"


def write(path: Path, ranks: int, steps: int, sites: int, full: int) -> dict[str, float]:
    """Write a run, and return the seconds, files and bytes that a rank takes."""
    rng = np.random.default_rng(0)
    blocks = [make_block(step, sites, hist=True, rng=rng) for step in range(1, steps + 1)]
    known = make_sites(sites)
    began = time.perf_counter()
    for rank in range(ranks):
        writer = RunWriter(path, HEADER, rank=rank, num_ranks=ranks)
        if rank % full == 0:
            writer.take_sites(known)
            for block in blocks:
                writer.take_block(block)
        writer.close()
        write_small_files(layout.rank_folder(path, rank), rank, ranks, rng)
    took = time.perf_counter() - began
    folders = [layout.rank_folder(path, rank) for rank in range(ranks)]
    found = [file for folder in folders for file in folder.iterdir()]
    return {
        "write_s": took,
        "files": len(found) / ranks,
        "bytes": sum(file.stat().st_size for file in found) / ranks,
    }


def write_small_files(folder: Path, rank: int, ranks: int, rng: np.random.Generator) -> None:
    times = StepTimesFile(folder)
    late = 0.02 * (rank == ranks // 2)
    own = rng.normal(0.1, 0.002, (1000, 2))
    times.append(
        [
            (step + 1, 0.0, {"forward": a + late, "backward": b, "communication": 0.25 - late - a - b})
            for step, (a, b) in enumerate(own.tolist())
        ]
    )
    times.close()
    now = time.time()
    beat = Beat(rank=rank, world=ranks, host=f"node{rank // 8}", pid=1, time=now, since=now, step=1000, phase="forward")
    heartbeat.write(folder, beat)


# --------------------------------------------------------------------------------
# Questions, each asked in a process of its own.


def ask_open(path: Path) -> Any:
    from sonde.store import open_run

    return open_run(path)


def ask_merged(path: Path) -> Any:
    run = ask_open(path)
    return timed(lambda: run.series(SITE, "norm"))


def ask_one(path: Path) -> Any:
    run = ask_open(path)
    return timed(lambda: run.series(SITE, "norm", rank=run.ranks[-1]))


def ask_only(path: Path) -> Any:
    from sonde.store import open_run

    return timed(lambda: open_run(path, rank=0).series(SITE, "norm"))


def ask_beats(path: Path) -> Any:
    from sonde.store.ranks import standing_of

    return timed(lambda: standing_of(path, time.time()))


def ask_live(path: Path) -> Any:
    from sonde.diagnosis.ranks.monitor import RankMonitor

    monitor = RankMonitor(path, 0, lambda finding: None)
    return timed(lambda: monitor(True))


def ask_table(path: Path) -> Any:
    from sonde.analysis.ranks import read_ranks

    return timed(lambda: read_ranks(path))


def ask_page(path: Path) -> Any:
    from sonde.analysis.ranks import read_ranks
    from sonde.views.figures import rank_heatmap, rank_phases, rank_spread

    run = ask_open(path)

    def page() -> None:
        read_ranks(path, most=256)
        rank_heatmap(run)
        rank_phases(run)
        rank_spread(run)

    return timed(page)


QUESTIONS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "open": ("open the run, all ranks as one", lambda path: timed(lambda: ask_open(path))),
    "merged": ("one statistic of one site, merged over all ranks", ask_merged),
    "one": ("the same of one rank", ask_one),
    "only": ("open one rank alone, and read it", ask_only),
    "beats": ("what every rank does (heartbeats)", ask_beats),
    "live": ("one look of rank 0 at all others", ask_live),
    "table": ("`sonde ranks`", ask_table),
    "page": ("the page Ranks with its pictures", ask_page),
}


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def ask(name: str, path: Path) -> tuple[float, float]:
    """Return the seconds that an answer takes, and the megabytes that its process held at most."""
    command = [sys.executable, __file__, "--ask", name, "--folder", str(path)]
    reply = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return reply["seconds"], reply["mb"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 1024])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sites", type=int, default=65)
    parser.add_argument("--full", type=int, default=1, help="one rank in so many records in full")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/sonde-ranks"))
    parser.add_argument("--ask", choices=QUESTIONS)
    given = parser.parse_args()
    if given.ask:
        seconds = QUESTIONS[given.ask][1](given.folder)
        print(json.dumps({"seconds": seconds, "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return
    columns = {}
    for ranks in given.ranks:
        path = given.folder / str(ranks)
        shutil.rmtree(path, ignore_errors=True)
        written = write(path, ranks, given.steps, given.sites, given.full)
        answers = {name: ask(name, path) for name in QUESTIONS}
        columns[ranks] = written, answers
        shutil.rmtree(path)
    print(f"\n{given.steps} steps x {given.sites} sites, one rank in {given.full} in full\n")
    print("| | " + " | ".join(f"{ranks:,} ranks" for ranks in columns) + " |")
    print("|---|" + "--:|" * len(columns))
    lines = {
        "write, per rank": lambda ranks, column: f"{1e3 * column[0]['write_s'] / ranks:.0f} ms",
        "files per rank": lambda ranks, column: f"{column[0]['files']:.1f}",
        "KB per rank": lambda ranks, column: f"{column[0]['bytes'] / 1e3:.0f}",
    }
    for title, cell in lines.items():
        print(f"| {title} | " + " | ".join(cell(ranks, column) for ranks, column in columns.items()) + " |")
    for name, (title, _) in QUESTIONS.items():
        cells = (column[1][name] for column in columns.values())
        print(f"| {title} | " + " | ".join(f"{seconds:.2f} s, {mb:.0f} MB" for seconds, mb in cells) + " |")


if __name__ == "__main__":
    main()
