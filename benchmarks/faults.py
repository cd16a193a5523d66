"""Who finds what is wrong: Sonde and rules of other tools on programs with one known fault each.

    python benchmarks/faults.py [--seeds 3] [--only GLOB] [--jobs N] [--json] [--no-peers] [--bare]
                                [--evidence statistics|tape|experiments] [--out FILE [--resume]]

Every faulty program of tests/faults, its repaired twin and every healthy program is trained under `sonde.watch`. What
was said of it (warnings and worse) is held against the truth. Each set of held-out programs is summed up by itself.
The other tools' rules are re-expressed and fed from the same readings. `--bare` also trains everything unwatched, for
the slowdown; the networks are tiny, so most of it is a fixed cost per step. `--evidence` is for ablation: statistics
alone, also tapes of steps, also experiments on them (slow: a process for each run that looks ill). `--out` writes each
verdict into a file as it comes, a line of JSON each; with `--resume` those that the file has are not trained again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sonde

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

import fault_programs
from fault_programs.registry import Program
from peers import PEERS, Tape, opinions
from scoring import Said, Score, Verdict, by_set, score

OURS = "Sonde"
EVIDENCE = {
    "statistics": {"SONDE_TAPE": "0", "SONDE_EXAMINE": "0"},
    "tape": {"SONDE_EXAMINE": "0"},
    "experiments": {"SONDE_EXAMINE": "wait"},
}
"""By kind of evidence: the environment that limits Sonde to it and to what comes before it."""


class Complaints(logging.Handler):
    """Keeps what Sonde's log says of failures of its own; the rest of the log would drown the tables."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if " failed" in message:
            self.found.append(message.splitlines()[0])


class Watch:
    """Attaches Sonde where a program asks for it, and keeps all sessions of that program."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.sessions: list[sonde.Session] = []
        self.tape = Tape()
        self.complaints = Complaints()
        self.log = logging.getLogger("sonde")
        self.log.addHandler(self.complaints)
        self.log.propagate = False

    def __call__(self, model: Any, optimizer: Any = None, **helpers: Any) -> sonde.Session:
        self.close()  # a program that resumes attaches again, and so does one that trains several models in turn
        run = "run" if helpers.get("resume") or not self.sessions else f"run-{len(self.sessions)}"
        session = sonde.watch(model, optimizer, run=self.folder / run, diagnose=True, **helpers)
        session.subscribe(self.tape)
        self.sessions.append(session)
        return session

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    @property
    def said(self) -> tuple[Said, ...]:
        """What Sonde says, best first; of a resumed run what it says at the end, then what it said before."""
        found = [finding for session in reversed(self.sessions) for finding in session.findings]
        return tuple(
            Said(each.kind, each.sites, self.tape.reported.get(each.kind, each.step))
            for each in found
            if each.severity != "info"
        )

    def end(self) -> None:
        self.close()
        self.log.removeHandler(self.complaints)
        self.log.propagate = True


def examine(program: Program, *, seed: int, fixed: bool, bare: bool, peers: bool) -> dict[str, Verdict]:
    """Train one program and return what each tool said of it."""
    with tempfile.TemporaryDirectory(prefix="sonde-faults-") as folder:
        watch = Watch(folder)
        began = time.perf_counter()
        try:
            program.run(watch, seed=seed, fixed=fixed)
            seconds = time.perf_counter() - began
        finally:
            watch.end()
        common = {"program": program, "fixed": fixed, "seed": seed}
        mine = Verdict(
            **common,
            said=watch.said,
            seconds=seconds,
            bare_seconds=_bare(program, seed, fixed) if bare else math.nan,
            steps=watch.tape.last_step,
            trouble=tuple(watch.complaints.found),
        )
        verdicts = {OURS: mine}
        kinds = tuple(kind for kind in (program.kind, *program.also) if kind)
        for name, rules in PEERS.items() if peers else ():
            verdicts[name] = Verdict(**common, said=opinions(rules, watch.tape, kinds))
    return verdicts


def _bare(program: Program, seed: int, fixed: bool) -> float:
    began = time.perf_counter()
    program.run(seed=seed, fixed=fixed)
    return time.perf_counter() - began


def examine_all(options: argparse.Namespace) -> dict[str, list[Verdict]]:
    programs = [
        program
        for program in fault_programs.load()
        if any(fnmatch(name, options.only) for name in (program.name, program.set))
    ]
    if not programs:
        raise SystemExit(f"no program is called {options.only!r}; see tests/faults/fault_programs")
    jobs = [
        (program, seed, fixed)
        for program in programs
        for seed in range(options.seeds)
        for fixed in ((False, True) if program.kind else (True,))
    ]
    known = {program.name: program for program in programs}
    kept = read_verdicts(options.out, known) if options.resume else {}
    done = {(verdict.program.name, verdict.seed, verdict.fixed) for verdict in kept.get(OURS, ())}
    jobs = [job for job in jobs if (job[0].name, *job[1:]) not in done]
    console = Console(stderr=True)
    one = partial(examine_job, bare=options.bare, peers=options.peers)
    file = None if options.out is None else options.out.open("a" if options.resume else "w")
    with file or nullcontext(), ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        results = map(one, jobs) if options.jobs == 1 else pool.map(one, jobs)
        for found in track(results, "training", total=len(jobs), console=console, disable=not console.is_terminal):
            for tool, verdict in found.items():
                kept.setdefault(tool, []).append(verdict)
            if file is not None:
                file.writelines(json.dumps(plain(tool, verdict)) + "\n" for tool, verdict in found.items())
                file.flush()
    return kept


def examine_job(job: tuple[Program, int, bool], *, bare: bool, peers: bool) -> dict[str, Verdict]:
    torch.set_num_threads(1)
    program, seed, fixed = job
    return examine(program, seed=seed, fixed=fixed, bare=bare, peers=peers)


# ------------------------------------------------------------------ printing


def show(verdicts: dict[str, list[Verdict]], console: Console) -> None:
    ours = verdicts[OURS]
    for part, given in by_set(ours).items():
        chosen = [verdict for verdict in given if verdict.program.kind]
        if chosen:
            console.print(program_table(f"Faults: {part}", chosen))
    console.print(summary_table(verdicts))
    show_misses(ours, console)


def program_table(title: str, verdicts: list[Verdict]) -> Table:
    """One row per fault over all seeds: how often the cause was first, among three, placed; latency; clean twins."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), width=110)
    table.add_column("", no_wrap=True)
    table.add_column("program", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("fault", no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("first", "in 3", "place", "after", "twin"):
        table.add_column(name, justify="right", no_wrap=True)
    for program in dict.fromkeys(verdict.program for verdict in verdicts):
        ill = [verdict for verdict in verdicts if verdict.program == program and verdict.ill]
        twins = [verdict for verdict in verdicts if verdict.program == program and not verdict.ill]
        latencies = [verdict.latency for verdict in ill if verdict.latency is not None]
        table.add_row(
            program.group,
            program.name,
            program.kind,
            _count(verdict.hit(among=1) is not None for verdict in ill),
            _count(verdict.hit(among=3) is not None for verdict in ill),
            _count(verdict.located is not False for verdict in ill),
            str(sorted(latencies)[len(latencies) // 2]) if latencies else "",
            _count(not verdict.alarm for verdict in twins),
        )
    return table


def _count(flags: Iterable[bool]) -> str:
    flags = list(flags)
    style = "green" if all(flags) else "yellow" if any(flags) else "red"
    return f"[{style}]{sum(flags)}/{len(flags)}[/{style}]"


def summary_table(verdicts: dict[str, list[Verdict]]) -> Table:
    table = Table(title="All", title_justify="left", box=None, padding=(0, 1))
    table.add_column("", no_wrap=True)
    columns: list[tuple[str, Score]] = []
    for tool, given in verdicts.items():
        # Nobody tuned the other tools on these programs, so theirs need no parting.
        parts = by_set(given) if tool == OURS else {"all": given}
        columns += [(f"{tool}\n{label}", score(chosen)) for label, chosen in parts.items()]
    for name, _ in columns:
        table.add_column(name, justify="right")
    for label, show_value, of_all in ROWS:
        # Other tools' rules neither rank what they say nor, as fed here, place it.
        shown = (show_value(figures) if of_all or name.startswith(OURS) else "" for name, figures in columns)
        table.add_row(label, *shown)
    return table


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1%}"


def _steps(figures: Score, name: str) -> str:
    median, high = figures.latency.get(name, (math.nan, math.nan))
    return "" if math.isnan(median) else f"{median:.0f} / {high:.0f}"


ROWS: tuple[tuple[str, Callable[[Score], str], bool], ...] = (
    ("faulty runs", lambda s: str(s.faults), True),
    ("cause ranked first", lambda s: _percent(s.top1), False),
    ("cause among the first three", lambda s: _percent(s.top3), False),
    ("cause named at all", lambda s: _percent(s.named), True),
    ("any alarm", lambda s: _percent(s.alarms), True),
    ("culprit located", lambda s: _percent(s.located), False),
    ("clean runs", lambda s: str(s.clean), True),
    ("clean runs with an alarm", lambda s: _percent(s.clean_alarms), True),
    ("precision", lambda s: _percent(s.precision), True),
    ("steps to an exact cause: median / 90 %", lambda s: _steps(s, "exact"), False),
    ("steps to others: median / 90 %", lambda s: _steps(s, "statistical"), False),
    ("watched / bare time: median", lambda s: "" if math.isnan(s.slowdown) else f"{s.slowdown:.2f}", False),
)


def show_misses(verdicts: list[Verdict], console: Console) -> None:
    """Say for every miss and every false alarm what was said instead."""
    lines: dict[str, list[int]] = {}
    for verdict in verdicts:
        for line in complaints(verdict):
            lines.setdefault(line, []).append(verdict.seed)
    if lines:
        console.print("\n[bold]Not as it should be[/bold]")
    for line, seeds in lines.items():
        console.print(f"  {line}  [dim](seeds {', '.join(map(str, seeds))})[/dim]", highlight=False)


def complaints(verdict: Verdict) -> list[str]:
    program = verdict.program
    said = ", ".join(f"{each.kind}@{'+'.join(each.sites[:2])}" for each in verdict.said[:3]) or "nothing"
    found = [f"{program.name}: Sonde failed: {message}" for message in verdict.trouble]
    if verdict.ill and verdict.hit(among=1) is None:
        found.append(f"{program.name}: is {program.kind}, said {said}")
    elif verdict.ill and verdict.located is False:
        found.append(f"{program.name}: is at {' or '.join(program.sites)}, said {said}")
    elif not verdict.ill and verdict.alarm:
        found.append(f"{program.name}{' (repaired)' if program.kind else ''}: is well, said {said}")
    return found


def as_json(verdicts: dict[str, list[Verdict]]) -> dict[str, Any]:
    """Return scores and single verdicts as JSON-ready values."""
    scores, single = {}, []
    for tool, given in verdicts.items():
        for part, chosen in by_set(given).items():
            scores[tool if part == "dev" else f"{tool}, {part}"] = _finite(asdict(score(chosen)))
        single += [plain(tool, verdict) for verdict in given]
    return {"scores": scores, "verdicts": single}


def plain(tool: str, verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON-ready values."""
    return {
        "tool": tool,
        "program": verdict.program.name,
        "kind": verdict.program.kind,
        "repaired": verdict.fixed,
        "seed": verdict.seed,
        "held_out": verdict.program.held_out,
        "set": verdict.program.set,
        "said": [asdict(each) for each in verdict.said],
        "latency": verdict.latency if verdict.ill else None,
        "located": verdict.located if verdict.ill else None,
        "trouble": list(verdict.trouble),
    }


def read_verdicts(path: Path, programs: dict[str, Program]) -> dict[str, list[Verdict]]:
    """Return the verdicts on these programs that a stopped run left in a file, by tool; a cut last line is removed."""
    found: dict[str, list[Verdict]] = {}
    text = path.read_text() if path.exists() else ""
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    for each in map(json.loads, text.splitlines()):
        if each["program"] in programs:
            said = tuple(Said(one["kind"], tuple(one["sites"]), one["step"]) for one in each["said"])
            verdict = Verdict(
                program=programs[each["program"]],
                fixed=each["repaired"],
                seed=each["seed"],
                said=said,
                trouble=tuple(each["trouble"]),
            )
            found.setdefault(each["tool"], []).append(verdict)
    return found


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="*", help="names of programs or of a set, as a glob: holdout_2")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs to train at a time")
    parser.add_argument("--json", action="store_true", help="print scores and verdicts as JSON")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave the other tools' rules out")
    parser.add_argument("--bare", action="store_true", help="also train unwatched, for the slowdown")
    parser.add_argument(
        "--evidence", choices=EVIDENCE, default="tape", help="what may be used: each adds to those before it"
    )
    parser.add_argument("--out", type=Path, help="write each verdict here as it comes, a line of JSON each")
    parser.add_argument("--resume", action="store_true", help="go on with --out: train only what it lacks")
    options = parser.parse_args(arguments)
    if options.resume and options.out is None:
        parser.error("--resume needs --out")
    os.environ.update(EVIDENCE[options.evidence])  # processes that train inherit it
    verdicts = examine_all(options)
    if options.json:
        print(json.dumps(as_json(verdicts), indent=1))
        return
    console = Console(width=None if Console().is_terminal else 110)
    show(verdicts, console)


if __name__ == "__main__":
    main()
