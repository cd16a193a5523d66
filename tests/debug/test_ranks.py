"""Debug sessions of a distributed training: one run of all ranks, a report of each."""

from __future__ import annotations

import json

import sonde
from sonde.debug import DebugConfig, debug_session

IMPORTS = "from sonde.debug import DebugConfig, HookAction, HookBuilder, HookTrigger, debug_session"
RANKS = """
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hook = HookBuilder("keep").trigger(HookTrigger.EveryForward).action(HookAction.SaveSnapshot())
hook = hook.layer_patterns(["glob:(model)"]).max_executions(1).build()
for again in range(2):
    with debug_session(model, optimizer, DebugConfig(output_dir=folder)) as session:
        session.hooks.register(hook)
        for _ in range(2 + rank):
            optimizer.zero_grad()
            (model.module if rank and session.step == 2 else model)(torch.full((3, 4), 1.0 + rank)).sum().backward()
            optimizer.step()
    if rank == 0:
        with debug_session(config=DebugConfig(output_dir=folder + "/alone")) as alone:
            alone.log(loss=1.0)  # though the other rank has no such session
"""


def test_ranks_share_a_run_and_each_has_a_report_of_its_own(run_two_ranks, tmp_path):
    folder = tmp_path / "out"
    run_two_ranks(IMPORTS, RANKS, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["alone", "session-1", "session-2"]
    for name in ("session-1", "session-2"):
        run = sonde.open_run(folder / name)
        assert run.ranks == [0, 1]
        assert [run.series("weight:gradient", "norm", rank=rank).steps.tolist() for rank in (0, 1)] == [
            [1, 2],
            [1, 2, 3],
        ]
        assert sonde.verify(run.path).ok
        reports = [
            json.loads((run.path / each).read_text()) for each in ("debug_report.json", "debug_report_rank1.json")
        ]
        assert [(report["rank"], report["steps"]) for report in reports] == [(0, 2), (1, 3)]
        snapshots = sorted(path.name for path in (run.path / "snapshots").iterdir())
        assert snapshots == ["model-step1-1-rank1.safetensors", "model-step1-1.safetensors"]


def test_ranks_that_are_not_connected_yet_write_runs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        with debug_session(config=DebugConfig(output_dir=tmp_path)) as session:
            session.log(loss=float(rank))
        assert session.report.rank == rank
    for rank in (0, 1):
        run = sonde.open_run(tmp_path / f"session-1-rank{rank}")
        assert run.series("loss:scalar", "mean").values.tolist() == [rank]
