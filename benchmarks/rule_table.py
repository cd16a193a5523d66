"""Count for each rule how often its warnings were right, and derive the confidence of findings from that.

    python benchmarks/faults.py --seeds 3 --no-peers --out faults.jsonl
    python benchmarks/rule_table.py faults.jsonl [--write | --add]

A warning is right if it names the fault of the program, or an equivalent one. Seeds of one program are not independent:
each program counts once, by the share of its seeds. `--write` stores the counts that `sonde.diagnosis` reads; `--add`
adds those of sets that the stored counts do not have yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sonde.diagnosis.reliability import posterior_mean
from sonde.diagnosis.rules import RULES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

import fault_programs  # noqa: E402 - found by the line above

STORED = ROOT / "src" / "sonde" / "diagnosis" / "reliability.json"
COMMAND = "python benchmarks/rule_table.py faults.jsonl --write (or --add, set by set)"
BINS = (0.0, 0.6, 0.7, 0.8, 0.9, 1.01)


@dataclass
class Counts:
    """In how many programs a rule warned, by what became of it."""

    faults: int = 0
    """Programs with this fault, whether or not it was found."""
    first: float = 0.0
    """It came first and was right."""
    right: float = 0.0
    wrong: float = 0.0
    """It warned of a faulty program, but of another fault."""
    clean: float = 0.0
    """It warned of a program without a fault."""

    @property
    def confidence(self) -> float | None:
        warned = self.right + self.wrong + self.clean
        return posterior_mean(self.right, self.wrong + self.clean) if warned else None


def count(verdicts: Iterable[dict[str, Any]]) -> dict[str, Counts]:
    """Return the counts of every rule, and of every other kind of warning that came up."""
    verdicts = list(verdicts)
    counts = {rule.kind: Counts() for rule in RULES}
    seeds = len({verdict["seed"] for verdict in verdicts})
    faults = {(verdict["program"], verdict["kind"]) for verdict in verdicts if verdict["kind"]}
    for _, kind in faults:
        counts.setdefault(kind, Counts()).faults += 1
    for verdict in verdicts:
        truth = {verdict["kind"], *verdict["also"]} if is_faulty(verdict) else set()
        for place, said in enumerate(verdict["said"]):
            each = counts.setdefault(said["kind"], Counts())
            right = said["kind"] in truth
            each.first += (right and place == 0) / seeds
            each.right += right / seeds
            each.wrong += (not right and bool(truth)) / seeds
            each.clean += (not truth) / seeds
    return counts


def is_faulty(verdict: dict[str, Any]) -> bool:
    """Return whether the program of a verdict had its fault."""
    return verdict["kind"] is not None and not verdict["repaired"]


def reliability(verdicts: Iterable[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Return, for each warning, the confidence that the other sets of programs give it, and whether it was right."""
    verdicts = list(verdicts)
    found = []
    for chosen in dict.fromkeys(verdict["set"] for verdict in verdicts):
        known = count(verdict for verdict in verdicts if verdict["set"] != chosen)
        for verdict in verdicts:
            truth = {verdict["kind"], *verdict["also"]} if is_faulty(verdict) else set()
            for said in verdict["said"] if verdict["set"] == chosen else ():
                confidence = known.get(said["kind"], Counts()).confidence
                if confidence is not None:
                    found.append((confidence, said["kind"] in truth))
    return found


def load(path: Path) -> list[dict[str, Any]]:
    """Read what `faults.py --out` wrote and add which other names of its fault are right for a program."""
    also = {program.name: program.also for program in fault_programs.load()}
    verdicts = [each for line in path.read_text().splitlines() if (each := json.loads(line))["tool"] == "Sonde"]
    return [verdict | {"also": also[verdict["program"]]} for verdict in verdicts]


def store(counts: dict[str, Counts], verdicts: list[dict[str, Any]], *, add: bool = False) -> None:
    """Write the counts that findings take their confidence from, or add them to what is stored of other sets.

    Raises:
        SystemExit: The stored counts have one of these sets.

    """
    sets = sorted({verdict["set"] for verdict in verdicts})
    known = json.loads(STORED.read_text()) if add else {"rules": {}, "sets": []}
    if both := sorted({*sets} & {*known["sets"]}):
        raise SystemExit(f"the stored counts have {', '.join(both)} already; use --write with all verdicts")
    rules: dict[str, dict[str, float]] = known["rules"]
    for kind, each in counts.items():
        if each.confidence is not None:
            before = rules.get(kind, {"right": 0.0, "wrong": 0.0})
            new = {"right": each.right, "wrong": each.wrong + each.clean}
            rules[kind] = {name: round(before[name] + number, 2) for name, number in new.items()}
    ill = {verdict["program"] for verdict in verdicts if is_faulty(verdict)}
    clean = {verdict["program"] for verdict in verdicts if not is_faulty(verdict)}
    about = {
        "made_by": COMMAND,
        "faulty_programs": known.get("faulty_programs", 0) + len(ill),
        "clean_programs": known.get("clean_programs", 0) + len(clean),
        "sets": sorted({*known["sets"], *sets}),
    }
    STORED.write_text(json.dumps(about | {"rules": dict(sorted(rules.items()))}, indent=1) + "\n")


# ------------------------------------------------------------------ printing


def rule_table(counts: dict[str, Counts]) -> Table:
    table = Table(title="Warnings by rule, in programs", title_justify="left", box=None, padding=(0, 1))
    table.add_column("kind", no_wrap=True)
    for name in ("faults", "first", "right", "wrong", "clean", "confidence"):
        table.add_column(name, justify="right")
    for kind, each in sorted(counts.items()):
        figures = (f"{value:.3g}" if value else "" for value in (each.first, each.right, each.wrong, each.clean))
        shown = "" if each.confidence is None else f"{each.confidence:.2f}"
        table.add_row(kind, str(each.faults or ""), *figures, shown)
    return table


def reliability_table(found: list[tuple[float, bool]]) -> Table:
    table = Table(
        title="Reliability: confidence from the other sets against this one",
        title_justify="left",
        box=None,
        padding=(0, 1),
    )
    for name in ("confidence", "warnings", "mean confidence", "right"):
        table.add_column(name, justify="right")
    for low, high in pairwise(BINS):
        chosen = [(confidence, right) for confidence, right in found if low <= confidence < high]
        if chosen:
            mean = sum(confidence for confidence, _ in chosen) / len(chosen)
            share = sum(right for _, right in chosen) / len(chosen)
            table.add_row(f"{low:.1f} to {min(high, 1):.1f}", str(len(chosen)), f"{mean:.2f}", f"{share:.2f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("verdicts", type=Path, help="what benchmarks/faults.py --out wrote")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help=f"store the counts in {STORED.relative_to(ROOT)}")
    how.add_argument("--add", action="store_true", help="add them to the counts of other sets that are stored there")
    options = parser.parse_args(arguments)
    verdicts = load(options.verdicts)
    counts = count(verdicts)
    console = Console(width=None if Console().is_terminal else 110)
    console.print(rule_table(counts))
    console.print(reliability_table(reliability(verdicts)))
    silent = [kind for kind, each in sorted(counts.items()) if not each.right]
    console.print(f"\nNever right in any set: {', '.join(silent)}", highlight=False)
    if options.write or options.add:
        store(counts, verdicts, add=options.add)


if __name__ == "__main__":
    main()
