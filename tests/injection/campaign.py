"""Make every function of Sonde's fail that a training reaches, one at a time, and list what that did to the training.

Run all of it with `python -m tests.injection.campaign`; `--sample 60` draws some. What it prints is what failed. With
`--out FILE` every verdict is appended to a file of JSON lines as it comes: a campaign that was stopped goes on from
there, and tries again what failed. A function is named with its line, so what stands below a change is tried again too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.injection.zygote import is_clean
from tests.waiting import PATIENCE_S, ask, code_state, started

TOGETHER = 20
"""How many trials share a process."""
ZYGOTE = Path(__file__).with_name("zygote.py")
QUICK_FIRST = ("crashing", "by_hand", "going_bad", "adversarial", "language", "ranked", "supervised", "resumed")
KINDS = ("always", "once", "exit", "MemoryError", "RecursionError", "KeyboardInterrupt", "start")
"""Which error is raised where; a `RuntimeError` at the beginning of the function if nothing else is said.

Faults come once a session was started, but for those of the kind "start", which are there when `watch()` is called.
"""


EDGES = re.compile(
    r"hooks\.guard\.(Guard\.catch\.caught|Guard\._guarded\.guarded|Guard\._measured\.measured|Guard\.run_each|unless_compiling\.call|keep|attempt):"
    r"|hooks\.on_call\._Pair\._(before|after)_forward:|hooks\.on_step\._Steps\._call_(before|after):"
    r"|hooks\.on_operation\._Mode\.__torch_dispatch__:|forensics\.tape\.operations\.Operations\.observe:"
    r"|hooks\.replace_function\.\w+\._replacement\.(replacement|ours):"
    r"|probes\.profile\.phases\.LoopPhases\.loading:"
    r"|hooks\.guard\.isolated\.decorate\.call:|session\.(Session\.(__enter__|__exit__|close|is_closed)|IdleSession\.\w+):"
    r"|watching\.(watch|_or_unrecorded|_options):|options\.(_default_budget|Options\.replace):"
)
"""What torch or the program calls directly. These catch what fails inside them; that Python cannot even enter them is
what `sonde.hooks.stack_room` is for. Checking options comes before anything is known of `on_error`."""
MACHINERY = re.compile(
    r"hooks\.(guard|stack_room)\.|hooks\.on_step\.(StepListener\.remove|_Steps\.set):|hooks\.on_call\.(ModuleCalls\.remove|_Pair\.|_Switch\.|_put_together)"
    r"|hooks\.on_operation\.(OperationObserver\.|_take_out:)|hooks\.replace_function\.|forensics\.tape\.recorder\._Taping\.end:"
    r"|record\.(heart\.Heart|rank_watch\.RankWatch)\.close:|store\.log\.sealer\.Sealer\.close:"
)
"""What removes hooks and ends threads is tried twice, so there is no way out if it fails for ever: it fails once."""


@dataclass(frozen=True)
class Trial:
    """One program, in which one function fails."""

    program: str
    target: str
    kind: str

    def order(self) -> dict[str, Any]:
        """Return it as the zygote takes it."""
        return {
            "program": self.program,
            "target": self.target,
            "error": self.kind if self.kind.endswith(("Error", "Interrupt")) else "RuntimeError",
            "times": 1 if self.kind in ("once", "KeyboardInterrupt") or MACHINERY.match(self.target) else None,
            "moment": self.kind if self.kind in ("exit", "start") else "entry",
        }


class Zygote:
    """The process that forks a child for each order."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have a program run in a process of its own, and return what came of it."""
        return self.ask_all([order])[0]

    def ask_all(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Have programs run one after the other in one process; return what came of those that were run."""
        patience = PATIENCE_S * len(orders)
        answers: list[dict[str, Any]] = json.loads(ask(self._process, json.dumps(orders), patience))
        return answers


@contextlib.contextmanager
def zygotes(count: int) -> Iterator[list[Zygote]]:
    """Start zygotes, and end them."""
    with contextlib.ExitStack() as running:
        command = [sys.executable, ZYGOTE]
        yield [Zygote(running.enter_context(started(command, stderr=subprocess.DEVNULL))) for _ in range(count)]


@dataclass(frozen=True)
class Reach:
    """What the programs reach without a fault, and what they return bare."""

    digests: dict[str, str]
    functions: dict[str, tuple[str, bool]]
    """By name: the quickest program that reaches the function, and whether it does so in the main thread."""
    at_start: dict[str, str]
    """By name: the quickest program in which `watch()` reaches the function."""


def reach(zygote: Zygote, programs: Iterable[str] = QUICK_FIRST) -> Reach:
    """Find out which functions the programs reach once they are watched."""
    digests, functions, at_start = {}, {}, {}
    for program in programs:
        digests[program] = zygote.ask({"program": program, "bare": True})["digest"]
        traced = zygote.ask({"program": program, "trace": True})
        assert (traced["escaped"], traced["left"], traced["digest"]) == (None, [], digests[program]), traced
        for name, is_main in traced["reached"].items():
            if name not in functions or (is_main and not functions[name][1]):
                functions[name] = (program, is_main)
        at_start = {**dict.fromkeys(traced["at_start"], program), **at_start}
    return Reach(digests, functions, at_start)


def trials(found: Reach, kinds: Iterable[str]) -> list[Trial]:
    """Return every trial; an interrupt comes in the main thread only."""
    later = [
        Trial(program, name, kind)
        for (name, (program, is_main)), kind in itertools.product(sorted(found.functions.items()), kinds)
        if kind != "start" and (is_main or kind != "KeyboardInterrupt")
    ]
    first = [Trial(program, name, "start") for name, program in sorted(found.at_start.items()) if "start" in kinds]
    return [each for each in later + first if not EDGES.match(each.target)]


def judge(trial: Trial, answer: dict[str, Any], found: Reach) -> str:
    """Return what is wrong with the outcome of a trial; nothing if all is well."""
    wrong = [f"left behind: {each}" for each in answer["left"]]
    interrupted = trial.kind == "KeyboardInterrupt" and answer["raised"]
    if interrupted and not str(answer["escaped"]).startswith("KeyboardInterrupt"):
        wrong.append(f"Ctrl-C did not come out, but {answer['escaped']}")
    elif not interrupted and answer["escaped"] is not None:
        wrong.append(f"{answer['escaped']} reached the program")
    elif not interrupted and answer["digest"] != found.digests[trial.program]:
        wrong.append("other results")
    return "; ".join(wrong)


Outcome = tuple[Trial, dict[str, Any], str]


def run(started: list[Zygote], todo: list[Trial], found: Reach) -> Iterator[Outcome]:
    """Run trials, as many at a time as there are zygotes; yield each with its answer and what is wrong with it.

    Trials of one program share a process as long as each leaves it as it was. One that does not, or in which the fault
    did not come, is run again in a process of its own, and that counts.
    """
    free = collections.deque(started)

    def some(trials: list[Trial]) -> list[Outcome]:
        zygote = free.popleft()
        try:
            return list(_together(zygote, trials, found))
        finally:
            free.append(zygote)

    with ThreadPoolExecutor(len(started)) as pool:
        for outcomes in pool.map(some, _batches(todo)):
            yield from outcomes


def _batches(todo: list[Trial]) -> Iterator[list[Trial]]:
    """Yield trials in the order in which they are given, of one program each; an interrupt is always alone."""
    waiting: dict[str, list[Trial]] = collections.defaultdict(list)
    for trial in todo:
        if trial.kind == "KeyboardInterrupt":
            yield [trial]
            continue
        waiting[trial.program].append(trial)
        if len(waiting[trial.program]) == TOGETHER:
            yield waiting.pop(trial.program)
    yield from waiting.values()


def _together(zygote: Zygote, trials: list[Trial], found: Reach) -> Iterator[Outcome]:
    while trials:
        orders = [each.order() | {"wanted": found.digests[each.program]} for each in trials]
        answers = zygote.ask_all(orders)
        for trial, order, answer in zip(trials, orders, answers, strict=False):
            if len(answers) > 1 and not is_clean(order, answer):
                answer = zygote.ask(order)
            yield trial, answer, judge(trial, answer, found)
        trials = trials[len(answers) :]


class Verdicts:
    """What was judged already, in a file of JSON lines; nothing is kept without one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._code = code_state()
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = {_trial(each): each for each in map(json.loads, lines)}

    def is_sound(self, trial: Trial) -> bool:
        """Return whether a trial ended well before."""
        return trial in self._known and not self._known[trial]["wrong"]

    def add(self, trial: Trial, answer: dict[str, Any], wrong: str) -> None:
        """Append a verdict."""
        verdict = {**dataclasses.asdict(trial), "wrong": wrong, "raised": answer["raised"], "code": self._code}
        self._known[trial] = verdict
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(verdict | {"seconds": answer["seconds"]}) + "\n")

    def figures(self, todo: Iterable[Trial]) -> dict[str, Any]:
        """Return how many were tried, in how many the fault came, how many failed, and on which state of the code."""
        known = [self._known[each] for each in todo if each in self._known]
        return {
            "trials": len(known),
            "raised": sum(bool(each["raised"]) for each in known),
            "failed": sum(bool(each["wrong"]) for each in known),
            "code": dict(collections.Counter(each["code"] for each in known)),
        }


def _trial(verdict: dict[str, Any]) -> Trial:
    return Trial(verdict["program"], verdict["target"], verdict["kind"])


def main() -> None:
    """Run the campaign and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--sample", type=int, default=0, help="how many trials to draw; 0 runs all")
    parser.add_argument("--only", default="", help="a part of the names of functions")
    parser.add_argument("--main", action="store_true", help="functions of the training thread only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file of verdicts, to which new ones are added")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    with zygotes(options.jobs) as started:
        found = reach(started[0])
        todo = [each for each in trials(found, options.kinds) if options.only in each.target]
        todo = [each for each in todo if not options.main or found.functions.get(each.target, ("", True))[1]]
        random.Random(0).shuffle(todo)  # so that a part of the campaign is a sample of it
        todo = todo[: options.sample or None]
        verdicts = Verdicts(options.out)
        left = [each for each in todo if not verdicts.is_sound(each)]
        print(f"{len(found.functions)} functions, {len(todo)} trials, of which {len(left)} are to be run", flush=True)
        for number, (trial, answer, wrong) in enumerate(run(started, left, found), 1):
            verdicts.add(trial, answer, wrong)
            if not number % 100:
                print(f"{number} of {len(left)}: {verdicts.figures(todo)}", flush=True)
            if wrong:
                print(f"{trial.kind} in {trial.target} ({trial.program}): {wrong}", flush=True)
                if options.verbose:
                    print(answer["trace"], answer["log"])
        figures = verdicts.figures(todo)
        print(json.dumps(figures))
    sys.exit(figures["failed"] > 0 or figures["trials"] < len(todo))


if __name__ == "__main__":
    main()
