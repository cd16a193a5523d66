"""A debugger and a training logger in each rank, over one folder: nobody's files take the place of another's."""

from __future__ import annotations

import json

from tests.two_ranks import run_two_ranks

import sonde
from sonde.pytorch_debugging import load_training_logs

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


def test_ranks_keep_their_reports_runs_and_logs_apart(tmp_path):
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
