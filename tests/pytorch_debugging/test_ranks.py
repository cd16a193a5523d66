"""A debugger and a training logger in each rank, over one folder: nobody's files take the place of another's."""

from __future__ import annotations

import json

import pytest
import torch

import sonde
from sonde.errors import OptionError
from sonde.pytorch_debugging import create_enhanced_training_optimizer, load_training_logs
from sonde.training.checkpoints import LATEST, load_checkpoint

IMPORTS = "from sonde.pytorch_debugging import TrainingLogger, debug_training_session"
RANKS = """
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flags = {"enable_anomaly_detection": False, "enable_memory_tracking": False, "log_dir": folder}
with TrainingLogger(folder, "both", enable_console_logging=False) as log, log.training_context():
    with debug_training_session(model, log, **flags) as debugger:
        dist.barrier()
        for _ in range(2 + rank):
            inputs, targets = torch.full((3, 4), 1.0 + rank), torch.zeros(3, 2)
            wrapped = model if debugger.losses.total < 2 else model.module
            debugger.debug_training_step(wrapped, inputs, targets, nn.functional.mse_loss, optimizer)
        dist.barrier()  # both write their reports in the same second
"""


def test_ranks_keep_their_reports_runs_and_logs_apart(run_two_ranks, tmp_path):
    folder = tmp_path / "out"
    run_two_ranks(IMPORTS, RANKS, folder)
    reports = {path.stem.endswith("_rank1"): json.loads(path.read_text()) for path in folder.glob("debug_report_*")}
    assert {report["rank"]: report["performance"]["loss"]["count"] for report in reports.values()} == {0: 2, 1: 3}
    assert all(set(report["parameters"]["parameter_ranges"]) == {"weight", "bias"} for report in reports.values())
    runs = {report["rank"]: sonde.open_run(report["run"]) for report in reports.values()}
    assert [runs[rank].steps.tolist()[-1] for rank in (0, 1)] == [2, 3]
    assert runs[0].path != runs[1].path
    for name, rank in (("both", 0), ("both_rank1", 1)):
        logs = load_training_logs(folder, name)
        assert logs["report"]["rank"] == rank
        events = [event["event_type"] for event in logs["events"]]
        assert (events.count("training_start"), events.count("training_end")) == (1, 1)


TRAINING_IMPORTS = "import glob, time\nfrom sonde.pytorch_debugging import create_enhanced_training_optimizer"
TRAINING = """
targets = torch.arange(8) % 3
batches = [(torch.randn(8, 4) + rank, targets) for _ in range(3)]
time.strftime = lambda *_: f"training-{rank}"  # the clocks of two ranks
for parent, name in (("clock", None), ("named", "mine")):
    where = f"{folder}/{parent}"
    options = {"log_dir": where + "/logs", "checkpoint_dir": where + "/runs", "log_level": "ERROR"}
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    while rank and not glob.glob(where + "/runs/*/run.json"):
        time.sleep(0.01)  # until the first rank has begun
    for epochs in (1, 2):
        training = create_enhanced_training_optimizer(
            model, batches, batches, experiment_name=name, max_epochs=epochs, **options)
        assert training.train(resume_from=epochs == 2)["steps"] == 3 * epochs, rank
        training.cleanup()
        name = training.experiment_name
"""


def test_ranks_of_a_training_write_one_run_and_keep_their_checkpoints_apart(run_two_ranks, tmp_path):
    folder = tmp_path / "out"
    run_two_ranks(TRAINING_IMPORTS, TRAINING, folder)
    for parent in ("clock", "named"):
        (path,) = (folder / parent / "runs").iterdir()
        run = sonde.open_run(path)
        assert run.ranks == [0, 1]
        assert [int(run.series("weight:gradient", "norm", rank=rank).steps[-1]) for rank in (0, 1)] == [6, 6]
        assert sonde.verify(path).ok
        for own in (path, path / "rank1"):
            assert (own / "epoch_1" / "validation_scores.json").is_file()
            assert load_checkpoint(own / LATEST)["step"] == 6
        names = {each.name for each in (folder / parent / "logs").glob("*_report.json")}
        assert names == {f"{path.name}_report.json", f"{path.name}_rank1_report.json"}


def test_ranks_that_cannot_agree_on_a_name_are_asked_to_give_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(OptionError, match=r"experiment_name is missing, and 2 processes.*init_process_group before"):
        create_enhanced_training_optimizer(torch.nn.Linear(4, 3), [(torch.zeros(2, 4), torch.zeros(2))])
