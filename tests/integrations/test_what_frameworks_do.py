"""Each framework, with one line of Sonde: plain, accumulating, in mixed precision, resumed, with two ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.integrations.programs import PER_EPOCH, PROGRAMS, How
from tests.waiting import run_to_end

import sonde

pytestmark = [pytest.mark.filterwarnings("ignore")]
HERE = Path(__file__).parent
NEEDED = {"transformers": ["transformers", "accelerate"], "ignite": ["ignite"], "lightning": ["lightning"]}
LOSS = {"accelerate": "train_loss:scalar"}
VALIDATION = {"transformers": "eval/loss", "ignite": "validation/loss"}


@pytest.fixture(params=PROGRAMS)
def framework(request):
    for package in NEEDED.get(request.param, [request.param]):
        pytest.importorskip(package)
    return request.param


def check(run, framework, losses, *, steps, epochs, accumulate=1):
    """Check steps, losses, epochs and metrics of a run against what the program computed itself."""
    assert run.status == "finished"
    assert run.steps.tolist() == list(range(steps + 1))
    parts = [losses[at : at + accumulate] for at in range(0, len(losses), accumulate)]
    means = [sum(part) / len(part) for part in parts]
    recorded = run.series(LOSS.get(framework, "loss:scalar"), "value").values.tolist()
    assert recorded == pytest.approx(means[-len(recorded) :], rel=1e-5)
    assert len(recorded) == steps
    per_epoch = PER_EPOCH // accumulate
    validation = run.series(f"{VALIDATION.get(framework, 'val_loss')}:scalar", "value")
    assert validation.steps.tolist() == [per_epoch * (epoch + 1) for epoch in range(epochs)]
    if framework != "accelerate":  # which does not know of epochs
        begun = {event.data["epoch"]: event.step for event in run.events if event.event_type == "epoch"}
        assert begun == {epoch: per_epoch * epoch + 1 for epoch in range(epochs)}
    assert [event.message for event in run.events if event.event_type == "fault"] == []
    assert [each.kind for each in sonde.diagnose(run).findings if each.severity != "info"] == []


@pytest.mark.parametrize(
    "how",
    [{}, {"accumulate": 2}, {"precision": "bf16"}, {"precision": "fp16"}],
    ids=["plain", "accumulating", "bf16", "fp16"],
)
def test_training_is_bit_identical_and_steps_losses_epochs_and_metrics_are_right(framework, how, tmp_path):
    bare = PROGRAMS[framework](tmp_path / "bare", How(**how))
    trained = PROGRAMS[framework](tmp_path / "recorded", How(run=str(tmp_path / "run"), **how))
    assert (trained.hash, trained.losses) == (bare.hash, bare.losses)
    accumulate = how.get("accumulate", 1)
    steps = 2 * PER_EPOCH // accumulate
    check(sonde.open_run(tmp_path / "run"), framework, bare.losses, steps=steps, epochs=2, accumulate=accumulate)


def test_a_resumed_training_continues_its_run_and_keeps_what_was_logged_before(framework, tmp_path):
    hashes = []
    for run in ("", str(tmp_path / "run")):
        folder = tmp_path / f"kept{len(hashes)}"
        folder.mkdir()
        first = PROGRAMS[framework](folder, How(run=run, epochs=1, checkpoint=True, accumulate=2))
        trained = PROGRAMS[framework](folder, How(run=run, epochs=2, resume=True, accumulate=2))
        hashes.append(trained.hash)
    assert hashes[0] == hashes[1]
    losses = first.losses + trained.losses
    check(sonde.open_run(tmp_path / "run"), framework, losses, steps=PER_EPOCH, epochs=2, accumulate=2)


@pytest.mark.skipif(bool(os.environ.get("CI")), reason="starts four processes; see make test-frameworks")
def test_two_ranks_write_one_run_and_train_as_without_it(framework, tmp_path):
    for name, how in (("bare", {}), ("recorded", {"run": str(tmp_path / "run")})):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HERE / "programs.py"]
        ended = run_to_end(
            [sys.executable, *command, framework, tmp_path, json.dumps(how), name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    read = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    for rank in range(2):
        assert read[f"recorded-{rank}"] == read[f"bare-{rank}"]
    run = sonde.open_run(tmp_path / "run")
    assert len(list((tmp_path / "run" / "telemetry").glob("r0000?"))) == 2
    assert run.steps.tolist() == list(range(2 * PER_EPOCH + 1))
    assert run.status == "finished"
    for rank in range(2):
        # Accelerate logs on the first rank only: elsewhere the loss is what backward was called on.
        name = "loss:scalar" if framework == "accelerate" and rank else LOSS.get(framework, "loss:scalar")
        found = run.series(name, "value", rank=rank).values.tolist()
        assert found == pytest.approx(read[f"bare-{rank}"]["losses"], rel=1e-5)
    assert [each.kind for each in sonde.diagnose(run).findings if each.severity != "info"] == []
