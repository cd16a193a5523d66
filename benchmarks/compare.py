"""Compare Sonde with other ways to look into a training: cost, diagnosis, storage and reading.

    python benchmarks/compare.py [--quick] [--parts cost diagnosis storage] [--programs GPT-like MLP CNN] [--write]

Prints the tables of docs/comparison.md. `--write` keeps the raw numbers in benchmarks/comparison.json and puts the
tables into the page. Packages that are not installed are left out. Wall-clock times mean something on a quiet machine
only: the load is measured at the start and the end and stands with them. Processor times suffer less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from compare_storage import measure_storage, storage_table
from programs import Program, cnn, gpt, mlp
from rounds import inside_ratio, interleave, ratio
from watchers import Watcher, bare, cockpit, naive, naive_statistics, no_op_hooks, tensorboard, wandb, watched

HERE = Path(__file__).parent
RAW = HERE / "comparison.json"
PAGE = HERE.parent / "docs" / "comparison.md"
# The program, rounds, and steps of each variant in a round: in all about seven minutes on two cores.
PROGRAMS = {"GPT-like": (gpt, 3, 4), "MLP": (mlp, 5, 6), "CNN": (cnn, 5, 10)}
AS_IT_COMES = "Sonde, as it comes (diagnosis, budget 5 %), after 24 steps"
EVERY_STEP = "Sonde, every step (diagnosis, no budget), after 24 steps"
COCKPIT = "Cockpit, its cheapest configuration"
FIRST_STEPS = 26  # in the first 24 more is looked at: see docs/decisions/0015
BUDGETED = 5  # times as many steps where a budget decides what is recorded in each
COCKPIT_BYTES = 1 << 30  # its gradients of every sample; it holds several copies of them


@contextlib.contextmanager
def anomaly_mode(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield lambda loss: None


@contextlib.contextmanager
def torch_profiler(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield lambda loss: profiler.step()


VARIANTS: dict[str, tuple[str | None, Watcher]] = {
    "bare loop": (None, bare),
    "bare loop again (noise)": (None, bare),
    "hooks that do nothing": (None, no_op_hooks),
    AS_IT_COMES: (None, watched(diagnose=True)),
    EVERY_STEP: (None, watched(diagnose=True, budget=None)),
    "Sonde, every step, without diagnosis": (None, watched(budget=None)),
    "hand-written hooks, the same statistics": (None, naive(naive_statistics)),
    "W&B watch(log='all', log_freq=1), offline": ("wandb", wandb),
    "TensorBoard histograms": ("tensorboard", tensorboard),
    "torch anomaly mode": (None, anomaly_mode),
    "torch profiler": (None, torch_profiler),
    COCKPIT: ("cockpit-for-pytorch", cockpit),
}


def installed(package: str | None) -> bool:
    try:
        return package is None or bool(version(package))
    except PackageNotFoundError:
        return False


def measure_cost(*, quick: bool, programs: list[str]) -> dict[str, Any]:
    """Return, for each program, the ratio of each variant's step to the bare step: median and quartiles over rounds."""
    installed_ones = {name: watcher for name, (package, watcher) in VARIANTS.items() if installed(package)}
    found: dict[str, Any] = {}
    for program in programs:
        make, rounds, steps = PROGRAMS[program]
        chosen = {name: watcher for name, watcher in installed_ones.items() if name != COCKPIT or can_watch(make)}
        warm_up = dict.fromkeys(chosen, 1) | dict.fromkeys((AS_IT_COMES, EVERY_STEP), FIRST_STEPS)
        counts = dict.fromkeys(chosen, steps) | {AS_IT_COMES: steps * BUDGETED}
        timings = interleave(make, chosen, rounds=2 if quick else rounds, steps=counts, warm_up=warm_up)
        base = timings["bare loop"]
        found[program] = {
            name: {
                "ms": statistics.median(timing.wall_ms),
                "ratio": ratio(timing, base),
                "cpu_ratio": ratio(timing, base, cpu=True),
                "inside_ratio": inside_ratio(timing, base),
                "bytes_per_step": timing.bytes_per_step,
            }
            for name, timing in timings.items()
        }
    return found


def can_watch(make: Callable[[], Program]) -> bool:
    """Return whether Cockpit can watch a program: it has no gradients per sample of some layers, or they are large."""
    program = make()
    size = sum(parameter.nbytes for parameter in program.model.parameters()) * len(program.batch()[0])
    if size > COCKPIT_BYTES:
        print(f"Cockpit's gradients of {type(program.model).__name__} take {size / 2**30:.1f} GiB", file=sys.stderr)
        return False
    try:
        with warnings.catch_warnings(), cockpit(program, Path()):
            warnings.simplefilter("ignore")
            program.step()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        print(f"Cockpit cannot watch {type(program.model).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


def measure_diagnosis(*, quick: bool, **_: Any) -> dict[str, Any]:
    """Return the scores of Sonde and of other tools' rules on a set of the public fault benchmark."""
    only = "holdout_1" if quick else "holdout_7"
    command = [sys.executable, str(HERE / "faults.py"), "--json", "--only", only, "--jobs", str(os.cpu_count())]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"programs": only, "scores": json.loads(answer)["scores"]}


def measure_files(*, quick: bool, **_: Any) -> dict[str, Any]:
    return measure_storage(quick=quick)


MEASURES = {"cost": measure_cost, "diagnosis": measure_diagnosis, "storage": measure_files}


def cost_table(found: dict[str, Any]) -> str:
    heads = " | ".join(f"{program}: processor time | wall-clock" for program in found)
    lines = [f"| step | {heads} |", "|---|" + "--:|" * 2 * len(found)]
    names = dict.fromkeys(name for one in found.values() for name in one)
    for name in names:
        if name == "bare loop":
            continue
        cells = []
        for program in found:
            if name in found[program]:
                middle, low, high = found[program][name]["cpu_ratio"]
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) | {found[program][name]['ratio'][0]:.2f}")
            else:
                cells.append("not possible | ")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def diagnosis_table(found: dict[str, Any]) -> str:
    lines = [
        "| tool, programs | faults | cause first | cause named | any alarm | clean runs with an alarm |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for tool, score in found["scores"].items():
        shares = [score[name] for name in ("top1", "named", "alarms", "clean_alarms")]
        cells = " | ".join("" if share is None else f"{share:.0%}" for share in shares)
        lines.append(f"| {tool} | {score['faults']} | {cells} |")
    return "\n".join(lines)


TABLES = {"cost": cost_table, "diagnosis": diagnosis_table, "storage": storage_table}


def describe_machine() -> dict[str, Any]:
    packages = ("sonde", "torch", "numpy", "wandb", "tensorboard", "cockpit-for-pytorch", "backpack-for-pytorch")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in packages if installed(name)},
        "load_at_start": os.getloadavg()[0],
    }


def sentence(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    load = f"load {machine['load_at_start']:.1f} at the start and {machine['load_at_end']:.1f} at the end"
    quick = ", `--quick`" if machine["quick"] else ""
    threads = f"{machine['cores']} cores, {machine['torch_threads']} threads of torch"
    return f"{machine['date']}, {threads}, {load}{quick}; {versions}."


def write(found: dict[str, Any]) -> None:
    """Keep the raw numbers, and put each table that was measured into its place on the page."""
    before = json.loads(RAW.read_text()) if RAW.exists() else {}
    if "cost" in found:  # programs that were not measured now stay
        found["cost"] = {**before.get("cost", {}), **found["cost"]}
    RAW.write_text(json.dumps({**before, **found}, indent=1) + "\n")
    page = PAGE.read_text()
    for part, value in found.items():
        shown = {name: each for name, each in value.items() if name != "machine"}
        text = f"{TABLES[part](shown)}\n\nMeasured {sentence(value['machine'])}"
        begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one set of faults")
    parser.add_argument("--parts", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="for the cost")
    parser.add_argument("--write", action="store_true", help="keep the numbers and fill in the page")
    options = parser.parse_args()
    found = {}
    for part in options.parts:
        machine = describe_machine()
        found[part] = MEASURES[part](quick=options.quick, programs=options.programs)
        found[part]["machine"] = {**machine, "load_at_end": os.getloadavg()[0], "quick": options.quick}
        print(f"\n## {part}\n")
        shown = {name: value for name, value in found[part].items() if name != "machine"}
        print(TABLES[part](shown), f"\n\n{sentence(found[part]['machine'])}", flush=True)
        if options.write:
            write({part: found[part]})


if __name__ == "__main__":
    main()
