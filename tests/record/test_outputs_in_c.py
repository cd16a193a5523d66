"""Outputs that C code takes: the same readings as those of the Python code, bit for bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.stats.outputs import SWITCH, native_module, outputs_in_c

pytestmark = pytest.mark.skipif(native_module() is None, reason="needs the native library and torch 2.11")


def train(model, make_batch, *, steps=6, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(path):
        with sonde.watch(model, optimizer, run=path, **options) as session:
            for number in range(steps):
                model.train()
                optimizer.zero_grad()
                for _ in range(2 if number % 3 == 2 else 1):  # micro-batches
                    model(*make_batch()).float().square().mean().backward()
                optimizer.step()
                if number % 2:
                    model.eval()
                    with torch.no_grad():
                        model(*make_batch())
        return session

    return run


class HandsOn(nn.Module):
    """A container that returns the tensor of its last child, of its first, or a new one, by turns."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.count = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.count += 1
        first = self.first(x)
        inner = self.inner(first)
        return (inner, first, inner * 2)[self.count % 3]


class Recurrent(nn.Module):
    """Calls its cell several times, and returns a tuple from an inner module."""

    def __init__(self):
        super().__init__()
        self.cell, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.lstm(x)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Odd(nn.Module):
    """Outputs that only Python can read: permuted, sparse, complex, integer, a subclass, with flipped signs."""

    def __init__(self):
        super().__init__()
        self.fc, self.how = nn.Linear(8, 8), nn.ModuleList(nn.Identity() for _ in range(6))

    def forward(self, x):
        y = self.fc(x)
        self.how[0](y.T)
        self.how[1](y[:, ::2])
        self.how[2](torch.complex(y, y))
        self.how[3](torch.complex(y, y).conj().imag)
        self.how[4](y.detach().long())
        self.how[5](y.detach().to_sparse())
        return y


def images():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


PROGRAMS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), lambda: (torch.randn(16, 8),)),
    "large outputs": (lambda: nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8)), lambda: (torch.randn(64, 8),)),
    "images, channels last": (
        lambda: images().to(memory_format=torch.channels_last),
        lambda: (torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "a container that hands on": (HandsOn, lambda: (torch.randn(4, 8),)),
    "recurrent": (Recurrent, lambda: (torch.randn(4, 3, 8),)),
    "checkpointed": (Checkpointed, lambda: (torch.randn(4, 8),)),
    "odd outputs": (Odd, lambda: (torch.randn(4, 8),)),
    "half precision": (lambda: nn.Linear(8, 8).bfloat16(), lambda: (torch.randn(4, 8).bfloat16(),)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: (torch.randn(2, 5, 8),)),
}


def readings(path):
    run = sonde.open_run(path)
    # Times of phases and of memory differ from run to run.
    sites = [site for site in run.sites if site.quantity in ("output", "parameter", "gradient", "update", "input")]
    found = {}
    for site in sites:
        for step in run.steps:
            reading = run.at(step).get(site)
            if reading is not None:
                found[str(site), step] = reading
    return sites, found


def recorded(name, path, monkeypatch, *, way, **options):
    monkeypatch.setenv(SWITCH, way)
    torch.manual_seed(0)
    make, batch = PROGRAMS[name]
    train(make(), batch, **options)(path)
    return readings(path)


@pytest.mark.parametrize("diagnose", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_ways_record_the_same(name, diagnose, tmp_path, monkeypatch):
    sites, ours = recorded(name, tmp_path / "c", monkeypatch, way="c", diagnose=diagnose)
    same_sites, theirs = recorded(name, tmp_path / "python", monkeypatch, way="python", diagnose=diagnose)
    assert [str(site) for site in sites] == [str(site) for site in same_sites]
    assert [site.same_as for site in sites] == [site.same_as for site in same_sites]
    assert ours.keys() == theirs.keys()
    for key, reading in ours.items():
        np.testing.assert_array_equal(reading.row, theirs[key].row, err_msg=str(key))
        np.testing.assert_array_equal(reading.bins, theirs[key].bins, err_msg=str(key))


def test_ordinary_outputs_are_taken_in_c(tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=False) as session:
        for _ in range(10):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        taken = session._pipeline._modules._outputs_in_c.taken
    assert (
        taken == 9 * 19
    )  # all but the first step, and the output of each step that opens the arena; the container hands on


def test_containers_and_modules_that_write_in_place_are_taken_in_c(tmp_path):
    blocks = [nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))) for _ in range(5)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=False) as session:
        for _ in range(10):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        taken = session._pipeline._modules._outputs_in_c.taken
    assert taken == 9 * (5 * 4 - 1)  # all but the first step, and the output of each step that opens the arena


def test_steps_that_no_sensor_looks_at_are_taken_in_c_whatever_sensors_look_at(tmp_path):
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        outputs = session._pipeline._modules._outputs_in_c

        def step():
            before = outputs.taken
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            return outputs.taken - before

        observed = [step() for _ in range(8)][-1]
        monkey = session._pipeline.governor
        type(monkey).level, level = property(lambda _: 2), type(monkey).level
        try:
            plain = [step() for _ in range(3)][-1]
        finally:
            type(monkey).level = level
    assert plain == 9
    assert observed < plain


def test_another_thread_goes_through_python_and_is_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=False):
        for number in range(6):
            pass_ = threading.Thread(target=lambda: model(torch.full((2, 8), 1.0)).sum().backward())
            pass_.start() if number % 2 else model(torch.randn(2, 8)).sum().backward()
            if number % 2:
                pass_.join()
            optimizer.step()
    run = sonde.open_run(tmp_path / "run")
    assert list(run.series("0", "count").values) == [16.0] * 6


def test_an_arena_that_was_shipped_is_not_written_to():
    outputs = outputs_in_c()
    module, rows, bins = nn.Identity(), np.zeros((2, 12)), np.zeros((2, 64), dtype=np.uint64)
    outputs.know(id(module), 0, 1, True, 2)
    outputs.begin_pass(0, 0, False)
    outputs.open_cpu(rows.ctypes.data, bins.ctypes.data, 2, 0, 1)
    outputs.close()
    assert not outputs.take(module, torch.ones(3))
    outputs.open_cpu(rows.ctypes.data, bins.ctypes.data, 2, 0, 1)
    assert outputs.take(module, torch.ones(3))
    assert not outputs.take(module, torch.ones(3))  # its second call
    assert (rows[1, 1], rows[0, 1], bins[1].sum()) == (3, 0, 3)


def test_a_mode_in_which_python_must_look_is_left_to_python():
    outputs = outputs_in_c()
    module, rows, bins = nn.Dropout(), np.zeros((1, 12)), np.zeros((1, 64), dtype=np.uint64)
    outputs.know(id(module), 0, 0, True, 1)
    outputs.begin_pass(0, 0, True)
    outputs.open_cpu(rows.ctypes.data, bins.ctypes.data, 1, 0, 1)
    assert not outputs.take(module.eval(), torch.ones(3))
    assert outputs.take(module.train(), torch.ones(3))


def test_training_is_bit_identical_with_outputs_in_c(tmp_path):
    def run(watch):
        torch.manual_seed(1)
        model = images()
        optimizer = torch.optim.AdamW(model.parameters())
        session = sonde.watch(model, optimizer, run=tmp_path / "run") if watch else None
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(5, (4,))).backward()
            optimizer.step()
        if session is not None:
            session.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(run(watch=False), run(watch=True))


class Parts(nn.Module):
    """A model without a forward: its parts are called by hand."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)


@pytest.mark.parametrize("diagnose", [False, True])
@pytest.mark.parametrize("way", ["c", "python"])
def test_parts_that_are_called_by_hand_end_their_passes(way, diagnose, tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, way)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=diagnose):
        for _ in range(6):
            optimizer.zero_grad()
            model.decoder(model.encoder(torch.randn(3, 8))).sum().backward()
            with torch.no_grad():
                model.decoder(model.encoder(torch.randn(2, 8)))
            optimizer.step()
    run = sonde.open_run(tmp_path / "run")
    for name, width in (("encoder", 4), ("decoder", 8)):
        assert list(run.series(f"{name}:output", "count").values) == [3.0 * width] * 6
        assert list(run.series(f"{name}:output@eval", "count").values) == [2.0 * width] * 6


def test_a_table_that_grows_while_a_large_output_is_taken_is_not_read_any_more():
    class Growing(nn.Module):
        """Has many other modules made known where C code asks for its mode."""

        @property
        def training(self):
            for key in range(1 << 20, (1 << 20) + 16 * 4096, 16):
                outputs.know(key, 0, 5, True, 2)
            return True

        @training.setter
        def training(self, mode):
            pass

    outputs, module = outputs_in_c(), Growing()
    rows, bins = np.zeros((2, 12)), np.zeros((2, 64), dtype=np.uint64)
    outputs.know(id(module), 0, 1, True, 1)
    outputs.begin_pass(0, 0, False)
    outputs.open_cpu(rows.ctypes.data, bins.ctypes.data, 2, 0, 1)
    assert outputs.take(module, torch.ones(3))
    assert rows[1, 1] == 3
    assert outputs.last()[2] == 1
    assert outputs.calls(id(module), 0) == 1
