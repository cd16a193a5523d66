"""Hand-made hostile runs: each is read in every way and ends in one clear line."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.hostile.mutations import NASTY
from tests.hostile.reading import read_all
from tests.store.making import HEADER, make_block, write_run

from sonde.analysis.embedding import embed
from sonde.analysis.fleet import RESULTS, read_results
from sonde.analysis.ranks import spread_over_ranks
from sonde.analysis.source_lines import locate
from sonde.analysis.summary import usual_stat
from sonde.core import files
from sonde.errors import RunDamaged
from sonde.records import Event, Finding, Site
from sonde.store import RunWriter, list_runs, open_run, verify
from sonde.store.header import Labels, write_labels
from sonde.store.logs import read_output
from sonde.store.remote import mirror
from sonde.store.remote.address import Stored, assemble, part_name
from sonde.views.document import Code, Document, Section

PARTS = [
    "run.json", "events.jsonl", "findings.jsonl", "telemetry/r00000/writer.json",
    "telemetry/r00000/seg-000000.safetensors", "telemetry/r00000/beat.json", "telemetry/r00000/steps.bin",
    "epoch_0/validation_scores.json", "traces/one.json", "tapes/step_1/tape.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link", "folder"])
def test_what_is_not_a_regular_file_is_refused_wherever_it_is(tmp_path, kind):
    (tmp_path / "secret").write_text("{}")
    for number, part in enumerate(PARTS):
        run = tmp_path / kind / f"{number}"
        write_run(run, range(3))
        path = run / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        _put(path, kind, tmp_path / "secret")
        with pytest.raises((RunDamaged, IsADirectoryError), match=r"not a regular file|is a link|directory"):
            files.open_file(path)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            assert len(list_runs(tmp_path / kind)) >= len(PARTS) - 1
            for number in range(1, len(PARTS)):
                verify(tmp_path / kind / str(number))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive(), "reading hangs"
    assert failed == []


def _put(path, kind, secret) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        made = socket.socket(socket.AF_UNIX)
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")  # such a path may be long
        finally:
            made.close()
            os.close(here)
    elif kind in ("device", "link"):
        path.symlink_to("/dev/zero" if kind == "device" else secret)
    else:
        path.mkdir()


def test_a_link_to_a_folder_does_not_lead_out_of_the_run(tmp_path):
    write_run(tmp_path / "other", range(3))
    write_run(tmp_path / "run", range(3))
    (tmp_path / "run/telemetry").rename(tmp_path / "moved")
    (tmp_path / "run/telemetry").symlink_to(tmp_path / "other/telemetry")
    with pytest.raises(RunDamaged, match="is a link"):
        files.open_file(tmp_path / "run/telemetry/r00000/writer.json")
    (tmp_path / "latest").symlink_to(tmp_path / "other")
    assert len(open_run(tmp_path / "latest").steps) == 3


def test_a_link_that_leads_to_itself_in_place_of_a_rank_is_one_clear_line(tmp_path):
    write_run(tmp_path / "run", range(3))
    (tmp_path / "run/telemetry/r00001").symlink_to("r00001")
    ways = ["sonde show {run}", "sonde verify {run}", "sonde ranks {run} --json", "GET run/{id}", "GET run/{id}/ranks"]
    assert [str(each) for each in read_all(tmp_path, only=ways)] == []


def test_a_small_file_cannot_take_much_memory_or_time(tmp_path):
    write_run(tmp_path / "run", range(3))
    journal = tmp_path / "run/telemetry/r00000/journal-000001.bin"
    with journal.open("wb") as file:
        file.truncate(10 << 30)
    assert open_run(tmp_path / "run").steps.tolist() == [0, 1, 2]
    for content in (b"[" * 100_000, b"1" * 400, b"[" + b"[]," * 4_000_000 + b"1]", b'{"a":1e999}'):
        with pytest.raises(RunDamaged):
            files.loads(content, "x.json")


@pytest.mark.parametrize("text", NASTY)
def test_no_text_of_a_file_reaches_a_terminal_as_it_is(tmp_path, text):
    writer = RunWriter(tmp_path / "run", replace(HEADER, environment={text: text}))
    writer.take_sites([Site(id=0, name=f"loss{text}", quantity="scalar"), Site(id=1, name=text, quantity="gradient")])
    for step in range(3):
        writer.take_block(make_block(step, 2))
    writer.take_event(Event(event_type=text, message=text, timestamp=1.0, data={text: text}))
    writer.take_finding(Finding(kind="a", severity="warning", step=1, last_step=1, cause=text, fix=text, sites=(text,)))
    writer.close()
    scores = {"per_datapoint": {"loss": [0.5], text: [0.5]}, "ids": [text]}
    (tmp_path / "run/epoch_0").mkdir()
    (tmp_path / "run/epoch_0/validation_scores.json").write_text(json.dumps(scores))
    write_labels(tmp_path / "run", Labels((text,), text))
    (tmp_path / "run/logs").mkdir()
    (tmp_path / "run/logs/output.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "run/logs/code.json").write_text(json.dumps({"files": [{"path": text, "text": text}]}))
    wanted = ("show", "runs", "verify", "query", "tail", "export", "logs", "note", "diagnose", "report", "fleet")
    assert [str(each) for each in read_all(tmp_path, commands=wanted)] == []
    if "<" in text:
        assert [str(each) for each in read_all(tmp_path, only=["sonde report {run} --format html --out -"])] == []


def test_a_pipe_among_the_lines_that_were_printed_makes_no_reader_wait(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/output.jsonl").write_text(json.dumps({"text": "one"}))
    os.mkfifo(tmp_path / "logs/output-new.jsonl")
    read = []
    reader = threading.Thread(target=lambda: read.append(read_output(tmp_path)), daemon=True)
    reader.start()
    reader.join(30)
    assert [line.text for output in read for line in output.lines] == ["one"]


def test_results_of_a_fleet_that_are_none_are_left_out(tmp_path):
    good = {"run_id": "a", "project": "p", "findings": [{"kind": "k", "time": 1.0}]}
    bad = [[], {}, {"run_id": 3}, good | {"run_id": "b", "findings": [1]}, good | {"run_id": "c", "project": None}]
    text = "\n".join(map(json.dumps, [good, *bad])) + "\n" + "[" * 1000 + "\n{"
    (tmp_path / RESULTS).write_text(text)
    assert read_results(tmp_path) == [good]


def test_what_the_mutation_campaign_found_stays_mended(tmp_path):
    pytest.importorskip("starlette")
    from sonde.views.web.answers import as_json

    with pytest.raises(RunDamaged):
        files.convert({"\ud800": 1}, Labels, "x.json", "labels")
    assert json.loads(as_json({"a": "\ud800"}).body) == {"a": "\ud800"}
    assert usual_stat(Site(id=0, name="a", quantity="of_a_later_version"), set()) == "rms"
    assert len(embed(np.zeros((0, 3))).points) == 0
    for rank in (0, 1):
        write_run(tmp_path / "run", range(10 * rank, 10 * rank + 3), rank=rank)
    run = open_run(tmp_path / "run")
    assert len(spread_over_ranks(run, run.sites[0], "mean", (0, 1)).steps) == 0


@pytest.mark.parametrize("name", ["a/../../../out", "/out", "a//out", ".parts/../../../out/{part}", "./out"])
def test_a_name_in_an_object_store_does_not_lead_out_of_the_copy_of_a_run(tmp_path, name):
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFile

    write_run(tmp_path / "run", range(3))
    store = fsspec.filesystem("memory")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            store.pipe_file(f"/stranger/run/{path.relative_to(tmp_path / 'run')}", path.read_bytes())
    # The file system in memory would tidy such a name up; a real store keeps it.
    store.store[f"/stranger/run/{name.format(part='0' * 15 + '-' + '5'.zfill(15))}"] = MemoryFile(store, "", b"owned")
    try:
        assert open_run("memory://stranger/run").steps.tolist() == [0, 1, 2]
        copies = mirror._root
        assert copies is not None
        assert not [each for each in copies.rglob("*") if each.name == "out"]
        assert not (copies.parent / "out").exists()
    finally:
        store.store.clear()
        mirror.close()


def test_a_piece_of_a_file_in_an_object_store_cannot_claim_a_size_that_it_has_not():
    claimed = part_name("telemetry/r00000/seg-000000.safetensors", 0, 10**15 - 1)
    assert assemble({claimed: Stored(5, "")}) == {}


def test_an_operation_that_a_file_names_has_no_effect_outside_of_its_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    from sonde.forensics import repeat
    from sonde.forensics.experiments import kernels
    from sonde.forensics.origin import Origin

    target = tmp_path / "written"
    for op in ("aten.save.default", "save", "aten.from_file.out", "aten.compile.default"):
        for stage in ("backward", "forward"):
            origin = Origin(stage=stage, op=op, scalars={"exponent": str(target), "filename": str(target), "shared": 1})
            for operand in ("self", "out"):
                assert repeat._repeat_operation(origin, {f"operand.{operand}": torch.ones(2)}, None) is None
    assert not target.exists()
    refused = ("from_file.default", "_reshape_alias.default", "_sparse_coo_tensor_unsafe.default", "__dict__.clear")
    for name in (*(f"aten.{each}" for each in refused), "prims.as_strided.default", "aten.mm.__init__", "aten.mm"):
        with pytest.raises(kernels.CannotRepeat):
            kernels.find(name)
    assert kernels.find("aten.mm.default") is torch.ops.aten.mm.default


def test_a_finding_that_is_one_long_word_is_read_in_no_time(tmp_path):
    run = write_run(tmp_path / "run", range(3), close=False)
    run.take_finding(
        Finding(kind="a", severity="warning", step=1, last_step=1, cause="a" * 10**6 + "x.py:" + "9" * 5000)
    )
    run.close()
    opened, began = open_run(tmp_path / "run"), time.process_time()
    assert locate(opened, opened.findings[0]) is None
    assert time.process_time() - began < 5


def test_a_tape_with_thousands_of_modules_inside_each_other_is_shown(tmp_path):
    write_run(tmp_path / "run", range(3))
    folder = tmp_path / "run/tapes/step_1"
    folder.mkdir(parents=True)
    marks = [{"index": 0, "kind": "module_enter", "data": {"path": "a" * 9, "class": "C"}} for _ in range(3000)]
    ops = [{"index": 0, "name": "aten.relu.default"}]
    (folder / "tape.json").write_text(json.dumps({"step": 1, "values": [], "ops": ops, "marks": marks}))
    ways = ["sonde tape {run}", "sonde tape {run} --ops", "sonde tape {run} --json", "GET run/{id}/tape"]
    assert [str(each) for each in read_all(tmp_path, only=ways)] == []


def test_code_in_markdown_stays_code_after_a_list_and_whatever_it_holds():
    code = Code("````\n<img src=x onerror=alert(1)>\n```")
    written = Document("t", [Section("s", [code])]).to_markdown()
    assert f"`````\n{code.text}\n`````\n" in written


def test_a_packed_trace_that_is_huge_is_refused(tmp_path):
    pytest.importorskip("starlette")
    from sonde.views.web.profile_api import _read

    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(300):
            file.write(b" " * (1 << 20))
    with pytest.raises(RunDamaged):
        _read(path)
