import json

import numpy as np
import pytest
from tests.store.making import make_block, write_run

from sonde.errors import RunNotFound
from sonde.records import Event, Finding
from sonde.store import PageWriter, framing, layout, verify


@pytest.fixture
def run(tmp_path):
    writer = write_run(tmp_path / "run", range(4), close=False)
    writer.take_event(Event(event_type="note", message="hello", timestamp=0.0))
    writer.close()
    return tmp_path / "run"


def test_a_whole_run_is_ok(run):
    report = verify(run)
    assert report.ok
    assert (report.num_files, report.num_blocks) == (4, 4)
    assert "every checksum is right" in str(report)


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(RunNotFound):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", b"{"),
        ("run.json", b"[]"),
        ("run.json", b"[" * 100_000),
        ("run.json", b'{"format": "sonde-run", "schema_version": 99}'),
        ("run.json", b'{"format": "sonde-run", "schema_version": 1}'),
        ("run.json", b'{"format": "sonde-run", "schema_version": 1, "created": NaN, "sonde_version": ""}'),
        ("run.json", b'{"format": "sonde-run", "schema_version": 1, "created": 1e999, "sonde_version": ""}'),
        (
            "run.json",
            b'{"format": "sonde-run", "schema_version": 1, "created": 1%s, "sonde_version": ""}' % (b"0" * 400),
        ),
        ("telemetry/r00000/writer.json", b"\x00"),
        ("telemetry/r00000/writer.json", b'{"state": "asleep"}'),
        (
            "telemetry/r00000/writer.json",
            b'{"state":"live","pid":"x","host":"","process_start":"","attempt":0,"beat":0}',
        ),
        ("events.jsonl", b"nonsense\n"),
        ("events.jsonl", b'{"event_type": "x"}\n'),
        ("events.jsonl", b'{"event_type": "x", "timestamp": 1, "step": 1e400}\n'),
    ],
)
def test_damaged_json_is_named(run, name, content):
    (run / name).write_bytes(content)
    report = verify(run)
    assert [problem.file for problem in report.problems] == [run / name]
    assert str(run / name) in str(report)


def test_a_torn_last_event_is_a_tail(run):
    with (run / "events.jsonl").open("ab") as file:
        size = file.tell()
        file.write(b'{"event_type"')
    report = verify(run)
    assert report.ok
    assert [(tail.file, tail.offset) for tail in report.torn_tails] == [(run / "events.jsonl", size)]
    write_run(run, range(4, 5), resume=True)
    assert not verify(run).torn_tails
    assert (run / "events.jsonl").read_bytes().count(b"\n") == 2


def test_readings_of_an_unknown_site_are_named(tmp_path):
    writer = write_run(tmp_path / "run", range(1), 2, close=False)
    writer.take_block(make_block(1, 4))
    report = verify(tmp_path / "run")
    assert "2 sites that are not described, such as 2" in str(report.problems[0])
    writer.close()
    assert "not described" in str(verify(tmp_path / "run").problems[0])


def test_a_missing_segment_is_named(tmp_path):
    for attempt in range(3):
        write_run(tmp_path / "run", range(attempt * 5, attempt * 5 + 5), resume=True)
    (layout.rank_folder(tmp_path / "run", 0) / "seg-000001.safetensors").unlink()
    assert "missing" in str(verify(tmp_path / "run").problems[0])


def test_a_journal_with_damage_is_set_aside_when_sealed(tmp_path):
    run = tmp_path / "run"
    writer = write_run(run, range(5), close=False)
    path = writer.folder / "journal-000000.bin"
    writer._journal.close()
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    (writer.folder / "writer.json").unlink()
    write_run(run, range(5, 6), resume=True)
    assert not path.exists()
    assert path.with_name(path.name + ".damaged").read_bytes() == whole
    assert verify(run).ok
    assert framing.MAGIC in whole


def _write_all_kinds(run, *, close=True):
    """Write a run with a file of every kind, two pages and two segments."""
    for part in ("bundles/step-000001", "tapes/step_2", "traces", "epoch_0"):
        (run / part).mkdir(parents=True)
    for name in ("bundles/step-000001/bundle.json", "tapes/step_2/tape.json", "traces/one.json"):
        (run / name).write_text("{}")
    (run / "epoch_0/validation_scores.json").write_text("{}")
    (run / "epoch_0/checkpoint.pt").write_bytes(b"weights")
    with PageWriter(run / "epoch_0/debugger", page_bytes=1) as pages:
        for number in range(2):
            pages.add(number, {"mine": np.arange(3)})
    writer = write_run(run, range(40), close=False, journal_bytes=1 << 12)
    writer.take_event(Event(event_type="note", message="", timestamp=1.0))
    writer.take_finding(Finding(kind="a", severity="info", step=1, last_step=1))
    (run / "telemetry/r00000/steps.bin").write_bytes(b"times")
    if close:
        writer.close()
    return writer


def test_every_file_that_is_removed_or_emptied_is_noticed(tmp_path):
    run = tmp_path / "run"
    _write_all_kinds(run)
    assert verify(run).ok, str(verify(run))
    tried = [path for path in run.rglob("*") if path.is_file() and path.name != "run.json"]
    assert len(tried) > 14
    for path in tried:
        content = path.read_bytes()
        path.unlink()
        assert not verify(run).ok, f"{path} was removed"
        path.write_bytes(b"")
        if content:
            assert not verify(run).ok, f"{path} was emptied"
        path.write_bytes(content)
    assert verify(run).ok


def test_a_line_that_is_removed_from_the_events_is_noticed(tmp_path):
    run = tmp_path / "run"
    _write_all_kinds(run)
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[1:]) + b" " * len(lines[0]) + b"\n")
    assert any("checksum" in str(problem) for problem in verify(run).problems)


def test_what_is_removed_from_a_run_that_was_killed_is_noticed(tmp_path):
    run = tmp_path / "run"
    writer = _write_all_kinds(run, close=False)
    writer._beat("live")
    journal = writer._journal.path
    content = journal.read_bytes()
    for removed in (content[: len(content) // 2], b""):
        journal.write_bytes(removed)
        assert not verify(run).ok
    journal.unlink()
    assert not verify(run).ok
    journal.write_bytes(content)
    assert verify(run).ok
    (run / "events.jsonl").write_bytes(b"")
    assert not verify(run).ok
    writer.close()


def test_a_run_of_an_older_version_is_whole_and_says_what_is_not_known(tmp_path):
    run = tmp_path / "run"
    write_run(run, range(3))
    note = run / "telemetry/r00000/writer.json"
    new = ("journal_bytes", "events_bytes", "contents")
    note.write_text(json.dumps({key: value for key, value in json.loads(note.read_text()).items() if key not in new}))
    report = verify(run)
    assert report.ok
    assert "before Sonde listed files" in report.notes[0]
