"""Loader workers, forks and program ends: only the process that opened a run writes it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.session.endings import ending_of
from tests.waiting import PATIENCE_S, ask, started
from torch.utils.data import DataLoader, Dataset

import sonde
from sonde.testing import tiny_mlp


class Squares(Dataset):
    """Uses a small network of its own to make samples, as augmentation code may."""

    def __init__(self):
        self.net = torch.nn.Linear(8, 8)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        with torch.no_grad():
            return self.net(torch.full((8,), float(index)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])  # who is spawned imports torch anew
def test_loader_workers_neither_record_nor_disturb(tmp_path, start, workers):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = Squares()
    with sonde.watch({"model": model, "data": data.net}, optimizer, run=tmp_path / "run", on_error="raise") as session:
        loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=start)
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    run = sonde.open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(7))
    assert not any(site.key.startswith("data:output") for site in run.sites), "that forward ran in the workers"
    assert sonde.verify(tmp_path / "run").ok


def test_a_forked_child_lets_go_of_the_session(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        child = os.fork()
        if child == 0:
            from sonde.testing import assert_no_taps

            code = 1
            try:
                assert_no_taps(model)
                session.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
    run = sonde.open_run(tmp_path / "run")
    assert run.status == "finished"
    assert run.steps.tolist() == [0, 1, 2]


IMPORTS = "import sonde; from sonde.testing import tiny_mlp"
RANKED = """
model = torch.nn.parallel.DistributedDataParallel(tiny_mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with sonde.watch(model, optimizer, run=folder, on_error="raise") as session:
    for _ in range(3):
        loss = model(torch.full((4, 8), float(rank))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
"""


def test_ranks_of_a_distributed_run_write_their_own_folders_and_are_read_as_one(run_two_ranks, tmp_path):
    run_two_ranks(IMPORTS, RANKED, tmp_path / "run")
    run = sonde.open_run(tmp_path / "run")
    assert run.ranks == [0, 1]
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert not any("module" in site.key for site in run.sites)
    both, first = (run.series("0:output", "count", rank=rank).values for rank in (None, 0))
    assert both.tolist() == [2 * count for count in first.tolist()]
    one, two = (run.series("0.weight:gradient", "norm", rank=rank).values for rank in (0, 1))
    assert one.tolist() == two.tolist(), "gradients are averaged over ranks"
    assert sonde.verify(tmp_path / "run").ok


ENDINGS = """
import os, sys, torch, torch._dynamo, sonde
torch.set_num_threads(1)
child = os.fork()  # both programs from one import of torch, and of what its optimizers import
if child:
    os.waitpid(child, 0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = sonde.watch(model, optimizer, run=sys.argv[1 if child else 2])
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward(); optimizer.step()
if child:
    raise ValueError("planted")
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run two programs to their end: one dies of an exception, one just stops without closing its session."""
    folder = tmp_path_factory.mktemp("ended")
    command = [sys.executable, "-c", ENDINGS, str(folder / "dies"), str(folder / "forgets")]
    return folder, subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_program_that_forgets_to_close_still_ends_its_run(ended):
    run = sonde.open_run(ended[0] / "forgets")
    assert (run.status, run.steps.tolist()) == ("finished", [0, 1, 2, 3])


def test_a_program_that_dies_of_an_exception_leaves_a_failed_run(ended):
    folder, done = ended
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count("planted") == 1  # the other program ended without one
    run = sonde.open_run(folder / "dies")
    assert (run.status, run.steps.tolist()) == ("failed", [0, 1, 2, 3])
    assert "planted" in ending_of(run).message


def test_a_reader_in_another_process_follows_a_live_run(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow = textwrap.dedent(
        """
        import sys, sonde
        assert "torch" not in sys.modules
        run = sonde.open_run(sys.argv[1])
        for line in sys.stdin:
            run.refresh()
            print(run.status, int(run.steps[-1]), len(run.series("0.weight:gradient", "norm").values), flush=True)
        assert "torch" not in sys.modules
        """
    )
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        session.flush()
        with started([sys.executable, "-c", follow, tmp_path / "run"]) as reader:
            for step in range(2, 30):
                optimizer.step()
                session.flush()
                assert ask(reader, "look").split() == ["live", str(step), str(step)]
            reader.communicate("look\n", timeout=PATIENCE_S)
    assert reader.returncode == 0
