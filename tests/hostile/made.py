"""A small run that has every kind of file a run can have."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
from tests.parallel.made_ranks import write_beat
from tests.store.making import HEADER

from sonde.core import heartbeat
from sonde.core.step_times import StepTimesFile
from sonde.records import Event, Finding
from sonde.store import BatchValue, PageWriter, RunWriter, layout, open_run, timeline, verify

SAMPLES = ("plain", "7", 7, "good", "better", "best")
SCORES = {
    "aggregated": {"loss": 0.5, "parts": [0.1, 0.2]},
    "per_datapoint": {"loss": ["nan", 0.8, 0.9, 0.3, 0.2, 0.1], "parts": [[0, 1], [1, 0], *[[0.5, 0.5]] * 4]},
    "ids": list(SAMPLES),
    "directions": {"loss": -1, "parts": 1},
}
FINDING = Finding(
    kind="vanishing_gradient",
    severity="warning",
    step=3,
    last_step=9,
    sites=("0.weight",),
    cause="a cause",
    fix="a fix",
)
COLLECTIVES = {"entries": [{"profiling_name": "all_reduce", "collective_seq_id": 3, "process_group": ["0", "world"]}]}


def write_everything(run: Path) -> Path:
    """Train two ranks of a tiny network and add what trainings with captures, profiles and failures leave."""
    import torch
    from torch import nn

    import sonde

    torch.manual_seed(0)
    for rank in (1, 0):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde.watch(model, optimizer, run=run, rank=rank, on_error="raise", logs=True) as session:
            for step in range(12):
                loss = nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 2)
                if step == 5 and rank == 0:
                    session.save_bundle("by hand")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            session.event("note", "a note", data={"answer": 42})
    _add_rank_files(run)
    _add_samples(run)
    _add_traces(run)
    for rank in (1, 0):  # so that the list of what the run holds names the files above
        RunWriter(run, HEADER, rank=rank, resume=True).close()
    assert open_run(run).problems == []
    assert verify(run).ok
    return run


def _add_rank_files(run: Path) -> None:
    for rank in (0, 1):
        folder = layout.rank_folder(run, rank)
        write_beat(run, rank, phase="communication", since=90, collective="all_reduce", collectives=7, stacks=True)
        (folder / heartbeat.STACKS).write_text("Thread 1: in load\n")
        (folder / heartbeat.COLLECTIVES).write_text(json.dumps(COLLECTIVES))
        times = StepTimesFile(folder)
        times.append([(step, 0.0, {"data_wait": 0.01, "forward": 0.02}) for step in range(1, 13)])
        times.close()
        with layout.findings_file(run, rank).open("ab") as file:
            file.write(timeline.encode_finding(FINDING))
        with layout.events_file(run, rank).open("ab") as file:
            file.write(timeline.encode_event(Event(event_type="fault", message="it failed", step=4, timestamp=5.0)))


def _add_samples(run: Path) -> None:
    epoch = run / "epoch_0"
    epoch.mkdir(exist_ok=True)
    (epoch / layout.VALIDATION_SCORES).write_text(json.dumps(SCORES))
    (run / layout.EVALUATION_SCORES).write_text(json.dumps(SCORES))
    (epoch / "checkpoint.pt").write_bytes(b"weights")
    random = np.random.default_rng(0)
    for part in (layout.KEPT, layout.CAPTURES):
        with PageWriter(epoch / part, page_bytes=3000) as pages:
            for name in SAMPLES:
                outputs = {
                    "inputs": random.uniform(size=(1, 6, 6)).astype(np.float32),
                    "labels": "cat",
                    "tokens": ["the", "cat"],
                    "outputs": random.normal(size=10),
                    "batch": BatchValue(np.arange(6.0).reshape(2, 3), (7, "7")),
                }
                pages.add(name, {"mine": outputs, "mask": np.arange(16).reshape(4, 4)}, info={"score": 0.5})


def _add_traces(run: Path) -> None:
    (run / "traces").mkdir(exist_ok=True)
    events = [{"name": f"op{n}", "cat": "cpu_op", "ts": n, "dur": 1.5, "pid": 1, "tid": 1} for n in range(20)]
    trace = json.dumps({"schemaVersion": 1, "traceEvents": events})
    (run / "traces" / "one.json").write_text(trace)
    (run / "traces" / "two.json.gz").write_bytes(gzip.compress(trace.encode()))


def with_open_files(run: Path, target: Path) -> Path:
    """Copy a run as a crash leaves it: journals and pages are open, and writers still call themselves live."""
    from tests.store.making import write_run

    shutil.copytree(run, target)
    folder = layout.rank_folder(target, 0)
    write_run(target, range(100, 110), 3, close=False, resume=True)
    pages = PageWriter(target / "epoch_0" / layout.CAPTURES, page_bytes=1 << 20, resume=True)
    pages.add(99, {"mine": np.arange(5)})
    for path in (folder / layout.WRITER, target / "epoch_0" / layout.CAPTURES / layout.WRITER):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 + 5}))
    return target
