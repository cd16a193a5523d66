import csv
import sys

import pytest

from sonde.store import open_run


def export(sonde, run, kind, out, *options):
    return sonde("export", run, "--to", kind, "--out", out, *options)


def test_csv_agrees_with_the_run(sonde, first, tmp_path):
    out = tmp_path / "first.csv"
    result = export(sonde, first, "csv", out, "--site", "*.weight:update")
    assert result.exit_code == 0
    assert result.stdout.startswith("840 rows of 14 sites in ")
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 840
    assert list(rows[0])[:8] == ["step", "span", "time", "epoch", "rank", "site", "name", "quantity"]
    run = open_run(first)
    ours = [row for row in rows if row["site"] == "head.weight:update"]
    assert [float(row["rms"]) for row in ours] == run.series("head.weight:update", "rms").values.tolist()
    assert [float(row["ratio"]) for row in ours] == run.series("head.weight:update", "ratio").values.tolist()


def test_json_is_strict_and_can_be_read_by_the_line(sonde, first, tmp_path, strict):
    out = tmp_path / "first.json"
    assert export(sonde, first, "json", out, "--site", "loss:scalar", "--stat", "value").exit_code == 0
    rows = strict(out.read_text())
    assert len(rows) == 60
    assert rows[44]["value"] is None
    assert set(rows[0]) == {"step", "span", "time", "epoch", "rank", "site", "name", "quantity", "value"}
    assert strict(out.read_text().splitlines()[1].rstrip(",")) == rows[0]


def test_parquet_is_what_pandas_gets(sonde, first, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "first.parquet"
    assert export(sonde, first, "parquet", out, "--stat", "norm", "--stat", "abs_p50").exit_code == 0
    table = parquet.read_table(out).to_pandas()
    expected = open_run(first).to_pandas(stats=["norm", "abs_p50"])
    assert list(table.columns) == list(expected.columns)
    assert table["site"].astype(str).tolist() == expected["site"].astype(str).tolist()
    assert table["step"].tolist() == expected["step"].tolist()
    assert table["norm"].fillna(-1).tolist() == expected["norm"].fillna(-1).tolist()
    assert table["abs_p50"].fillna(-1).tolist() == expected["abs_p50"].fillna(-1).tolist()


def test_memory_stays_small_because_steps_come_in_windows(sonde, first, tmp_path, monkeypatch, strict):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    export(sonde, first, "csv", whole, "--site", "head*")
    monkeypatch.setattr("sonde.analysis.long_table.windows.__defaults__", (7,))
    export(sonde, first, "csv", parts, "--site", "head*")
    assert parts.read_text() == whole.read_text()


def test_a_file_is_not_written_over_unless_forced(sonde, first, tmp_path):
    out = tmp_path / "first.csv"
    out.write_text("precious")
    result = export(sonde, first, "csv", out)
    assert result.exit_code == 2
    assert "without --force" in result.stderr.replace("\n", " ")
    assert out.read_text() == "precious"
    assert export(sonde, first, "csv", out, "--force", "--site", "loss:scalar").exit_code == 0
    assert out.read_text().startswith("step,")


def test_a_file_that_cannot_be_written_is_an_error(sonde, first, tmp_path):
    assert "is a folder" in export(sonde, first, "csv", tmp_path).stderr
    assert "There is no folder" in export(sonde, first, "csv", tmp_path / "a" / "b.csv").stderr
    assert "no statistic" in export(sonde, first, "csv", tmp_path / "b.csv", "--stat", "nrom").stderr
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_the_cure_is_named(sonde, first, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = export(sonde, first, "parquet", tmp_path / "first.parquet")
    assert result.exit_code == 2
    assert "pip install 'sonde[export]'" in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_the_answer_for_programs(sonde, first, tmp_path, strict):
    out = tmp_path / "x.csv"
    answer = strict(export(sonde, first, "csv", out, "--site", "loss:scalar", "--json").stdout)
    assert answer == {"run": first, "out": str(out), "format": "csv", "rows": 60, "sites": 1}


def test_a_dash_stands_for_standard_output(sonde, first, tmp_path, monkeypatch, strict):
    monkeypatch.chdir(tmp_path)
    rows = list(
        csv.DictReader(export(sonde, first, "csv", "-", "--site", "loss:scalar", "--stat", "value").stdout.splitlines())
    )
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 61)]
    told = export(sonde, first, "json", "-", "--site", "loss:scalar", "--stat", "value").stdout
    assert [row["step"] for row in strict(told)] == list(range(1, 61))
    refused = export(sonde, first, "parquet", "-")
    assert refused.exit_code == 2
    assert "choose csv or json" in refused.stderr
    assert not list(tmp_path.iterdir())
