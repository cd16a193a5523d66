"""Entry points for fuzzing: bytes of every kind of file, damaged or made up, end in a value or in an error of ours."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile.mutations import mutate, resealed
from tests.store.making import write_run

from sonde.analysis.query import parse
from sonde.core import files, tape
from sonde.errors import SondeError
from sonde.records import Event, Finding
from sonde.store import PageWriter, framing, header, load_debug_outputs, timeline, verify
from sonde.store.log.journal import JournalSource
from sonde.store.log.segment import Segment

_fuzzing = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("fuzz") / "run"
    writer = write_run(run, range(20), close=False)
    writer.take_event(Event(event_type="note", message="hello", timestamp=1.0, step=3))
    writer.take_finding(Finding(kind="a", severity="info", step=1, last_step=1))
    journal = writer._journal.path.read_bytes()
    writer.close()
    (run / "journal.seed").write_bytes(journal)
    with PageWriter(run / "debugger", page_bytes=1 << 20) as pages:
        for number in range(3):
            pages.add(number, {"mine": {"a": np.arange(5), "b": "text"}}, info={"score": 0.5})
    (run / "tapes/step_1").mkdir(parents=True)
    (run / "tapes/step_1/tape.json").write_bytes(
        b'{"step":1,"values":[{"id":0,"role":"input"}],"settings":{"threads":1}}'
    )
    return run


def _damaged(path: Path, seed: int) -> bytes:
    chance = random.Random(seed)
    return chance.choice([mutate, resealed])(path.read_bytes(), chance)


def _read(path: Path, content: bytes, read) -> None:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        read()
    except (SondeError, FileNotFoundError):
        pass
    finally:
        path.write_bytes(before)


@_fuzzing
@given(_seeds)
def test_fuzz_journal(run, seed):
    path = run / "journal.seed"
    _read(path, _damaged(path, seed), lambda: JournalSource(path).refresh())


@_fuzzing
@given(st.binary(max_size=400))
def test_fuzz_records(content):
    end = 0
    for item in framing.scan(framing.MAGIC + content):
        assert item.offset >= end
        end = item.end


@_fuzzing
@given(_seeds)
def test_fuzz_segment(run, seed):
    path = run / "telemetry/r00000/seg-000000.safetensors"

    def read() -> None:
        segment = Segment(path)
        segment.check_all(segment.read())
        segment.load(np.arange(len(segment.site)), (0, 3), bins=True)

    _read(path, _damaged(path, seed), read)


@_fuzzing
@given(_seeds)
def test_fuzz_page(run, seed):
    path = run / "debugger" / random.Random(seed).choice(["page_0.safetensors", "page_0.index"])

    def read() -> None:
        outputs = load_debug_outputs(run / "debugger")
        for each in outputs:
            dict(outputs[each])
            outputs.previews(each)

    _read(path, _damaged(path, seed), read)


@_fuzzing
@given(_seeds)
def test_fuzz_header(run, seed):
    _read(run / "run.json", _damaged(run / "run.json", seed), lambda: header.read_header(run))


@_fuzzing
@given(_seeds)
def test_fuzz_events_and_findings(run, seed):
    for name, kind in (("events.jsonl", timeline.EventFile), ("findings.jsonl", timeline.FindingFile)):
        _read(run / name, _damaged(run / name, seed), lambda name=name, kind=kind: kind(run / name).refresh())


@_fuzzing
@given(_seeds)
def test_fuzz_tape(run, seed):
    path = run / "tapes/step_1/tape.json"
    _read(path, _damaged(path, seed), lambda: tape.read(path.parent))


@_fuzzing
@given(_seeds)
def test_fuzz_verify(run, seed):
    path = random.Random(seed).choice(sorted(each for each in run.rglob("*") if each.is_file()))
    _read(path, _damaged(path, seed), lambda: str(verify(run)))


@_fuzzing
@given(st.text(alphabet="loss<>=!()andor notin01.5e\"'+-*/%,[]percentile", max_size=60) | st.text(max_size=40))
def test_fuzz_query(text):
    with contextlib.suppress(SondeError):
        parse(text)


@_fuzzing
@given(st.binary(max_size=300))
def test_fuzz_json(content):
    with contextlib.suppress(SondeError):
        files.loads(content, "x.json")
