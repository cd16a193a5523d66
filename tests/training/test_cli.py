from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S
from typer.testing import CliRunner

from sonde.cli.main import app
from sonde.store import open_run
from sonde.store.pages import load_debug_outputs

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
CONFIG = """
import sys
sys.path.insert(0, {here!r})
from made_training import make_config
config = make_config({work_dir!r}, epochs=2, {more})
"""


@pytest.fixture
def sonde(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="sonde")

    return invoke


@pytest.fixture
def config_file(tmp_path):
    def write(more="", name="config.py"):
        path = tmp_path / name
        path.write_text(CONFIG.format(here=str(HERE), work_dir=str(tmp_path / "run"), more=more))
        return path

    return write


def test_training_prints_plain_lines_and_leaves_a_run(sonde, config_file, tmp_path):
    result = sonde("train", "--config-filepath", config_file("watch=True"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("training  step 10/10  loss") for line in lines)
    assert any(line.startswith("epoch 1 (2 of 2)  accuracy") for line in lines)
    assert lines[-1] == f"Run: sonde show {tmp_path / 'run'}"
    assert any(line.startswith("worst samples by accuracy: ") for line in lines)
    assert "\x1b" not in result.stdout
    assert sonde("show", tmp_path / "run").exit_code == 0


TOLD = """
import signal, torch
class Told(torch.nn.CrossEntropyLoss):
    calls = 0
    def forward(self, *given):
        Told.calls += 1
        if Told.calls == 4:
            signal.raise_signal({number})
        return super().forward(*given)
config["criterion"] = {{"class": Told, "args": {{}}}}
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_training_that_is_terminated_is_interrupted_and_can_be_resumed(sonde, config_file, tmp_path, number, code):
    path = config_file("watch=True")
    path.write_text(path.read_text() + TOLD.format(number=int(number)))
    assert sonde("train", "--config-filepath", path).exit_code == code
    assert open_run(tmp_path / "run").status == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    path.write_text(path.read_text().replace("calls == 4", "calls < 0"))
    assert sonde("train", "--config-filepath", path, "--resume").exit_code == 0
    assert open_run(tmp_path / "run").status == "finished"


def test_the_answer_for_programs_is_strict_json(sonde, config_file, tmp_path):
    result = sonde("train", "--config-filepath", config_file(), "--json")
    answer = json.loads(result.stdout, parse_constant=pytest.fail)
    assert answer["steps"] == 10
    assert set(answer["scores"]) == {"0", "1"}
    assert answer["best"]["epoch"] in (0, 1)
    assert answer["work_dir"] == str(tmp_path / "run")


def test_a_run_is_resumed_only_when_asked(sonde, config_file):
    path = config_file()
    assert sonde("train", "--config-filepath", path).exit_code == 0
    again = sonde("train", "--config-filepath", path)
    assert again.exit_code == 2
    assert again.stderr.startswith("error: ")
    assert "Resume it (--resume" in again.stderr
    resumed = sonde("train", "--config-filepath", path, "--resume")
    assert resumed.exit_code == 0
    assert "training  step" not in resumed.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("optimizer=None", "error: The config lacks 'optimizer'; it has work_dir, epochs"),
        (
            "checkpoint_metod=3",
            "error: The config has 'checkpoint_metod', which nothing reads (nearest: checkpoint_method).",
        ),
        (
            "model={'class': 'torch.nn.Linnear', 'args': {}}",
            "error: Cannot import 'torch.nn.Linnear': torch.nn has no Linn",
        ),
    ],
)
def test_mistakes_get_one_line_with_the_cure(sonde, config_file, more, message):
    result = sonde("train", "--config-filepath", config_file(more))
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_missing_config_is_named(sonde, tmp_path):
    for verb in ("train", "eval"):
        assert "There is no config file" in sonde(verb, "--config-filepath", tmp_path / "none.py").stderr
        assert "Missing option '--config-filepath'" in sonde(verb).stderr
        shown = sonde(verb, "--help").stdout
        assert "--config-filepath FILE" in shown
        assert "--json" in shown
        assert "examples" in shown


def test_work_dir_and_checkpoint_can_be_given_on_the_command_line(sonde, config_file, tmp_path):
    assert sonde("train", "--config-filepath", config_file(), "--work-dir", tmp_path / "other").exit_code == 0
    path = config_file(name="evaluate.py")
    path.write_text(
        path.read_text()
        + "config = {key: config[key] for key in ('work_dir', 'model', 'metric', 'watch')}\n"
        + "from made_training import Points\nconfig['eval_dataset'] = {'class': Points, 'args': {'count': 9}}\n"
    )
    checkpoint = tmp_path / "other" / "checkpoint_best.pt"
    result = sonde("eval", "--config-filepath", path, "--checkpoint", checkpoint, "--work-dir", tmp_path / "evaluated")
    assert result.exit_code == 0, result.output
    assert "9 samples  accuracy" in result.stdout
    assert "evaluating  step 1/1" in result.stdout
    arguments = ("eval", "--config-filepath", path, "--work-dir", tmp_path / "evaluated")
    assert "holds an evaluation already" in sonde(*arguments).stderr
    answer = json.loads(sonde(*arguments, "--overwrite", "--json").stdout, parse_constant=pytest.fail)
    assert set(answer["scores"]) == {"accuracy", "loss"}
    assert len(answer["worst"]) == 5
    assert "There is no checkpoint" in sonde(*arguments, "--overwrite", "--checkpoint", "none.pt").stderr


def test_a_terminal_gets_a_bar(config_file):
    path = config_file()
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "sonde", "train", "--config-filepath", str(path)]
    process = subprocess.Popen(
        command, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # what Linux answers when the other end is gone
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(PATIENCE_S) == 0
    assert b"step 10/10" in shown
    assert b"\x1b[" in shown


def test_the_example_configs_run(sonde, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("digits_")]:
        monkeypatch.delitem(sys.modules, name)
    trained = sonde("train", "--config-filepath", EXAMPLES / "digits_config.py", "--json")
    assert trained.exit_code == 0, trained.output
    answer = json.loads(trained.stdout)
    assert answer["scores"]["5"]["accuracy"] > 0.95
    captured = load_debug_outputs("runs/digits_training/epoch_2/debugger")
    assert len(captured) == 297
    one = captured[next(iter(captured))]
    assert set(one) == {"features", "statistics", "where_it_looks"}
    assert len(load_debug_outputs("runs/digits_training/epoch_5/samples")) == 100
    evaluated = sonde("eval", "--config-filepath", EXAMPLES / "digits_eval_config.py", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    best = answer["scores"][str(answer["best"]["epoch"])]
    assert json.loads(evaluated.stdout)["scores"] == pytest.approx(best)
    assert len(load_debug_outputs("runs/digits_evaluation/debugger")) == 25
    by_yaml = sonde("train", "--config-filepath", EXAMPLES / "digits_config.yaml", "--json")
    assert by_yaml.exit_code == 0, by_yaml.output
    assert json.loads(by_yaml.stdout)["best"]["score"] > 0.9
