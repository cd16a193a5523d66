"""Every way to read a run, each in this process: the commands, the viewer's endpoints, the assistant, bundles."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import typer.testing
from typer.testing import CliRunner

from sonde.cli.main import app
from sonde.errors import SondeError
from sonde.store import open_run, verify
from sonde.store.remote import mirror
from sonde.store.remote.spool import push
from sonde.views.assistant import Assistant
from sonde.views.site.ask import Answer, Asker
from sonde.views.terminal import Look, make_console
from sonde.views.terminal.top import PAGES, Screen, View, read_top
from sonde.views.web import make_app
from sonde.views.web.library import make_id

TOKEN = "a-token-that-nobody-guesses"
MOST_SECONDS = 10.0
MOST_BYTES = 500 << 20

_COMMANDS = [
    "show {run}",
    "show {run} --site * --rows 3",
    "show {run} --step 3 --json",
    "show {run} --json",
    "diagnose {run} --all",
    "diagnose {run} --format github",
    "diagnose {run} --format sarif",
    "diagnose {run} --format junit",
    "diagnose {run} --json",
    "verify {run}",
    "verify {run} --json",
    "tail {run} --once",
    "tail {run} --once --json",
    "logs {run}",
    "logs {run} --code",
    "logs {run} --environment",
    "logs {run} --json",
    "tape {run}",
    "tape {run} --ops",
    "tape {run} --json",
    "ranks {run} --stacks",
    "ranks {run} --json",
    "compare {run} {twin}",
    "compare {run} {twin} --json",
    "query {run} loss>0.1",
    "query {run} loss>0.1 --json",
    "report {run} --format text",
    "report {run} --format md --out -",
    "report {run} --format json --out -",
    "export {run} --to csv --stat mean --out -",
    "export {run} --to json --site 0* --stat mean --out -",
    "export {run} --to parquet --stat mean --out {scratch}/rows.parquet --force",
    "export {run} --to tensorboard --out {scratch}/board --force",
    "fleet diagnose {root} --jobs 1 --out {scratch}/fleet",
    "fleet report {scratch}/fleet",
    "note {run}",
    "note {run} --json",
    "runs {root}",
    "runs {root} --json",
]
_RARE_COMMANDS = [
    "examine {run}",
    "report {run} --format html --out -",
    "export {run} --to site --out {scratch}/site",
    "export {root} --to dataset --out {scratch}/tables",
]
"""Take seconds: they are drawn only where a file is all about them, and seldom."""
QUESTIONS = [
    "runs",
    "rows?run={id}&by=lr",
    "statistics",
    "run/{id}",
    "run/{id}/events",
    "run/{id}/logs",
    "run/{id}/parts",
    "run/{id}/story",
    "run/{id}/story?quick=1",
    "run/{id}/heat?pattern=*",
    "run/{id}/curve?site=0.weight:gradient",
    "run/{id}/sites?pattern=*",
    "run/{id}/site?site=0.weight:gradient",
    "run/{id}/steps",
    "run/{id}/pulse",
    "run/{id}/traces",
    "run/{id}/trace/one.json",
    "run/{id}/trace-summary?name=one.json",
    "run/{id}/trace-summary?name=two.json.gz",
    "run/{id}/ranks",
    "run/{id}/rank/1",
    "run/{id}/tape",
    "run/{id}/evaluations",
    "run/{id}/scores",
    "run/{id}/score-ids",
    "run/{id}/score-mask?metric=loss",
    "run/{id}/samples?metric=loss",
    "run/{id}/sample?idx=7&evaluation=0",
    "run/{id}/tensor?idx=7&debugger=mine&path=inputs&evaluation=0",
    "run/{id}/contrast?evaluation=0",
    "run/{id}/common-failures",
    "run/{id}/thumbnails?idx=7&evaluation=0",
    "run/{id}/classes",
    "run/{id}/changes?with={twin}",
    "run/{id}/embedding",
    "run/{id}/score-figure?metric=loss",
    "run/{id}/curve?site=loss",
    "run/{id}/figure/histogram?site=0.weight:gradient&kind=signed",
    "run/{id}/figure/flow",
    "run/{id}/figure/tree",
    "run/{id}/figure/phases",
    "run/{id}/figure/ranks",
    "compare?run={id}&run={twin}",
    "compare/parting?run={id}&run={twin}",
    "compare/layers?run={id}&run={twin}",
    "compare/figure?run={id}&run={twin}",
]
_MARKUP = re.compile(r"<img src=x|<script>alert|</script><b>")
_LINK = re.compile(r"(?<!\\)\]\(javascript:")
_FENCED = re.compile(r"^(`{3,})\n.*?^\1\n", re.DOTALL | re.MULTILINE)
_JUDGES = ("diagnose", "ranks")  # their exit code is what they found
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


@dataclass(frozen=True)
class Failure:
    """Something that reading a run must not do."""

    how: str
    what: str

    def __str__(self) -> str:
        return f"{self.how}: {self.what}"


_SAMPLES = ("verify", "query", "sample", "run/{id}/evaluations", "score", "contrast", "common", "thumb", "tensor")
_SAMPLES += ("classes", "changes", "embedding", "page_of_run", "report", "logs", "parts")
# Which readings a file takes part in, by a part of its path; what is not named here takes part in all of them.
_READERS: dict[str, tuple[str, ...]] = {
    "bundles/": ("verify", "show", "story", "parts", "report"),
    "tapes/": ("verify", "tape", "diagnose", "story", "parts", "report"),
    "traces/": ("verify", "trace", "story", "parts", "report"),
    "_scores.json": _SAMPLES,
    "epoch_0/": _SAMPLES,
    "beat.json": ("verify", "rank", "runs", "fleet", "story", "report"),
    "stacks.txt": ("verify", "rank"),
    "collectives.json": ("verify", "rank"),
    "steps.bin": ("verify", "rank", "phases", "report", "story", "top"),
    "fingerprints.bin": ("verify", "rank", "diagnose", "report", "story"),
    "logs/": ("verify", "logs", "parts"),
}


def readers_of(path: str) -> tuple[str, ...]:
    """Return parts of the names of the readings that open a file; an empty text stands for all."""
    return next((readers for part, readers in _READERS.items() if part in path), ("",))


@dataclass(frozen=True)
class Place:
    """Where the run to read is: `name` below `root`, with a healthy run `twin` beside it, if there is one."""

    root: Path
    name: str = "run"
    twin: str = "twin"

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.root / self.name

    @property
    def scratch(self) -> Path:
        """A folder for what commands write."""
        return self.root.with_name(f"{self.root.name}-written")


def ways_to_read(of: str = "") -> list[str]:
    """Return the names of the readings that open a file; of all, for an empty name."""
    wanted = readers_of(of)
    names = [f"sonde {each}" for each in _COMMANDS] + [f"GET {each}" for each in QUESTIONS] + list(_CALLS)
    return [each for each in names if any(part in each for part in wanted)]


def rare_ways(of: str) -> list[str]:
    """Return the readings of a file that take long."""
    return [f"sonde {each}" for each in _RARE_COMMANDS if ("tapes/" in of) == each.startswith("examine")]


def read_all(
    root: Path, name: str = "run", *, commands: tuple[str, ...] = (), only: Collection[str] = ()
) -> Iterator[Failure]:
    """Read the run `name` below a folder in every way, and yield what went wrong.

    Args:
        root: The folder.
        name: The run.
        commands: Only these commands, and nothing else.
        only: The names of the readings; those of `ways_to_read` if it is empty.

    """
    place = Place(root, name)
    chosen = list(only) or ways_to_read()
    if commands:
        chosen = [each for each in chosen if each.split()[0] == "sonde" and each.split()[1] in commands]
    if not (root / place.twin).exists():
        chosen = [each for each in chosen if "{twin}" not in each]
    for each in chosen:
        if each.startswith("sonde "):
            yield from _command(each.split()[1:], place)
        elif each in _CALLS:
            yield from _call(each, place)
    questions = [each.removeprefix("GET ") for each in chosen if each.startswith("GET ")]
    if questions:
        yield from _viewer(questions, place)


typer.testing._get_command = functools.cache(typer.testing._get_command)  # it takes longer than most commands


def _command(template: list[str], place: Place) -> Iterator[Failure]:
    names = {"run": place.run, "root": place.root, "twin": place.root / place.twin, "scratch": place.scratch}
    words = [each.format_map(names) for each in template]
    place.scratch.mkdir(exist_ok=True)
    how = f"sonde {' '.join(words)}"
    with measured() as spent:
        result = CliRunner().invoke(app, words, prog_name="sonde", env={"COLUMNS": "80", "FORCE_COLOR": None})
    yield from spent.failures(how)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        yield Failure(how, _shortened("".join(traceback.format_exception(result.exception))))
    elif result.exit_code not in (0, 1, 2, 3):
        yield Failure(how, f"exit code {result.exit_code}")
    if "Traceback (most recent call last)" in result.output and words[0] != "logs":  # which print the program's own
        yield Failure(how, _shortened(result.output))
    yield from _controls(how, result.output)
    if result.exception is None or isinstance(result.exception, SystemExit):
        yield from (Failure(how, each) for each in _misformed(words, result.stdout))
    errors = [line for line in result.stderr.splitlines() if line.strip()]
    if result.exit_code >= 2 and words[0] not in _JUDGES and len(errors) != 1:
        yield Failure(how, f"not one clear line: {errors}")


def _misformed(words: list[str], text: str) -> Iterator[str]:
    """Yield what another program could not read of an output, or would obey."""
    kinds = {each for each in words if each in _FORMATS} | ({"json"} if "--json" in words else set())
    for kind in kinds if text else ():
        try:
            _FORMATS[kind](text if words[0] != "tail" else f"[{','.join(text.splitlines())}]")
        except (AssertionError, ValueError, ElementTree.ParseError) as error:
            yield f"cannot be taken as {kind}: {error!s:.300}"


def _strict(text: str) -> None:
    def refuse(name: str) -> None:
        raise ValueError(f"the bare word {name}")

    json.loads(text, parse_constant=refuse)


def _of_workflow(text: str) -> None:
    assert all(re.match("::(error|warning|notice) ", line) for line in text.splitlines()), "a line that is not ours"


def _without_formulas(text: str) -> None:
    formulas = [cell for row in csv.reader(io.StringIO(text)) for cell in row if cell.startswith(("=", "+", "@"))]
    assert not formulas, formulas


def _without_markup(text: str) -> None:
    found = _MARKUP.search(text)
    assert found is None, text[found.start() - 40 : found.end() + 40]


def _plain_markdown(text: str) -> None:
    text = _FENCED.sub("", text)
    _without_markup(text)
    found = _LINK.search(text)
    assert found is None, text[found.start() - 40 : found.end() + 40]


_FORMATS: dict[str, Callable[[str], object]] = {
    "json": _strict,
    "sarif": _strict,
    "junit": ElementTree.fromstring,
    "github": _of_workflow,
    "csv": _without_formulas,
    "html": _without_markup,
    "md": _plain_markdown,
}


def _controls(how: str, text: str) -> Iterator[Failure]:
    found = _CONTROL.search(text)
    if found:
        around = text[max(0, found.start() - 40) : found.end() + 20]
        yield Failure(how, f"a control character reaches the terminal: {around!r}")


def _viewer(questions: Iterable[str], place: Place) -> Iterator[Failure]:
    with Asker(make_app([place.root], token=TOKEN), TOKEN) as asker:
        for each in questions:
            how, failed = f"GET api/{each}", ""
            with measured() as spent, contextlib.redirect_stderr(io.StringIO()):
                try:
                    answer = ask(asker, each, place)
                    failed = answer.body.decode()[:300] if answer.status >= 500 and answer.status != 501 else ""
                except Exception:  # noqa: BLE001 - whatever it is, it is a failure to report
                    failed = traceback.format_exc()
            yield from spent.failures(how)
            if failed:
                yield Failure(how, _shortened(failed))


def ask(asker: Asker, question: str, place: Place) -> Answer:
    """Ask the viewer one of the questions."""
    return asker.ask(*spelled(question, place))


def spelled(question: str, place: Place) -> tuple[str, dict[str, list[str]]]:
    """Return the path and the query of a question about a run."""
    path, _, query = question.partition("?")
    ids = {"id": make_id(0, place.name), "twin": make_id(0, place.twin)}
    words: dict[str, list[str]] = {}
    for name, value in parse_qsl(query):
        words.setdefault(name, []).append(value.format_map(ids))
    return path.format_map(ids), words


def _top(place: Place) -> None:
    run, out = open_run(place.run), io.StringIO()
    console = make_console(file=out, width=80)
    page = read_top(run)
    for number in range(len(PAGES)):
        console.print(Screen(run, page, View(page=number), Look.of(console), 24))
    found = next(_controls("top", out.getvalue()), None)
    assert found is None, found


def _mirrored(place: Place) -> None:
    """Carry the run to an object store, and read it from there."""
    address = "memory://mirror/run"
    try:
        push(place.run, address, patience_s=0.0)
        run = open_run(address)
        for site in run.sites:
            run.series(site, "mean")
        verify(address)
    finally:
        mirror.close()
        if "fsspec" in sys.modules:
            sys.modules["fsspec"].filesystem("memory").store.clear()


_CALLS: dict[str, Callable[[Place], object]] = {
    "top": _top,
    "mirror": _mirrored,
    "assistant list_runs": lambda place: Assistant(place.root).list_runs(),
    "assistant diagnose": lambda place: Assistant(place.root).diagnose(run=place.name),
    "assistant explain": lambda place: Assistant(place.root).explain("vanishing_gradient", run=place.name),
    "assistant series": lambda place: Assistant(place.root).series(site="*", run=place.name),
    "assistant compare {twin}": lambda place: Assistant(place.root).compare(place.twin, run=place.name),
    "assistant first_divergence {twin}": lambda place: Assistant(place.root).first_divergence("twin", run=place.name),
    "assistant sample": lambda place: Assistant(place.root).sample(idx="7", run=place.name),
    "assistant sample by query": lambda place: Assistant(place.root).sample(expression="loss > 0.1", run=place.name),
    "assistant page_of_run": lambda place: Assistant(place.root).page_of_run(place.name),
}


def _call(how: str, place: Place) -> Iterator[Failure]:
    failed = ""
    with measured() as spent:
        try:
            _CALLS[how](place)
        except (SondeError, OSError):
            pass  # the command or the protocol answers with its message
        except Exception:  # noqa: BLE001 - whatever it is, it is a failure to report
            failed = traceback.format_exc()
    yield from spent.failures(how)
    if failed:
        yield Failure(how, _shortened(failed))


def replay_bundle(run: Path) -> Iterator[Failure]:
    """Replay the last bundle of a run, which ends in a result or in an error of ours."""
    from torch import nn

    import sonde

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with measured() as spent:
        try:
            sonde.load_bundle(run).replay(model)
            failed = ""
        except (SondeError, OSError):
            failed = ""
        except Exception:  # noqa: BLE001 - whatever it is, it is a failure to report
            failed = traceback.format_exc()
    yield from spent.failures("replay")
    if failed:
        yield Failure("replay", _shortened(failed))


class _Reported(logging.Handler):
    """Keeps tracebacks that Sonde logs: a rule that fails is a failure, even if the others go on."""

    def __init__(self) -> None:
        super().__init__()
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Traceback" in record.getMessage():
            self.tracebacks.append(record.getMessage())


_reported = _Reported()
logging.getLogger("sonde").addHandler(_reported)


class measured:
    """Measures the time and the growth in memory of a block, and notes the faults that it logs."""

    def __enter__(self) -> measured:
        _reported.tracebacks.clear()
        _reset_peak()
        self.before, self.began = _peak(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.began
        self.grew = _peak() - self.before

    def failures(self, how: str) -> Iterator[Failure]:
        """Yield which bounds were exceeded, and what was logged."""
        yield from (Failure(how, _shortened(each)) for each in _reported.tracebacks)
        if self.seconds > MOST_SECONDS:
            yield Failure(how, f"took {self.seconds:.1f} s")
        if self.grew > MOST_BYTES:
            yield Failure(how, f"took {self.grew >> 20} MB")


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    if sys.platform != "linux":
        return 0
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _shortened(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if "site-packages" not in line]
    return "\n".join(lines[-9:])[-1500:]
