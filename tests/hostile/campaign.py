"""The long campaign: damage one file at a time, read the run in every way, and report what must not happen.

python -m tests.hostile.campaign --mutations 10000 --seed 1 --corpus .fuzz

Every damaged run is verified, its values are compared with those of the whole run, and it is read in some of the ways
that open the damaged file, drawn anew each time (`--readings 0`: in all of them). Each batch runs in a process of its
own, which a watchdog ends when one reading hangs. Files that broke something are kept in the corpus folder, and are
tried first the next time. With `--out FILE` the outcome of each batch is appended to a file of JSON lines: a campaign
that was stopped goes on with the same seed, and damages again the files of batches in which something failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile import mutations
from tests.hostile.made import with_open_files, write_everything
from tests.hostile.reading import Failure, rare_ways, read_all, replay_bundle, ways_to_read
from tests.hostile.values import Values, unnoticed, values_of
from tests.waiting import code_state

_RARE = 0.01
HANG_S = 600.0
"""A reading that takes so long by the clock is stopped; the limit of 10 s is on processor time, for busy machines."""


def main() -> None:
    """Run the campaign and print its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--readings", type=int, default=4, help="ways to read each damaged run; 0: all of them")
    parser.add_argument("--out", type=Path, help="a file of outcomes, to which new ones are added")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"))
    parser.add_argument("--only", default="", help="a part of the name of the files to damage")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        failures = run_campaign(Path(scratch), given)
    sys.exit(bool(failures))


def run_campaign(scratch: Path, given: argparse.Namespace) -> list[dict[str, str]]:
    """Run batches until enough files were damaged; return what went wrong."""
    templates = scratch / "templates"
    in_child(lambda: _make(templates))
    for name in ("run", "twin"):
        shutil.copytree(templates / "finished", scratch / "warm" / name)
    healthy = [str(each) for each in read_all(scratch / "warm")]  # imports everything once, before any fork
    assert not healthy, healthy
    known = {name: values_of(templates / name) for name in ("finished", "crashed")}
    found: list[dict[str, str]] = []
    began = time.monotonic()
    out = scratch / "failures.jsonl"
    shutil.copytree(templates / "finished", scratch / "work" / "twin")
    for kept in sorted(given.corpus.glob("files/*/*")):
        in_child(lambda k=kept: _try_kept(templates, scratch / "work", k, out))
    found += _failures(out)
    known_batches = _outcomes(given.out)
    for number in range(0, given.mutations, given.batch):
        out.unlink(missing_ok=True)
        size = min(given.batch, given.mutations - number)
        key = {"seed": given.seed, "first": number, "size": size, "only": given.only, "readings": given.readings}
        if any(each | key == each and not each["failures"] for each in known_batches):
            continue
        batch = Batch(templates, scratch / "work", out, known, given)
        code = in_child(lambda b=batch, n=number, s=size: b.run(range(n, n + s)))
        new = _failures(out)
        if code:
            new.append({"file": f"batch {number}", "how": "process", "what": f"ended with {code}"})
        for each in new:
            print(f"{each['file']}: {each['how']}: {each['what']}", flush=True)
        found += new
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps({**key, "failures": new, "code": code_state()}) + "\n")
        print(f"{number + size} mutations, {len(found)} failures, {time.monotonic() - began:.0f} s", flush=True)
    for what, count in Counter(f"{each['how'].split(' /')[0]}: {each['what'][-400:]}" for each in found).most_common():
        print(f"--- {count} x {what}")
    states = {each["code"] for each in _outcomes(given.out)} | {code_state()}
    done = {"mutations": given.mutations, "seed": given.seed, "failures": len(found), "code": sorted(states)}
    print(json.dumps(done))
    return found


def _outcomes(out: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []


def in_child(work) -> int:
    """Run a function in a forked process; return its exit code."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent must see it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _make(templates: Path) -> None:
    templates.mkdir()
    write_everything(templates / "finished")
    with_open_files(templates / "finished", templates / "crashed")


@dataclass(frozen=True)
class Batch:
    """Some damaged runs, one after the other."""

    templates: Path
    work: Path
    out: Path
    known: dict[str, Values]
    given: argparse.Namespace

    def run(self, numbers: range) -> None:
        """Damage a file of a fresh copy for each number, and read it."""
        for number in numbers:
            self._one(random.Random(f"{self.given.seed} {number}"))

    def _one(self, chance: random.Random) -> None:
        run, template = self.work / "run", chance.choice(["finished", "crashed"])
        _copy(self.templates / template, run)
        files = sorted(path for path in run.rglob("*") if path.is_file() and self.given.only in str(path))
        target = chance.choice(files)
        before = target.read_bytes()
        is_resealed = damage(target, chance)
        name = target.relative_to(run).as_posix()
        found = read_damaged(self.work, name, self._drawn(name, chance))
        if not is_resealed:
            found += unnoticed(run, name, before, self.known[template], is_finished=template == "finished")
        if _note(self.out, name, found):
            _keep(self.given.corpus, name, target)

    def _drawn(self, name: str, chance: random.Random) -> list[str]:
        ways = ways_to_read(name)
        if self.given.readings:
            ways = chance.sample(ways, min(self.given.readings, len(ways)))
        return [*ways, *(each for each in rare_ways(name) if chance.random() < _RARE)]


def _copy(template: Path, run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(template, run)


def _try_kept(templates: Path, work: Path, kept: Path, out: Path) -> None:
    """Read a run with a file in it that once broke something."""
    name = kept.parent.name.replace("__", "/")
    for template in ("finished", "crashed"):
        if (templates / template / name).exists():
            _copy(templates / template, work / "run")
            shutil.copyfile(kept, work / "run" / name)
            _note(out, name, read_damaged(work, name, ways_to_read(name)))


def read_damaged(work: Path, name: str, ways: list[str]) -> list[Failure]:
    """Read a run of which one file is damaged; return what must not happen."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    failures = list(read_all(work, only=ways))
    if "bundles" in name:
        failures += replay_bundle(work / "run")
    faulthandler.cancel_dump_traceback_later()
    return failures


def _note(out: Path, name: str, failures: list[Failure]) -> bool:
    with out.open("a") as file:
        for each in failures:
            file.write(json.dumps({"file": name, "how": each.how, "what": each.what}) + "\n")
    return bool(failures)


def _failures(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def damage(target: Path, chance: random.Random) -> bool:
    """Change a file in one of many ways, or take it away; return whether its checksums were made right again."""
    content = target.read_bytes()
    kind = chance.random()
    if kind < 0.05:
        target.unlink()
    elif kind < 0.1:
        target.write_bytes(b"")
    elif kind < 0.55:
        target.write_bytes(mutations.mutate(content, chance))
    else:
        target.write_bytes(mutations.resealed(content, chance))
    return kind >= 0.55


def _keep(corpus: Path, name: str, target: Path) -> None:
    if not target.exists():
        return
    content = target.read_bytes()
    folder = corpus / "files" / name.replace("/", "__")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)


if __name__ == "__main__":
    os.environ.setdefault("SONDE_EXAMINE", "0")
    os.environ.setdefault("SONDE_BUDGET", "none")
    main()


__all__ = ["Failure", "damage", "in_child"]
