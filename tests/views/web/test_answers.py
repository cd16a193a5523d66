"""What the server answers, held against what the store says."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tests.analysis.made_run import write_run
from tests.core.test_tape import small_tape
from tests.views.web.asking import CALM, SMALL, client_of

from sonde.analysis import verdict_on
from sonde.core import tape
from sonde.store import RunWriter, open_run
from sonde.store.remote import mirror
from sonde.store.remote.address import ObjectStore
from sonde.store.remote.carrier import Carrier
from sonde.views.document import count_findings
from sonde.views.web import library as shelf
from sonde.views.web import tape_api
from sonde.views.web.library import Library, OpenRun, make_id
from sonde.views.web.story_api import MOST_POINTS, line_of

ONE, DEEP = "0-one", "0-sweep~2Flr~200.1~7Eb"


def test_runs_are_listed_with_what_the_store_knows_of_them(client, folder):
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(runs) == {"one", "sweep/lr 0.1~b"}
    assert runs["sweep/lr 0.1~b"]["id"] == DEEP
    run = open_run(folder / "one")
    assert runs["one"]["last_step"] == int(run.steps[-1])
    assert runs["one"]["status"] == "finished"
    assert runs["one"]["last_loss"] == pytest.approx(run.series("loss", "value").values[-1])


def test_runs_in_a_store_are_shown_as_those_in_a_folder(client, folder):
    pytest.importorskip("fsspec")
    root = f"memory://{uuid.uuid4().hex}"
    for name in ("one", "sweep/lr 0.1~b"):
        while Carrier(folder / name, ObjectStore(f"{root}/{name}")).carry(settle=True):
            pass
    try:
        remote = client_of(mirror.local_path(root))
        names = [{run["id"] for run in each.get("/api/runs").json()["runs"]} for each in (client, remote)]
        assert names[0] == names[1] == {ONE, DEEP}
        heats = [each.get(f"/api/run/{ONE}/heat?pattern=*:gradient") for each in (client, remote)]
        assert heats[0].status_code == 200
        assert heats[0].json() == heats[1].json()
    finally:
        mirror.close()


def test_a_run_that_is_named_itself_is_the_only_one(folder):
    runs = client_of(folder / "one").get("/api/runs").json()["runs"]
    assert [run["id"] for run in runs] == [ONE]


def test_the_same_name_in_two_folders_is_two_runs(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name / "run", CALM)
    ids = [run["id"] for run in client_of(tmp_path / "a", tmp_path / "b").get("/api/runs").json()["runs"]]
    assert sorted(ids) == ["0-run", "1-run"]


def test_an_empty_folder_has_no_runs(tmp_path):
    assert client_of(tmp_path).get("/api/runs").json() == {
        "roots": [str(tmp_path.resolve())],
        "runs": [],
        "notices": [],
    }


@pytest.mark.parametrize("place", ["debugger", "epoch_4/debugger", "experiment/epoch_4/debugger"])
def test_pickled_pages_of_an_older_tool_come_with_the_command_that_converts_them(tmp_path, place):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "page_0.pkl").write_bytes(b"not to be opened")
    (notice,) = client_of(tmp_path).get("/api/runs").json()["notices"]
    assert f"sonde import-pages {tmp_path / place} {tmp_path / place} --trust" in notice


def test_the_overview_says_what_the_run_says(client, folder):
    reply = client.get(f"/api/run/{ONE}").json()
    run = open_run(folder / "one")
    assert reply["facts"]["num_steps"] == SMALL.steps
    assert reply["quantities"]["gradient"] == len([site for site in run.sites if site.quantity == "gradient"])
    assert reply["phases"] is None  # not measured, so absent


def test_the_story_has_the_verdict_of_the_terminal_and_curves_in_recorded_values(client, folder):
    run = open_run(folder / "one")
    story = client.get(f"/api/run/{ONE}/story").json()
    assert story["verdict"]["text"] == verdict_on(run).text
    loss = story["charts"][0]["lines"][0]
    recorded = run.series("loss:scalar", "value")
    finite = np.isfinite(recorded.values)
    assert loss["steps"] == recorded.steps[finite].tolist()
    assert loss["values"] == recorded.values[finite].tolist()
    assert loss["bad"] == [[int(step), "NaN"] for step in recorded.steps[~finite]]
    assert story["found"] == count_findings(run.findings)
    facts = client.get(f"/api/run/{ONE}").json()["facts"]
    assert {name: facts[name] for name in ("num_sites", "num_steps", "nbytes")} == {
        "num_sites": len(run.sites), "num_steps": SMALL.steps, "nbytes": run.nbytes,
    }  # fmt: skip


def test_thinned_curves_keep_recorded_values_and_the_band_of_what_was_left_out():
    values = np.sin(np.arange(10_000.0)) + 2
    values[1234] = 9.0
    values[5000:5003] = [np.nan, np.inf, -np.inf]
    line = line_of("x", np.arange(10_000), values)
    assert line["thinned"]
    assert len(line["steps"]) <= MOST_POINTS
    assert [values[step] for step in line["steps"]] == list(line["values"])
    at = int(np.searchsorted(line["steps"], 1234))
    assert (line["high"][at], line["from"][at] <= 1234) == (9.0, True)
    assert [word for _, word in line["bad"]] == ["NaN", "∞", "\N{MINUS SIGN}∞"]


def test_layers_are_answered_as_colours_with_short_names_and_full_keys(client):
    made = client.get(f"/api/run/{ONE}/heat?pattern=*:gradient").json()
    values = np.frombuffer(base64.b64decode(made["values"]), "<f4").reshape(len(made["keys"]), len(made["steps"]))
    assert np.isfinite(values).any()
    at = made["keys"].index("blocks.0.mlp.weight:gradient")
    assert made["names"][at] == "0 · mlp"


FIGURES = ("flow", "tree", "phases", "memory", "timeline")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_strict_json_with_its_title_beside_it(client, name):
    answer = client.get(f"/api/run/{ONE}/figure/{name}")
    assert answer.status_code == 200, answer.text
    made = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"a bare {word}"))
    assert made["title"]
    assert "<" not in made["title"] + made["note"]
    if made["empty"]:
        assert made["missing"]
    else:
        assert "template" not in made["layout"]
        assert isinstance(made["data"], list)


def test_curves_of_two_sites_and_a_histogram_are_drawn(client):
    made = client.get(f"/api/run/{ONE}/curve?site=head.weight:gradient&site=embed.weight:gradient&stat=norm").json()
    assert {line["key"] for line in made["lines"]} >= {"head.weight:gradient", "embed.weight:gradient"}
    for kind in ("", "&kind=ridge", "&kind=signed"):
        drawn = client.get(f"/api/run/{ONE}/figure/histogram?site=head.weight:gradient{kind}").json()
        assert not drawn["empty"]


def test_wrong_questions_get_an_answer_that_says_what_is_wrong(client):
    for path, status in (
        ("figure/curves", 404),
        ("figure/histogram?site=head.weight:gradient&kind=pie", 400),
        ("curve?site=nobody", 404),
        ("figure/flow?step=two", 400),
        ("figure/flow?stat=nothing", 400),
        ("figure/tree?colour=blue", 400),
        ("site?site=nobody", 404),
    ):
        answer = client.get(f"/api/run/{ONE}/{path}")
        assert answer.status_code == status, path
        assert answer.json()["error"]


def test_sites_are_found_by_glob_and_by_a_word(client):
    found = client.get(f"/api/run/{ONE}/sites", params={"pattern": "*.attn.weight:gradient"}).json()
    assert found["total"] == SMALL.layers
    word = client.get(f"/api/run/{ONE}/sites", params={"pattern": "ATTN"}).json()
    assert word["total"] == 4 * SMALL.layers
    assert client.get(f"/api/run/{ONE}/sites", params={"pattern": "re:("}).json()["total"] == 0


def test_a_site_is_described_in_numbers_of_its_last_step(client, folder):
    reply = client.get(f"/api/run/{ONE}/site", params={"site": "head.weight:gradient"}).json()
    run = open_run(folder / "one")
    assert reply["last"]["norm"] == pytest.approx(run.series("head.weight:gradient", "norm").values[-1])
    assert reply["readings"] == SMALL.steps
    assert reply["shape"] == [256, 256]


def test_events_can_be_chosen_by_type(client):
    reply = client.get(f"/api/run/{ONE}/events", params={"type": "nonfinite"}).json()
    assert reply["types"] == {"epoch": 1, "nonfinite": 1}
    assert [event["step"] for event in reply["events"]] == [20]


def test_checkpoints_stand_at_the_step_at_which_they_were_written(tmp_path):
    path = tmp_path / "run"
    write_run(path, CALM)
    times = open_run(path).blocks.time
    written = {
        "epoch_0/checkpoint.pt": times[9] + 0.01,
        "checkpoint_latest.pt": times[-1] + 1,
        "checkpoint_old.pt": 1e9,
    }
    for name, time in written.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"never opened")
        os.utime(path / name, (time, time))
    (path / "checkpoint_away.pt").symlink_to("/etc/hostname")
    client = client_of(tmp_path)
    reply = client.get("/api/run/0-run/events", params={"type": "checkpoint"}).json()["events"]
    steps = {event["message"].partition(" ")[0]: event["step"] for event in reply}
    assert steps == {"epoch_0/checkpoint.pt": 10, "checkpoint_latest.pt": CALM.steps, "checkpoint_old.pt": None}
    assert "checkpoint" in client.get("/api/run/0-run/figure/timeline").text


def test_two_runs_are_compared(client):
    reply = client.get("/api/compare", params={"run": [ONE, DEEP]}).json()
    assert [run["name"] for run in reply["runs"]] == ["one", "sweep/lr 0.1~b"]
    assert "loss:scalar" in reply["scalars"]
    parting = client.get("/api/compare/parting", params={"run": [ONE, DEEP]}).json()["partings"][0]
    assert parting["exact"]["first"]["step"] == 1
    layers = client.get("/api/compare/layers", params={"run": [ONE, DEEP]}).json()
    assert layers["rows"][0]["site"].startswith("blocks.2.mlp") or layers["total"] > 0
    assert client.get("/api/compare/figure", params={"run": [ONE, DEEP], "site": "loss:scalar"}).json()["data"]
    assert client.get("/api/compare").status_code == 400


def test_settings_that_differ_are_named_and_those_that_do_not_are_counted(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        header = replace(CALM.run_header(), config={"optimizer": {"lr": rate, "betas": [0.9, 0.99]}, "seed": 0})
        RunWriter(tmp_path / name, header).close()
    reply = client_of(tmp_path).get("/api/compare", params={"run": ["0-a", "0-b"]}).json()["settings"]
    assert reply["differing"] == [{"name": "optimizer.lr", "values": [0.1, 0.2]}]
    assert reply["same"] >= 4


def write_trace(path, content, *, packed=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if packed else data)


def test_a_trace_is_summed_by_operator_and_module_and_can_be_downloaded(tmp_path):
    write_run(tmp_path / "run", CALM)
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "dur": 1800, "ts": 0, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 1500, "ts": 10, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 500, "ts": 20, "tid": 2},
        {"ph": "X", "cat": "cpu_op", "name": "<script>alert(1)</script>", "dur": 1, "ts": 9},
        {"ph": "X", "cat": "python_function", "name": "nn.Module: Linear_0", "dur": 2100, "ts": 0},
        {"ph": "i", "cat": "cpu_op", "name": "no duration"},
        "not an event",
    ]
    write_trace(tmp_path / "run" / "traces" / "profile.json.gz", {"traceEvents": events})
    client = client_of(tmp_path)
    sums = client.get("/api/run/0-run/trace-summary?name=profile.json.gz").json()
    assert sums["operators"][:2] == [
        {"name": "aten::mm", "own_ms": 2.0, "ms": 2.0, "calls": 2},
        {"name": "aten::linear", "own_ms": 0.3, "ms": 1.8, "calls": 1},
    ]
    assert sums["modules"] == [{"name": "Linear_0", "own_ms": 2.1, "ms": 2.1, "calls": 1}]
    sent = client.get("/api/run/0-run/trace/profile.json.gz")
    assert json.loads(gzip.decompress(sent.content))["traceEvents"] == events
    assert "attachment" in sent.headers["content-disposition"]


@pytest.mark.parametrize("content", [b"{", b"[1, 2", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_trace_says_so(tmp_path, content):
    write_run(tmp_path / "run", CALM)
    write_trace(tmp_path / "run" / "traces" / "profile.json", content, packed=False)
    answer = client_of(tmp_path).get("/api/run/0-run/trace-summary?name=profile.json")
    assert answer.status_code == 422
    assert "profile.json" in answer.json()["error"]


def test_a_damaged_run_is_listed_with_what_is_wrong_and_others_still_open(tmp_path):
    write_run(tmp_path / "good", CALM)
    write_run(tmp_path / "bad", CALM)
    (tmp_path / "bad" / "run.json").write_text("{")
    client = client_of(tmp_path)
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert runs["bad"]["status"] == "damaged"
    assert "run.json" in runs["bad"]["problem"]
    assert client.get("/api/run/0-bad").status_code == 422
    assert client.get("/api/run/0-good").status_code == 200


def test_a_live_run_is_read_on_and_its_version_rises(tmp_path):
    clock = [0.0]
    writer = write_run(tmp_path / "run", CALM, close=False)
    library = Library([tmp_path], clock=lambda: clock[0])
    opened = library.open("0-run")
    before = opened.version
    writer.take_block(replace(next(iter(CALM.blocks())), step=999))
    writer.flush()
    assert opened.refresh() == before  # it was read just now
    clock[0] = 10.0
    assert opened.refresh() == before + 1
    assert opened.run.steps[-1] == 999
    writer.close()


def test_a_training_that_begins_anew_in_the_same_folder_is_shown(tmp_path):
    write_run(tmp_path / "run", CALM)
    library = Library([tmp_path])
    before = library.open("0-run")
    shutil.rmtree(tmp_path / "run")
    assert library.open("0-run") is before  # what was read stays
    write_run(tmp_path / "run", replace(CALM, steps=12))
    after = library.open("0-run")
    assert after.run.steps[-1] == 12
    assert after.version > before.version


def test_answers_are_kept_until_the_run_changes_and_never_too_many(tmp_path):
    write_run(tmp_path / "run", CALM)
    opened = OpenRun("0-run", "run", open_run(tmp_path / "run"), tmp_path)
    made = []
    for _ in range(3):
        opened.keep("same", lambda: made.append(1))
    assert len(made) == 1
    for number in range(2 * shelf.MOST_ANSWERS):
        opened.keep(number, lambda: b"")
    assert len(opened._kept) == shelf.MOST_ANSWERS


def test_only_so_many_runs_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "MOST_OPEN", 2)
    for name in "abc":
        write_run(tmp_path / name, CALM)
    library = Library([tmp_path])
    for name in "abca":
        library.open(make_id(0, name))
    assert list(library._open) == ["0-c", "0-a"]


def test_the_stream_begins_with_where_the_run_stands(folder):
    import anyio

    from sonde.views.web.live_api import pulse

    opened = Library([folder]).open(ONE)
    reply = pulse(opened)
    assert reply == {"version": 1, "status": "finished", "last_step": SMALL.steps, "findings": 0}
    assert client_of(folder).get(f"/api/run/{ONE}/pulse").json() == reply
    anyio.run(_first_event, folder, reply)


async def _first_event(folder, reply):
    from starlette.requests import Request

    from sonde.views.web.live_api import routes

    (live, *_) = routes(Library([folder]))
    answer = await live.endpoint(Request({"type": "http", "path_params": {"run": ONE}, "headers": [], "method": "GET"}))
    stream = answer.body_iterator
    first = await anext(stream)
    await stream.aclose()
    assert answer.media_type == "text/event-stream"
    assert json.loads(first.partition("data: ")[2]) == reply


def test_a_writer_that_is_killed_or_a_folder_that_goes_changes_what_is_answered(tmp_path):
    writer = write_run(tmp_path / "run", CALM, close=False)
    writer.flush()
    now = [0.0]
    library = Library([tmp_path], clock=lambda: now[0])
    opened = library.open("0-run")
    assert (opened.status, opened.keep("status", lambda: opened.status)) == ("live", "live")
    before = opened.version
    path = tmp_path / "run" / "telemetry" / "r00000" / "writer.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"pid": 2**22 + 1}))  # no process has this number: as if it had been killed
    now[0] += 1
    assert opened.keep("status", lambda: opened.status) == "crashed"
    assert opened.version == before + 1
    path.write_text(json.dumps(held))
    writer.close()
    shutil.rmtree(tmp_path / "run")
    now[0] += 1
    assert opened.keep("status", lambda: opened.status) == "deleted"
    assert len(opened.run.steps) == CALM.steps


def test_a_run_is_opened_once_however_many_ask_at_the_same_time(tmp_path, monkeypatch):
    write_run(tmp_path / "run", CALM)
    library, opened, count = Library([tmp_path]), [], threading.Semaphore(0)

    def open_slowly(path):
        opened.append(path)
        count.acquire(timeout=10)  # until the others have asked too
        return open_run(path)

    monkeypatch.setattr(shelf, "open_run", open_slowly)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(library.open, "0-run") for _ in range(6)]
        count.release(6)
        assert len({id(each.result()) for each in asked}) == 1
    assert len(opened) == 1


def test_runs_of_one_name_from_two_folders_are_two_curves(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name / "run", CALM)
    client = client_of(tmp_path / "a", tmp_path / "b")
    made = client.get("/api/compare/figure?run=0-run&run=1-run&site=loss:scalar").json()
    assert [trace["name"] for trace in made["data"]] == ["0-run", "1-run"]


def test_a_wrong_address_gives_a_page_to_a_person_and_json_to_a_program(client):
    page = client.get("/a/b/<c>", headers={"accept": "text/html,*/*"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "/a/b/&lt;c&gt;" in page.text
    assert 'href="../../"' in page.text
    assert "error" in client.get("/api/nothing", headers={"accept": "text/html"}).json()
    assert "error" in client.get("/a/b").json()


def test_taped_steps_are_answered_as_trees_that_fold_by_module(client, folder, tmp_path):
    assert client.get(f"/api/run/{ONE}/tape").json() == {"tapes": []}
    shutil.copytree(folder / "one", tmp_path / "taped")
    tape.write(tmp_path / "taped", small_tape())
    (answer,) = client_of(tmp_path).get("/api/run/0-taped/tape").json()["tapes"]
    assert (answer["step"], answer["operations"]) == (3, 4)
    data = [node["title"] for node in answer["nodes"] if node["kind"] == "value"]
    assert data == ["batch[0]: input", "batch[1]: target"]
    root = next(node for node in answer["nodes"] if node["kind"] == "module")
    assert (root["operations"], root["result"]) == (2, "[4, 2]")
    assert [child["kind"] for child in root["children"]] == ["module", "op"]


def test_a_large_tape_is_folded_from_its_depth_until_it_fits(monkeypatch):
    whole = tape_api.describe(small_tape())
    monkeypatch.setattr(tape_api, "_MOST_LINES", 5)
    folded = tape_api.describe(small_tape())
    assert str(folded).count("'kind'") < str(whole).count("'kind'")
    assert folded["operations"] == whole["operations"]
