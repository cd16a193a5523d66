"""What the pipe does for devices that work on their own time, shown with kernels that pretend to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonde.record.packer import Packer
from sonde.record.packets import ArenaPool, SiteBook
from sonde.record.worker import Worker
from sonde.stats import TorchKernel
from sonde.testing import FakeClock, MemorySink

CPU = torch.device("cpu")


class Failing(TorchKernel):
    """A kernel whose device has failed: whatever is asked of it raises."""

    def ship(self, arena):
        raise RuntimeError("device-side assert")


def make(kernel, sink):
    book, pool, clock = SiteBook(), ArenaPool(1 << 20), FakeClock()
    worker = Worker(sink, pool, book, histogram=True, clock=clock)
    packer = Packer(book, pool, lambda device: kernel, worker.send, clock=clock, histogram=True, expected_sites=4)
    return packer, worker, pool


def test_late_numbers_are_asked_for_when_the_rows_have_arrived():
    sink = MemorySink()
    packer, worker, _ = make(TorchKernel(), sink)
    asked = []

    def late():
        asked.append(len(sink.blocks))
        return [(packer.site("time", "scalar"), 2.5)]

    packer.see(packer.site("x", "value"), torch.ones(3))
    packer.put_late(late)
    packer.site("time", "scalar")
    packer.end_step()
    assert not asked
    packer.ship()
    assert worker.close(10)
    assert asked == [0]
    assert sink.readings("time:scalar")[0].mean == 2.5
    assert sink.readings("x:value")[0].count == 3


def test_a_failed_device_costs_its_rows_and_nothing_else():
    sink = MemorySink()
    packer, worker, _ = make(Failing(), sink)
    packer.see(packer.site("x", "value"), torch.ones(3))
    packer.put(packer.site("loss", "scalar"), 1.0)
    packer.put_event("exception", "it went wrong", {})
    with pytest.raises(RuntimeError, match="device-side assert"):
        packer.ship()
    assert worker.close(10)
    assert [event.event_type for event in sink.events] == ["exception"]
    assert sink.keys == {"loss:scalar"}


def test_the_worker_survives_an_arena_that_cannot_be_emptied(caplog):
    sink = MemorySink()
    packer, worker, pool = make(TorchKernel(), sink)

    def refuse(device, arena):
        raise RuntimeError("the device is gone")

    pool.give_back = refuse
    for value in (1.0, 2.0):
        packer.see(packer.site("x", "value"), torch.full((3,), value))
        packer.end_step()
        packer.begin()
    assert worker.close(10)
    assert len(sink.blocks) == 2
    assert caplog.text.count("emptying an arena failed") == 1


def test_a_cleared_pool_holds_no_arena():
    pool = ArenaPool(1 << 20)
    arenas = [pool.lend(CPU, TorchKernel(), 10) for _ in range(3)]
    for arena in arenas:
        pool.give_back(CPU, arena)
    pool.clear()
    assert pool.used_bytes == 0
    assert pool.lend(CPU, TorchKernel(), 10) not in arenas


def test_scalars_have_no_histogram():
    book = SiteBook()
    packer = Packer(book, ArenaPool(1 << 20), None, None, clock=FakeClock(), histogram=True, expected_sites=2)
    sites = [packer.site("loss", "scalar"), packer.site("weight", "gradient")]
    assert [book.has_histogram(site) for site in sites] == [False, True]
    assert book.have_histograms(np.array([1, 0, 1], dtype=np.uint32)).tolist() == [True, False, True]


def test_an_arena_lent_in_inference_mode_serves_training_too():
    pool, kernel = ArenaPool(1 << 20), TorchKernel(CPU, reads_numbers=False)
    with torch.inference_mode():
        arena = pool.lend(CPU, kernel, 10)
    kernel.measure_one(torch.ones(3), 0, arena)
    pool.give_back(CPU, arena)
    assert not kernel.ship(arena).take()[0].any()
