"""Which rank a process is, and how ranks come to write one run."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from tests.waiting import PATIENCE_S

import sonde
from sonde.parallel.ranks import Identity, identity
from sonde.store.shared_names import choose_folder

VARIABLES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "NNODES",
    "NUM_NODES",
    "GROUP_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NNODES",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
]


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Identity()),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            Identity(rank=3, world=4, local_rank=1, source="RANK"),
        ),
        (  # Lightning's child on one machine
            {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"},
            Identity(rank=1, world=2, local_rank=1, source="LOCAL_RANK"),
        ),
        (
            {"LOCAL_RANK": "1", "NODE_RANK": "2", "WORLD_SIZE": "12", "NNODES": "3"},
            Identity(rank=9, world=12, local_rank=1, source="LOCAL_RANK"),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"},
            Identity(rank=5, world=8, local_rank=1, source="SLURM_PROCID"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"},
            Identity(rank=2, world=3, source="OMPI_COMM_WORLD_RANK"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Identity(rank=1, world=2, source="PMI_RANK")),
        ({"LOCAL_RANK": "1"}, Identity()),  # left over: nothing says that there are several processes
        ({"RANK": "first"}, Identity()),
        ({"WORLD_SIZE": "4"}, Identity(is_known=False)),
        (
            {"LOCAL_RANK": "1", "NODE_RANK": "2", "WORLD_SIZE": "12"},
            Identity(world=12, local_rank=1, is_known=False),
        ),
    ],
)
def test_the_launchers_variables_name_the_rank(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert identity() == expected


def record(run, number):
    with sonde.open_session(run=run) as session:
        session.log(loss=float(number))
        session.step()
        return session.path


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_of_a_launch_share_a_number_and_the_next_launch_gets_the_next(tmp_path, monkeypatch, order):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for launch in (1, 2):
        for rank in order:
            monkeypatch.setenv("RANK", str(rank))
            assert record(tmp_path / "mlp-*", rank) == tmp_path / f"mlp-{launch}"
        run = sonde.open_run(tmp_path / f"mlp-{launch}")
        assert run.ranks == [0, 1, 2]
        assert "rank" not in run.header.environment, "rank 0 describes the run, whoever came first"
    assert [run.name for run in sonde.list_runs(tmp_path)] == ["mlp-2", "mlp-1"]


def test_ranks_that_open_at_the_same_time_share_a_number(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    begin = context.Event()

    def choose(rank):
        begin.wait(PATIENCE_S)
        results.put(choose_folder(tmp_path / "mlp-*", rank=rank, world=8).name)

    processes = [context.Process(target=choose, args=(rank,), daemon=True) for rank in range(8)]
    for process in processes:
        process.start()
    begin.set()
    assert {results.get(timeout=PATIENCE_S) for _ in processes} == {"mlp-1"}
    for process in processes:
        process.join(PATIENCE_S)


def test_a_rank_joins_a_run_whose_folder_another_is_just_making(tmp_path):
    first = choose_folder(tmp_path / "mlp-*", rank=1, world=2)
    (first / "telemetry" / "r00001").mkdir(parents=True)  # its writer has not signed yet
    assert choose_folder(tmp_path / "mlp-*", rank=0, world=2) == first


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_rank_that_the_first_one_starts_joins_its_run(tmp_path, monkeypatch):
    with sonde.open_session(run=tmp_path / "mlp-*") as session:
        session.log(loss=1.0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ |= {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
                code = int(record(tmp_path / "mlp-*", 1) != tmp_path / "mlp-1")
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert sonde.open_run(tmp_path / "mlp-1").ranks == [0, 1]


def test_a_process_without_a_rank_among_several_gets_a_folder_of_its_own(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = record(tmp_path / "mlp", 0)
    assert path.name.startswith("mlp-")
    assert str(os.getpid()) in path.name
    assert "nothing names the rank" in caplog.text
    assert sonde.open_run(path).ranks == [0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_spawned_processes_that_are_not_connected_yet_do_not_end_each_other(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with sonde.open_session(run=tmp_path / "mlp") as session:
        process = context.Process(target=lambda: results.put(record(tmp_path / "mlp", 1).name), daemon=True)
        process.start()
        assert str(process.pid) in results.get(timeout=PATIENCE_S)
        process.join(PATIENCE_S)
        session.log(loss=0.0)


def test_a_rank_that_cannot_write_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "mlp").write_text("in the way")
    with sonde.open_session(run=tmp_path / "mlp") as session:
        session.log(loss=1.0)
    assert "rank 1 is not recorded" in caplog.text
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(sonde.RunError, match="in the way"):
        sonde.open_session(run=tmp_path / "mlp")


def test_a_run_that_only_another_rank_records_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    run = sonde.open_run(record(tmp_path / "mlp", 3))
    assert run.series("loss:scalar", "value").values.tolist() == [3.0]
