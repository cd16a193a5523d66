"""`sonde run`: a script that does not know of Sonde is recorded, and behaves as without."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.cli.forks import forks
from tests.waiting import run_to_end

import sonde
from sonde.cli.run import _read_settings
from sonde.errors import OptionError

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def fork():
    with forks() as run:
        yield run


@pytest.fixture
def both(fork, tmp_path):
    """Return a function that runs a script without and with Sonde, and checks that it does not notice."""

    def run(script, *arguments):
        (bare,) = fork(tmp_path, SCRIPTS / script, *arguments)
        (recorded,) = fork(tmp_path, "sonde", "run", SCRIPTS / script, *arguments)
        assert (recorded.code, recorded.out) == (bare.code, bare.out), recorded.err
        return bare, recorded, sorted(tmp_path.glob("runs/*"))

    return run


def python(folder, *arguments, text=""):
    """Run Python in a process of its own, as a user's shell would."""
    environment = {"PYTHONPATH": str(SOURCE), "LC_ALL": "C.UTF-8"}
    return run_to_end([sys.executable, *arguments], cwd=folder, env=environment, input=text, text=True)


# ---------------------------------------------------------------------- the script notices nothing


@pytest.mark.parametrize("how", [["facts.py"], ["-m", "package.facts"], ["folder"]])
def test_a_script_is_started_as_python_starts_it(tmp_path, how):
    (tmp_path / "package").mkdir()
    (tmp_path / "folder").mkdir()
    for place in ("facts.py", "package/facts.py", "folder/__main__.py"):
        shutil.copy(SCRIPTS / "facts.py", tmp_path / place)
    bare = python(tmp_path, *how, "--lr", "1e-3", "--help", text="what comes in")
    ours = python(tmp_path, "-m", "sonde", "run", *how, "--lr", "1e-3", "--help", text="what comes in")
    assert "what comes in" in bare.stdout
    assert ours.stdout == bare.stdout
    assert ours.returncode == bare.returncode == 1
    *trace, last = ours.stderr.splitlines()
    assert trace == bare.stderr.splitlines()
    assert "ValueError: second" in trace
    assert last.startswith("sonde: nothing of ")
    assert last.endswith(": it did not import torch")


@pytest.mark.parametrize(
    ("line", "code"), [("sys.exit(7)", 7), ("sys.exit('words')", 1), ("os.kill(os.getpid(), signal.SIGINT)", -2)]
)
def test_the_exit_code_is_that_of_the_script(tmp_path, line, code):
    (tmp_path / "script.py").write_text(f"import os, signal, sys\n{line}\n")
    ours = python(tmp_path, "-m", "sonde", "run", "script.py")
    assert ours.returncode == code
    assert 'File "<frozen runpy>' not in ours.stderr
    assert ("words" in ours.stderr) == ("words" in line)


# ---------------------------------------------------------------------- the training is recorded


def test_a_script_with_arguments_is_recorded_whole(both):
    _, recorded, runs = both("accumulating_gpt.py", "--lr", "3e-3")
    run = sonde.open_run(runs[0])
    assert [each.name for each in runs] == ["accumulating_gpt-1"]
    assert run.steps.tolist() == list(range(21)), "the state before the first step, and every step"
    assert run.header.model["name"] == "GPT"
    assert run.series("h.0.attn.weight:gradient", "norm").steps[0] == 1
    assert run.header.environment["argv"][1:] == ["--lr", "3e-3"]
    assert "20 steps recorded in runs/accumulating_gpt-1" in recorded.err


def test_what_was_found_is_printed_at_the_end(both):
    _, recorded, runs = both("readme_loop.py")
    assert [each.name for each in runs] == ["readme_loop-1"]
    assert "20 steps recorded in runs/readme_loop-1, 1 finding" in recorded.err
    assert "CRITICAL" in recorded.err
    assert "Call optimizer.zero_grad() once per step" in recorded.err


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_script_that_trains_with_a_framework_is_recorded(both, framework):
    pytest.importorskip(framework)
    if framework == "transformers":
        pytest.importorskip("accelerate")
    script, steps = {"transformers": ("with_trainer.py", 12), "lightning": ("with_lightning.py", 12)}[framework]
    _, recorded, (path,) = both(script)
    run = sonde.open_run(path)
    assert run.steps.tolist() == list(range(steps + 1))
    assert run.series("loss").steps.tolist() == list(range(1, steps + 1))
    assert run.status == "finished"
    assert "12 steps recorded" in recorded.err
    assert "no findings" in recorded.err


def test_models_are_named_by_the_variables_that_hold_them(both):
    _, _, runs = both("adversarial.py")
    (run,) = map(sonde.open_run, runs)
    assert {site.name.partition(".")[0] for site in run.sites if site.quantity == "gradient"} == {"netD", "netG"}
    assert run.steps[-1] == 10
    assert {run.series(f"{name}.0.weight:gradient", "norm").steps[0] for name in ("netD", "netG")} == {1}


def test_only_what_is_trained_is_watched(both):
    _, _, runs = both("q_learning.py")
    (run,) = map(sonde.open_run, runs)
    names = {each["name"] for each in run.header.model["parameters"]}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert run.steps[-1] == 20


def test_a_script_that_continues_from_a_checkpoint_counts_on(fork, tmp_path):
    ended = [fork(tmp_path, "sonde", "run", SCRIPTS / "continued.py")[0] for _ in range(2)]
    again = ("--run", "runs/continued-2", "-o", "resume=true")
    ended += fork(tmp_path, "sonde", "run", *again, SCRIPTS / "continued.py")
    assert [each.code for each in ended] == [0, 0, 0], ended[-1].err
    first, second = (sonde.open_run(tmp_path / "runs" / f"continued-{number}") for number in (1, 2))
    assert first.steps.tolist() == [0, 1, 2, 3]
    assert second.steps.tolist() == [3, 4, 5, 6, 7, 8, 9], "the state of the checkpoint, then three steps twice"
    assert second.series("loss").steps.tolist() == [4, 5, 6, 7, 8, 9]
    assert "3 steps recorded in runs/continued-1, " in ended[0].err
    assert "3 steps recorded in runs/continued-2 after step 3, " in ended[1].err
    assert "3 steps recorded in runs/continued-2 after step 6, " in ended[2].err
    assert "no findings" in ended[2].err


def test_each_training_of_a_script_gets_a_run(both):
    _, _, runs = both("folds.py")
    assert [each.name for each in runs] == ["folds-1", "folds-2", "folds-3"]
    for run in map(sonde.open_run, runs):
        assert run.steps.tolist() == [0, 1, 2, 3]
        assert run.status == "finished"


def test_a_loop_without_an_optimizer_is_recorded_from_its_first_update_on(both):
    bare, recorded, runs = both("by_hand.py")
    (run,) = map(sonde.open_run, runs)
    assert run.steps.tolist() == list(range(1, 9)), "the state after the first update, and every further one"
    logged = [float(line) for line in bare.out.splitlines()[:8]]
    assert run.series("loss").values.tolist() == pytest.approx(logged[1:])
    assert "8 steps recorded" in recorded.err


@pytest.mark.parametrize(
    ("how", "code", "status"), [("raise", 1, "failed"), ("interrupt", -2, "interrupted"), ("3", 3, "failed")]
)
def test_a_training_that_ends_badly_is_kept(both, how, code, status):
    bare, recorded, runs = both("ends_badly.py", how)
    assert recorded.code == code
    run = sonde.open_run(runs[0])
    assert run.status == status
    assert run.steps[-1] == 5
    assert str(SOURCE) not in recorded.err, "no frame of Sonde's in the traceback"
    if how == "raise":
        assert recorded.err.startswith("Traceback (most recent call last):\n")
        assert bare.err.splitlines()[-1] in recorded.err
        assert 'ends_badly.py", line 17, in <module>' in recorded.err


def test_a_script_that_records_itself_is_left_alone(fork, tmp_path):
    (recorded,) = fork(tmp_path, "sonde", "run", SCRIPTS / "own_session.py")
    assert recorded.code == 0, recorded.err
    assert [each.name for each in tmp_path.glob("runs/*")] == ["mine"]
    assert "nothing of own_session was recorded: it has a session of its own" in recorded.err


def test_the_ranks_of_a_training_write_one_run(fork, tmp_path):
    def ranks(meeting):
        shared = {"WORLD_SIZE": "2", "MEETING": f"file://{tmp_path}/{meeting}"}
        return [{"RANK": str(rank), **shared} for rank in range(2)]

    bare = fork(tmp_path, SCRIPTS / "two_ranks.py", ranks=ranks("first"))
    recorded = fork(tmp_path, "sonde", "run", SCRIPTS / "two_ranks.py", ranks=ranks("second"))
    assert [each.out for each in recorded] == [each.out for each in bare]
    assert [each.code for each in recorded] == [0, 0], recorded[0].err
    (path,) = tmp_path.glob("runs/[!.]*")  # beside the notes by which ranks find each other
    assert len(list(path.glob("telemetry/r0000?"))) == 2
    assert "6 steps recorded" in recorded[0].err
    assert "sonde" not in recorded[1].err


@pytest.mark.skipif(bool(os.environ.get("CI")), reason="starts six processes; see make test-frameworks")
def test_torchrun_starts_ranks_that_write_one_run(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    bare = python(tmp_path, *launch, SCRIPTS / "two_ranks.py")
    ended = python(tmp_path, *launch, "-m", "sonde", "run", SCRIPTS / "two_ranks.py")
    assert (ended.returncode, bare.returncode) == (0, 0), ended.stderr
    printed = [sorted(re.findall(r"-?\d\.\d+", each.stdout)) for each in (ended, bare)]  # ranks share lines at times
    assert printed[0] == printed[1] != []
    (path,) = tmp_path.glob("runs/[!.]*")
    assert len(list(path.glob("telemetry/r0000?"))) == 2
    assert "6 steps recorded in runs/two_ranks-1" in ended.stderr


def test_a_training_in_a_spawned_process_is_recorded(tmp_path):
    ended = python(tmp_path, "-m", "sonde", "run", SCRIPTS / "in_a_child.py")
    assert ended.returncode == 0, ended.stderr
    run = sonde.open_run(tmp_path / "runs" / "in_a_child-1")
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert run.status == "finished"
    assert "3 steps recorded in runs/in_a_child-1" in ended.stderr
    assert "was recorded in its main process: it did not import torch" in ended.stderr


def test_options_come_from_the_command_line_the_environment_and_the_project(fork, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.sonde]\nrun = "kept/*"\nevery = 5\nwhat = ["gradients"]\n')
    (ended,) = fork(tmp_path, "sonde", "run", "-o", "diagnose=no", SCRIPTS / "ends_badly.py", 0)
    assert ended.code == 0, ended.err
    run = sonde.open_run(tmp_path / "kept" / "1")
    assert run.header.config["watch"]["every"] == "every(5)"
    assert run.header.config["watch"]["what"] == ["gradients"]
    assert not any(site.quantity == "vital" for site in run.sites)
    assert _read_settings(["every=3"], {"SONDE_EVERY": "2", "SONDE_BUDGET": "none"}, tmp_path) == {
        "run": str(tmp_path / "kept" / "*"),
        "every": 3,
        "what": ["gradients"],
        "budget": None,
    }


def test_an_option_that_cannot_be_used_is_refused_before_the_script_runs(fork, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.sonde]\nevrey = 5\n")
    (ended,) = fork(tmp_path, "sonde", "run", SCRIPTS / "ends_badly.py", 0)
    assert (ended.code, ended.out) == (2, "")
    assert "[tool.sonde] has no option evrey" in ended.err
    with pytest.raises(OptionError, match="SONDE_EVERY=often: every takes a whole number"):
        _read_settings([], {"SONDE_EVERY": "often"}, Path("/"))
    with pytest.raises(OptionError, match="there is no option often"):
        _read_settings(["often=1"], {}, Path("/"))
    (ended,) = fork(tmp_path, "sonde", "run", "nowhere.py")
    assert (ended.code, ended.err) == (2, "error: There is no script nowhere.py.\n")


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(fork, tmp_path):
    (tmp_path / "runs").write_text("a file")
    (ended,) = fork(tmp_path, "sonde", "run", "--run", "runs/first", SCRIPTS / "adversarial.py")
    assert ended.code == 0
    assert float(ended.out)
    assert "nothing of adversarial was recorded: " in ended.err
