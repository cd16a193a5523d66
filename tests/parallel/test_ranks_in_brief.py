"""Ranks that do not record in full still write a heartbeat and the times of their steps."""

from __future__ import annotations

import pytest
import torch

import sonde
from sonde.errors import OptionError
from sonde.store import layout
from sonde.store.ranks import read_beats, read_times
from sonde.testing import tiny_mlp


def train(path, monkeypatch, rank, **options):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=path, tape=False, **options) as session:
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_one_in_k_ranks_records_in_full_and_all_have_a_heartbeat(tmp_path, monkeypatch):
    weights = [train(tmp_path / "run", monkeypatch, rank, ranks=2) for rank in range(4)]
    run = sonde.open_run(tmp_path / "run")
    assert run.ranks_of(run.site("0.weight:gradient")) == [0, 2]
    assert run.ranks_of(run.site("loss:scalar")) == [0, 1, 2, 3], "what is handed in is kept"
    assert {rank: beat.state for rank, beat in read_beats(run.path).items()} == dict.fromkeys(range(4), "finished")
    assert {rank: len(times.records) for rank, times in read_times(run.path).items()} == dict.fromkeys(range(4), 5)
    sizes = [sum(file.stat().st_size for file in layout.rank_folder(run.path, rank).iterdir()) for rank in range(4)]
    assert sizes[1] < sizes[2] / 4
    assert all(torch.equal(one, two) for other in weights[1:] for one, two in zip(weights[0], other, strict=True))


def test_a_guard_acts_on_every_rank(tmp_path, monkeypatch):
    for rank in range(2):
        train(tmp_path / "run", monkeypatch, rank, ranks=2, guard="stop_late")
    run = sonde.open_run(tmp_path / "run")
    assert run.ranks_of(run.site("0.weight:gradient")) == [0, 1]
    assert run.ranks_of(run.site("0.weight:parameter")) == [0]


def test_a_wrong_choice_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    for wrong in ({"ranks": 0}, {"ranks": "every 8th"}, {"stuck_after": -1}, {"stuck_after": True}):
        with pytest.raises(OptionError):
            train(tmp_path / "run", monkeypatch, 0, **wrong)
    assert not (tmp_path / "run").exists()


def test_a_process_that_trains_alone_has_neither_heartbeat_nor_thread(tmp_path):
    import threading

    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", tape=False):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        assert not [thread for thread in threading.enumerate() if thread.name == "sonde-heartbeat"]
        assert torch.distributed.all_reduce.__module__.startswith("torch.distributed")
        assert not hasattr(torch.distributed.barrier, "__wrapped__") or "sonde" not in repr(torch.distributed.barrier)
    assert not (layout.rank_folder(tmp_path / "run", 0) / "beat.json").exists()
