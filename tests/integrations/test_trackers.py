"""Findings and series go to experiment trackers while a run is recorded; against the real packages, offline."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.errors import OptionError
from sonde.integrations.trackers import TrackerSink
from sonde.records import Finding

pytestmark = [pytest.mark.filterwarnings("ignore")]
SERIES = ("loss:scalar value", "*:gradient norm", "*:update ratio", "0.weight:parameter abs_p95")


class Kept(TrackerSink):
    """A tracker that keeps what it is given."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.values, self.findings, self.closed = {}, [], False

    def write(self, values, step, timestamp):
        self.values.setdefault(step, {}).update(values)

    def write_finding(self, finding, *, is_new):
        self.findings.append((finding.kind, finding.withdrawn, is_new))

    def close(self):
        super().close()
        self.closed = True


def train(path, sinks, steps=8):
    """Train without zero_grad(), which is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with sonde.watch(model, optimizer, run=path, to=sinks) as session:
        for _ in range(steps):
            loss = model(torch.randn(16, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return sonde.open_run(path)


@pytest.fixture
def expected(tmp_path):
    """Return the loss of each step and the text of the finding, as a run has them that went nowhere else."""
    run = train(tmp_path / "expected", [])
    loss = run.series("loss:scalar", "value")
    return dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True))


def test_chosen_series_are_those_of_the_run(tmp_path):
    sink = Kept(SERIES)
    run = train(tmp_path / "run", sink)
    assert sorted(sink.values) == list(range(9))
    for tag, site, stat in (
        ("loss", "loss:scalar", "value"),
        ("gradient_norm/0.weight", "0.weight:gradient", "norm"),
        ("update_ratio/2.bias", "2.bias:update", "ratio"),
        ("parameter_abs_p95/0.weight", "0.weight:parameter", "abs_p95"),
    ):
        series = run.series(site, stat)
        assert len(series.steps) >= 8
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            assert math.isclose(sink.values[step][tag], value, rel_tol=1e-12)
    assert not any(tag.startswith("output") for values in sink.values.values() for tag in values)


def test_findings_come_while_training_goes_on_and_before_the_end(tmp_path):
    sink = Kept()
    run = train(tmp_path / "run", [sink])
    assert ("missing_zero_grad", False, True) in sink.findings
    assert [each for each in sink.findings if each[0] == "missing_zero_grad"] == [("missing_zero_grad", False, True)]
    reported = {kind for kind, withdrawn, _ in sink.findings if not withdrawn}
    assert reported >= {finding.kind for finding in run.findings}, "also those that the last look made"
    assert sink.closed


def test_every_chooses_steps(tmp_path):
    sink = Kept(SERIES, 3)
    train(tmp_path / "run", sink)
    assert sorted(sink.values) == [0, 3, 6]


def test_a_finding_that_has_not_changed_is_written_once():
    sink = Kept()
    finding = Finding(kind="a", severity="warning", step=1, last_step=1, cause="it is so")
    for each in (finding, finding, sonde.Finding(**{**vars_of(finding), "withdrawn": True})):
        sink.take_finding(each)
    assert sink.findings == [("a", False, True), ("a", True, False)]


def vars_of(finding):
    return {name: getattr(finding, name) for name in Finding.__slots__}


def test_a_tracker_that_fails_does_not_stop_the_training(tmp_path, caplog):
    class Failing(Kept):
        def write(self, values, step, timestamp):
            raise ConnectionError("no network")

    run = train(tmp_path / "run", [Failing()])
    assert run.steps[-1] == 8
    assert run.status == "finished"
    assert "sink Failing failed; training continues without it" in caplog.text


@pytest.mark.parametrize("wrong", ["loss", "loss:scalar nonsense"])
def test_a_series_that_cannot_be_read_is_refused(wrong):
    with pytest.raises(OptionError):
        Kept([wrong])


def test_something_that_is_not_a_sink_is_refused(tmp_path):
    with pytest.raises(OptionError, match="to takes a sink"):
        sonde.watch(nn.Linear(1, 1), run=tmp_path / "run", to=["wandb"])
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- the real packages


def test_tensorboard_shows_series_and_findings(tmp_path, expected):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", sonde.to_tensorboard(tmp_path / "logs"))
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses == pytest.approx(expected, rel=1e-6)
    text = events.Tensors("findings/missing_zero_grad/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "Gradients are not cleared between steps" in text


def test_wandb_gets_series_findings_and_an_alert(tmp_path, expected, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = sonde.to_wandb(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off"))
    train(tmp_path / "run", sink)
    assert wandb.run is None, "a run that was started here is finished"
    records = list(read_wandb(tmp_path))
    rows = [fields(record.history.item) for record in records]
    losses = {int(row["_step"]): float(row["sonde/loss"]) for row in rows if "sonde/loss" in row}
    assert losses == pytest.approx(expected, rel=1e-6)
    assert any(record.alert.title == "missing_zero_grad" for record in records)
    summary = {name: text for record in records for name, text in fields(record.summary.update).items()}
    assert "not cleared between steps" in summary["sonde/findings/missing_zero_grad"]


def test_wandb_keeps_the_rows_of_the_program(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off")) as mine:
        train(tmp_path / "run", sonde.to_wandb())
        for step in range(3):
            mine.log({"mine": step}, step=step)
        assert wandb.run is mine, "it is not finished by Sonde"
    rows = [fields(record.history.item) for record in read_wandb(tmp_path)]
    assert [row["mine"] for row in rows if "mine" in row] == ["0", "1", "2"]
    assert any("sonde/loss" in row for row in rows)


def read_wandb(folder):
    """Yield the rows and other records of a W&B file: LevelDB's log format with a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header: the block is filled up
            at += 32768 - at % 32768
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def fields(items):
    """Return a row of W&B as a dict; the parts of a nested name stand in a list."""
    return {"/".join(each.nested_key) or each.key: each.value_json for each in items}


def test_mlflow_gets_series_tags_and_an_artifact(tmp_path, expected, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    sink = sonde.to_mlflow(experiment="first", series=SERIES)
    train(tmp_path / "run", sink)
    client = mlflow.MlflowClient()
    run = client.get_run(sink.run_id)
    assert run.info.status == "FINISHED"
    losses = {each.step: each.value for each in client.get_metric_history(sink.run_id, "sonde/loss")}
    assert losses == pytest.approx(expected, rel=1e-6)
    assert "not cleared between steps" in run.data.tags["sonde.finding.missing_zero_grad"]
    stored = json.loads(mlflow.artifacts.load_text(f"runs:/{sink.run_id}/sonde/findings.json"))
    assert stored["missing_zero_grad"]["severity"] == "critical"
    with mlflow.start_run() as mine:
        assert sonde.to_mlflow().run_id == mine.info.run_id, "the run of the program is used"


def test_comet_gets_series_and_findings(tmp_path, expected, monkeypatch):
    comet = pytest.importorskip("comet_ml")
    experiment = comet.OfflineExperiment(
        offline_directory=str(tmp_path), log_code=False, log_env_details=False, auto_output_logging=False
    )
    train(tmp_path / "run", sonde.to_comet(experiment))
    metrics = {name: value for name, value in experiment.metrics.items() if name.startswith("sonde/")}
    others = dict(experiment.others)
    experiment.end()
    assert np.isclose(metrics["sonde/loss"], expected[8], rtol=1e-6)
    assert "not cleared between steps" in others["sonde/findings/missing_zero_grad"]
    assert list(tmp_path.glob("*.zip"))
