"""Many runs: the Parquet dataset, diagnosing all of them, queries and the report."""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.analysis.made_run import START, Recipe, write_run
from tests.waiting import PATIENCE_S, ask, started

import sonde
from sonde.analysis import dataset
from sonde.analysis import fleet as fleet_module
from sonde.core.statistics import STATISTICS
from sonde.records import Event, Finding
from sonde.store import RunWriter
from sonde.store.remote import mirror
from sonde.store.remote.address import ObjectStore
from sonde.store.remote.carrier import Carrier
from sonde.store.runs import find_runs

parquet = pytest.importorskip("pyarrow.parquet")
SOUND = Recipe(steps=6, layers=1, dies_at=None, nan_at=None)
NAN = Recipe(steps=6, layers=1, dies_at=None, nan_at=4)


def write_ill(path):
    """Write a run with a note and a finding of its time."""
    writer = RunWriter(path, SOUND.run_header())
    writer.take_sites(SOUND.sites())
    for block in SOUND.blocks():
        writer.take_block(block)
    writer.take_event(Event(event_type="note", message="hello", step=3, timestamp=START, data={"x": 1.5}))
    writer.take_finding(Finding(kind="made_up", severity="warning", step=2, last_step=5, sites=("head",), cause="so"))
    writer.close()


@pytest.fixture
def cli(request):
    return request.getfixturevalue("sonde")  # the package has that name here


@pytest.fixture
def runs(tmp_path):
    """Three runs of two projects: a sound one, one with a NaN, one with a recorded finding."""
    write_run(tmp_path / "work" / "mnist" / "runs" / "sound", SOUND)
    write_run(tmp_path / "work" / "mnist" / "runs" / "nan", NAN)
    write_ill(tmp_path / "work" / "speech" / "ill")
    return tmp_path / "work"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "fleet"


def export(sonde, strict, *places, **more):
    result = sonde("export", *places, "--to", "dataset", "--json", **more)
    assert result.exit_code == 0, result.output
    return strict(result.stdout)


def same(values, expected):
    """Compare numbers that are null in a table where they are not known."""
    return np.array_equal([math.nan if x is None else x for x in values], expected, equal_nan=True)


def test_every_series_reads_back_from_the_dataset(cli, strict, runs, out):
    assert export(cli, strict, runs, "--out", out)["written"] == 3
    table = parquet.read_table(out / "series").to_pandas()
    for summary in sonde.list_runs(runs):
        run = sonde.open_run(summary.path)
        mine = table[table["run"] == str(summary.path)]
        assert set(mine["run_id"]) == {dataset.labels_of(summary.path)["run_id"]}
        assert set(mine["project"]) == {"speech" if summary.name == "ill" else "mnist"}
        for key, stat in (("loss:scalar", "value"), ("head.weight:gradient", "norm"), ("embed:output", "abs_p50")):
            (site,) = run.find(key)
            rows, series = mine[mine["site"] == key], run.series(site, stat)
            assert rows["step"].tolist() == series.steps.tolist()
            assert same(rows[stat], series.values)
    assert {"run_id", "run", "project", "folder", "step", *STATISTICS} <= set(table.columns)


def test_duckdb_and_polars_read_the_dataset_as_it_is(cli, strict, runs, out):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    export(cli, strict, runs, out)  # the folder as the last argument
    run = sonde.open_run(runs / "mnist" / "runs" / "sound")
    losses = run.series(run.find("loss:scalar")[0], "value").values.tolist()
    rows = duckdb.sql(
        f"select s.value from '{out}/series/*.parquet' s join '{out}/runs/*.parquet' r using (run_id) "
        "where r.run like '%/sound' and s.site = 'loss:scalar' order by s.step"
    ).fetchall()
    assert [value for (value,) in rows] == losses
    frame = polars.read_parquet(out / "series")
    mine = frame.filter(polars.col("run") == str(run.path), polars.col("site") == "loss:scalar")
    assert mine.sort("step")["value"].to_list() == losses
    assert sorted(polars.read_parquet(out / "runs")["last_step"].to_list()) == [6, 6, 6]
    assert polars.read_parquet(out / "findings").select("kind", "sites").rows() == [("made_up", ["head"])]
    notes = polars.read_parquet(out / "events").filter(polars.col("event_type") == "note")
    (note,) = [event for event in sonde.open_run(runs / "speech" / "ill").events if event.event_type == "note"]
    assert [json.loads(text) for text in notes["data"]] == [note.data]


def test_a_second_export_writes_only_what_is_new_or_changed(cli, strict, runs, out):
    export(cli, strict, runs, "--out", out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    write_run(runs / "new", SOUND)
    cli("note", runs / "speech" / "ill", "--tag", "odd")
    again = export(cli, strict, runs, "--out", out)
    assert (again["written"], again["unchanged"]) == (2, 2)
    same_files = [path for path, when in before.items() if path.stat().st_mtime_ns == when]
    assert len(same_files) == 2 * 4
    assert parquet.read_table(out / "runs").num_rows == 4  # replaced, not doubled
    assert export(cli, strict, runs, "--out", out)["written"] == 0


def test_a_damaged_run_is_a_row_that_names_the_problem(cli, strict, runs, out):
    (runs / "speech" / "ill" / "run.json").write_text("not json")
    assert list(export(cli, strict, runs, "--out", out)["problems"]) == [str(runs / "speech" / "ill")]
    problems = {row["run"]: row["problem"] for row in parquet.read_table(out / "runs").to_pylist()}
    assert [path for path, problem in problems.items() if problem] == [str(runs / "speech" / "ill")]


def test_a_folder_with_something_else_is_not_written_to(cli, runs, tmp_path):
    for verb in (["export", runs, runs / "speech", "--to", "dataset"], ["fleet", "diagnose", runs, "--out", runs]):
        result = cli(*verb)
        assert result.exit_code == 2
        assert "was not made by this command" in result.stderr
    assert not (runs / "speech" / "series").exists()
    assert "takes one run" in cli("export", runs, runs, "--to", "csv", "--out", tmp_path / "x.csv").stderr


def diagnose(sonde, strict, *arguments):
    return strict(sonde("fleet", "diagnose", *arguments, "--json").stdout)


def test_diagnose_in_processes_finds_what_diagnose_finds(cli, strict, runs, out):
    assert diagnose(cli, strict, runs, "--out", out, "--jobs", 2)["diagnosed"] == 3
    lines = [json.loads(line) for line in (out / fleet_module.RESULTS).read_text().splitlines()]
    kinds = {line["run"]: [finding["kind"] for finding in line["findings"]] for line in lines}
    for path, found in kinds.items():
        assert found == [finding.kind for finding in sonde.diagnose(sonde.open_run(path)).findings]
    assert any(kinds.values())


def test_a_fault_on_one_run_does_not_end_the_work_on_the_others(cli, strict, runs, out, monkeypatch):
    def fail_once(run, judge=fleet_module.diagnose):
        return judge(run) if run.path.name != "nan" else 1 / 0

    monkeypatch.setattr(fleet_module, "diagnose", fail_once)
    answer = diagnose(cli, strict, runs, "--out", out, "--jobs", 1)
    assert answer["diagnosed"] == 3
    assert answer["problems"] == {str(runs / "mnist" / "runs" / "nan"): "ZeroDivisionError: division by zero"}


@pytest.fixture
def bucket(runs, monkeypatch):
    """The same runs in a store."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(mirror, "_FRESH_S", -1.0)
    root = f"memory://{uuid.uuid4().hex}"
    for path in find_runs(runs):
        while Carrier(path, ObjectStore(f"{root}/{path.relative_to(runs)}")).carry(settle=True):
            pass
    yield root
    mirror.close()


def test_runs_in_a_store_are_exported_and_diagnosed_from_there(cli, strict, runs, out, bucket):
    local = out.parent / "local"
    export(cli, strict, runs, "--out", local)
    answer = strict(cli("fleet", "export", bucket, "--out", out, "--jobs", 1, "--json").stdout)
    assert (answer["written"], answer["problems"]) == (3, {})
    assert not list(mirror._runs), "what was read is deleted, however many runs there are"
    diagnose(cli, strict, bucket, "--out", out, "--jobs", 1)
    ours, theirs = (
        {table: parquet.read_table(folder / table).to_pylist() for table in dataset.TABLES} for folder in (out, local)
    )
    expected = {f"{bucket}/{path.relative_to(runs)}" for path in find_runs(runs)}
    assert {row["run"] for row in ours["runs"]} == expected
    assert {row["run"] for row in fleet_module.read_results(out)} == expected
    for table in dataset.TABLES:
        same = [
            sorted(repr({**row, **dict.fromkeys([*dataset.LABELS, "fingerprint"])}) for row in each[table])
            for each in (ours, theirs)
        ]
        assert same[0] == same[1]
    assert {row["project"] for row in ours["runs"]} == {"mnist", "speech"}
    for again in (["fleet", "export", bucket, "--jobs", 1], ["export", bucket, "--to", "dataset"]):
        assert strict(cli(*again, "--out", out, "--json").stdout)["unchanged"] == 3
    assert diagnose(cli, strict, bucket, "--out", out, "--jobs", 1)["unchanged"] == 3


def test_an_export_goes_on_where_it_stopped(cli, strict, runs, out, monkeypatch):
    written = []

    def stop_at_third(place, out, write=dataset.write_tables):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(place)
        return write(place, out)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_tables", stop_at_third)
        assert cli("fleet", "export", runs, "--out", out, "--jobs", 1).exit_code == 130
    answer = strict(cli("fleet", "export", runs, "--out", out, "--jobs", 1, "--json").stdout)
    assert (answer["written"], answer["unchanged"]) == (1, 2)


@pytest.fixture
def ray_cluster(monkeypatch):
    """Start a Ray cluster as its users do, with `ray start --head`; return its address."""
    if not os.environ.get("SONDE_ALL_PROGRAMS"):
        pytest.skip("starts a Ray cluster; SONDE_ALL_PROGRAMS=1 does")
    pytest.importorskip("ray")
    ray = Path(sys.executable).with_name("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # nobody else can reach it
    options = ["--num-cpus=1", "--include-dashboard=false", f"--port={address.partition(':')[2]}"]
    # The names of Ray's sockets would be too long below tmp_path.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        start = [ray, "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={folder}", *options]
        with started(start, stdin=None, stderr=subprocess.STDOUT) as head:
            while "Ray runtime started" not in ask(head):
                pass
            yield address
            head.terminate()  # ends the processes of this cluster, and no other
            head.communicate(timeout=PATIENCE_S)


def test_a_ray_cluster_gives_the_same_results(cli, strict, process, runs, out, ray_cluster):
    for action, count in (("diagnose", "diagnosed"), ("export", "written")):
        command = ("-m", "sonde", "fleet", action, runs, "--out", out, "--engine", "ray", "--json")
        answer = process(*command, RAY_ADDRESS=ray_cluster)
        assert strict(answer.stdout.decode())[count] == 3, answer.stderr
        assert strict(cli("fleet", action, runs, "--out", out, "--jobs", 1, "--json").stdout)["unchanged"] == 3
    for line in fleet_module.read_results(out):
        expected = sonde.diagnose(sonde.open_run(line["run"])).findings
        assert [each["kind"] for each in line["findings"]] == [each.kind for each in expected]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_data_reads_the_dataset_as_it_is(cli, strict, process, runs, out, ray_cluster):
    export(cli, strict, runs, "--out", out)
    program = f"""
import ray.data
series = ray.data.read_parquet({str(out / "series")!r})
losses = series.filter(expr="site == 'loss:scalar'").sort("step").take_all()
print("VALUES", [row["value"] for row in losses if row["run"].endswith("/sound")])
print("COUNT", ray.data.read_parquet({str(out / "runs")!r}).count())
"""
    answer = process("-c", program, RAY_ADDRESS=ray_cluster)
    lines = answer.stdout.decode().splitlines()
    run = sonde.open_run(runs / "mnist" / "runs" / "sound")
    losses = run.series(run.find("loss:scalar")[0], "value").values.tolist()
    assert f"VALUES {losses}" in lines, answer.stderr
    assert "COUNT 3" in lines


def test_diagnose_goes_on_where_it_stopped(cli, strict, runs, out, monkeypatch):
    judged = []

    def stop_at_third(place, judge=fleet_module.judge_run):
        if len(judged) == 2:
            raise KeyboardInterrupt
        judged.append(place)
        return judge(place)

    with monkeypatch.context() as patch:
        patch.setattr(fleet_module, "judge_run", stop_at_third)
        assert cli("fleet", "diagnose", runs, "--out", out, "--jobs", 1).exit_code == 130
    results = out / fleet_module.RESULTS
    results.write_text(results.read_text() + '{"run_id": "cut o')
    answer = diagnose(cli, strict, runs, "--out", out, "--jobs", 1)
    assert (answer["diagnosed"], answer["unchanged"]) == (1, 2)
    assert len(results.read_text().splitlines()) == 3
    write_run(runs / "new", SOUND)
    assert diagnose(cli, strict, runs, "--out", out, "--jobs", 1)["diagnosed"] == 1
    (runs / "new" / "run.json").write_text("not json")
    broken = cli("fleet", "diagnose", runs, "--out", out, "--jobs", 1, "--json")
    assert broken.exit_code == 1
    assert list(strict(broken.stdout)["problems"]) == [str(runs / "new")]


def results_of(*runs):
    return [
        {"run": str(i), "run_id": str(i), "folder": "f", "project": p, "findings": f} for i, (p, f) in enumerate(runs)
    ]


def found(kind, severity, time):
    return {"kind": kind, "severity": severity, "time": time, "step": 1}


def test_the_report_counts_runs_per_finding_and_project(cli, strict, out):
    lines = results_of(
        ("a", [found("x", "warning", 200.0), found("y", "info", 5.0)]),
        ("a", [found("x", "critical", 100.0), found("x", "info", 150.0)]),
        ("a", []),
        ("b", [found("x", "warning", 50.0)]),
    )
    out.mkdir()
    (out / fleet_module.RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = strict(cli("fleet", "report", out, "--json").stdout)
    assert [answer[name] for name in ("runs", "projects", "with_findings")] == [4, 2, 3]
    assert answer["findings"] == [
        {"finding": "x", "project": "a", "severity": "critical", "runs": 2, "of": 3, "since": 100.0, "latest": 200.0},
        {"finding": "x", "project": "b", "severity": "warning", "runs": 1, "of": 1, "since": 50.0, "latest": 50.0},
        {"finding": "y", "project": "a", "severity": "info", "runs": 1, "of": 3, "since": 5.0, "latest": 5.0},
    ]
    assert "1970-01-01" in cli("fleet", "report", out).stdout


def test_sql_reaches_the_dataset_and_the_diagnoses(cli, strict, runs, out):
    pytest.importorskip("duckdb")
    diagnose(cli, strict, runs, "--out", out, "--jobs", 1)
    export(cli, strict, runs, "--out", out)
    sql = "select project, count(*) n from runs join diagnosed_runs using (run_id, project) group by 1 order by 1"
    assert strict(cli("fleet", "query", sql, out, "--json").stdout) == [
        {"project": "mnist", "n": 2},
        {"project": "speech", "n": 1},
    ]
    assert "made_up" in cli("fleet", "query", "select kind from findings", out).stdout
    wrong = cli("fleet", "query", "select nothing from nowhere", out)
    assert wrong.exit_code == 2
    assert "nowhere" in wrong.stderr


def test_wrong_use_leads_on(cli, monkeypatch, runs, out, tmp_path):
    assert "--out OUT" in cli("fleet", "diagnose", runs).stderr
    assert "sonde fleet diagnose" in cli("fleet", "report", tmp_path).stderr
    assert "There is no folder" in cli("fleet", "diagnose", tmp_path / "x", "--out", out).stderr
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "pip install 'sonde[fleet]'" in cli("fleet", "query", "select 1", out).stderr.replace("\n", " ")
