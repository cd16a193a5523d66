import logging
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import sonde
from sonde.record.describe import SAFE_VARIABLES, describe_environment
from sonde.record.printed import PrintedOutput, save_code
from sonde.store import logs
from sonde.store.logs import read_code, read_output


def train(run, prints, **options):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=run, **options) as session:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            prints(step)
    return session


def test_nothing_is_kept_unless_asked_for(tmp_path):
    train(tmp_path / "run", lambda step: print("secret"))
    assert read_output(tmp_path / "run") is None
    assert read_code(tmp_path / "run") == []


def test_what_is_printed_is_kept_with_its_step_and_reaches_the_terminal_too(tmp_path, capsys):
    before = "write" in vars(sys.stdout)

    def prints(step):
        print(f"loss {step}\nand more", end=" here\n")
        sys.stderr.write(f"10%\r50%\r100%\n{'half' if step else ''}")

    train(tmp_path / "run", prints, logs=True)
    print("after")
    kept = read_output(tmp_path / "run")
    assert [line.text for line in kept.lines if line.stream == "out"] == [
        "loss 0", "and more here", "loss 1", "and more here",
    ]  # fmt: skip
    assert [line.text for line in kept.lines if line.stream == "err"] == ["100%", "100%", "half"]
    assert {line.step for line in kept.lines if line.text == "loss 1"} == {2}
    assert capsys.readouterr().out == "loss 0\nand more here\nloss 1\nand more here\nafter\n"
    assert ("write" in vars(sys.stdout)) is before


def test_a_logger_that_held_the_stream_before_is_kept(tmp_path, capsys):
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("test_logs")
    logger.addHandler(handler)
    try:
        train(tmp_path / "run", lambda step: logger.warning("step %d", step), logs=True)
    finally:
        logger.removeHandler(handler)
    assert [line.text for line in read_output(tmp_path / "run").lines] == ["step 0", "step 1"]


def test_the_start_and_the_end_of_a_long_output_are_kept_within_bounds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "FIRST_BYTES", 2000)
    monkeypatch.setattr(logs, "LAST_BYTES", 1000)
    train(tmp_path / "run", lambda step: [print(f"line {number:04}") for number in range(500)], logs=True)
    kept = read_output(tmp_path / "run")
    assert kept.lines[0].text == "line 0000"
    assert kept.lines[-1].text == "line 0499"
    assert kept.cut is not None
    assert kept.lines[kept.cut - 1].text < "line 0100"
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "logs").glob("output*"))
    assert size <= 2000 + 2 * 1000


def test_a_disk_that_is_full_never_reaches_the_program(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PrintedOutput, "_write", refuse)
    train(tmp_path / "run", lambda step: print("on it goes"), logs=True)
    assert capsys.readouterr().out == "on it goes\n" * 2


def test_the_source_of_the_users_own_files_is_kept_and_no_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text("WIDTH = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_model")
    train(tmp_path / "run", print, logs=True)
    found = {each.path: each.text for each in read_code(tmp_path / "run")}
    assert found["my_model.py"] == "WIDTH = 8\n"
    assert not any("site-packages" in path or "/sonde/" in path for path in found)


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_VARIABLE"])
def test_only_harmless_variables_and_no_secret_arguments_are_in_the_run(monkeypatch, name):
    monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "hunter2", "--hf_token=hunter2", "--lr=0.1"])
    facts = describe_environment()
    assert "hunter2" not in str(facts)
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert set(facts["variables"]) <= set(SAFE_VARIABLES)
    assert facts["argv"][-1] == "--lr=0.1"


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_changes_that_were_not_committed_are_kept_and_bounded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    (tmp_path / "train.py").write_text("lr = 0.3\n")
    train(tmp_path / "runs", lambda step: None, logs=True)
    (changes,) = [each for each in read_code(tmp_path / "runs") if each.path == "git diff HEAD"]
    assert "-lr = 0.1\n+lr = 0.3\n" in changes.text
    (tmp_path / "train.py").write_text("x = 1\n" * 100_000)
    save_code(tmp_path / "runs")
    (changes,) = [each for each in read_code(tmp_path / "runs") if each.path == "git diff HEAD"]
    assert changes.is_cut
    assert len(changes.text) == 200 << 10


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_the_commit_is_known_in_a_second_work_tree_too(tmp_path, monkeypatch):
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q", "one"], ["-C", "one", *who, "commit", "-q", "--allow-empty", "-m", "first"],
                    ["-C", "one", "worktree", "add", "-q", "../two"]):  # fmt: skip
        subprocess.run(["git", *command], check=True, cwd=tmp_path)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path / "one", text=True).strip()
    for folder in ("one", "two"):
        monkeypatch.chdir(tmp_path / folder)
        assert describe_environment()["git_commit"] == commit
