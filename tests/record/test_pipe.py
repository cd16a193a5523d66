"""The pool, the packer and the worker, apart from any session."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.waiting import PATIENCE_S
from torch import nn

import sonde
from sonde.core import schema
from sonde.record.blocks import continue_block, to_block, to_numbers
from sonde.record.packer import MOST_TOGETHER, Packer
from sonde.record.packets import ArenaPool, Packet, PlainSteps, SiteBook
from sonde.record.worker import Worker
from sonde.records import Numbers, Reading, RunHeader, Site
from sonde.stats import kernel_for
from sonde.store import RunWriter
from sonde.store.log import codec
from sonde.testing import FakeClock, MemorySink

CPU = torch.device("cpu")


@pytest.fixture
def pipe():
    """A packer whose packets are kept instead of being worked on."""
    sent = []
    book = SiteBook()
    packer = Packer(
        book,
        ArenaPool(1 << 20),
        kernel_for,
        lambda packets: sent.extend(packets) or True,
        clock=FakeClock(),
        histogram=True,
        expected_sites=4,
    )
    return packer, book, sent


def test_the_pool_lends_up_to_its_bytes_and_takes_back_clean_arenas():
    kernel = kernel_for(CPU)
    one = kernel.arena(100).nbytes
    pool = ArenaPool(3 * one)
    arenas = [pool.lend(CPU, kernel, 100) for _ in range(4)]
    assert [arena is not None for arena in arenas] == [True, True, True, False]
    kernel.measure([torch.ones(5)], [0], arenas[0])
    pool.give_back(CPU, arenas[0])
    again = pool.lend(CPU, kernel, 100)
    assert again is arenas[0]
    assert not kernel.ship(again).take()[0].any()
    assert pool.used_bytes == 3 * one


def test_the_pool_lets_go_of_arenas_that_have_become_too_small():
    kernel = kernel_for(CPU)
    pool = ArenaPool(1 << 20)
    small = pool.lend(CPU, kernel, 10)
    pool.give_back(CPU, small)
    large = pool.lend(CPU, kernel, 100)
    assert large.capacity >= 100
    assert pool.used_bytes == large.nbytes


def test_two_arenas_are_lent_however_small_the_budget():
    kernel = kernel_for(CPU)
    pool = ArenaPool(1)
    assert pool.lend(CPU, kernel, 100) is not None
    assert pool.lend(CPU, kernel, 100) is not None
    assert pool.lend(CPU, kernel, 100) is None


def test_sites_found_in_mid_step_get_room(pipe):
    packer, book, sent = pipe
    for index in range(300):
        packer.see(packer.site(f"layer{index}", "output"), torch.full((2,), float(index)))
    packer.end_step()
    packer.begin()
    block = to_block(sent[0], book, histogram=True)
    assert block.sites.tolist() == list(range(300))
    np.testing.assert_array_equal(block.rows[:, schema.MEAN], range(300))
    assert len(sent[0].holds) > 1


def test_many_at_once_may_span_old_and_new_room(pipe):
    packer, book, sent = pipe
    packer.see(packer.site("first", "gradient"), torch.ones(1))
    sites = [packer.site(f"p{index}", "gradient") for index in range(200)]
    values = [torch.full((3,), float(index)) for index in range(200)]
    packer.see_many(values, sites)
    shadows = [torch.zeros(3) for _ in values]
    changes = [packer.site(f"p{index}", "update") for index in range(200)]
    packer.see_changes(values, shadows, [packer.site(f"p{i}", "parameter") for i in range(200)], changes)
    packer.end_step()
    packer.begin()
    block = to_block(sent[0], book, histogram=True)
    by_key = {book[int(site)].key: row for site, row in zip(block.sites, block.rows, strict=True)}
    assert by_key["p7:gradient"][schema.MEAN] == by_key["p7:update"][schema.MEAN] == 7
    assert all(torch.equal(value, shadow) for value, shadow in zip(values, shadows, strict=True))


def test_logs_after_a_step_belong_to_it_and_later_ones_to_the_next(pipe):
    packer, _, sent = pipe
    site = packer.site("loss", "scalar")
    packer.end_step()
    packer.put(site, 1.0)
    packer.begin()
    packer.put(site, 2.0)
    packer.end_step()
    packer.begin()
    packer.ship()
    first, plain = sent  # the site was new in the first
    assert (first.step, first.numbers) == (0, [(site, 1.0)])
    assert (plain.steps, plain.sites, plain.values) == ([1], (site,), [2.0])


def test_steps_with_numbers_only_are_sent_together_and_in_order(pipe):
    packer, _, sent = pipe
    site = packer.site("loss", "scalar")
    for step in range(3 * MOST_TOGETHER):
        packer.put(site, float(step))
        if step == 10:
            packer.put_event("note", "an event sends what waits", {})
        packer.end_step()
        packer.begin()
    packer.ship()
    assert len(sent) <= 8
    steps = [[each.step] if isinstance(each, Packet) else each.steps for each in sent]
    assert [step for part in steps for step in part] == list(range(3 * MOST_TOGETHER))


def test_numbers_of_many_steps_are_the_blocks_of_each():
    values = [1.5, float("nan"), float("inf"), -0.0, 1e-300]
    plain = PlainSteps((5, 2), 1)
    for step, value in enumerate(values, 1):
        plain.steps.append(step)
        plain.times.append(100.0 + step)
        plain.values += [value, float(step)]
    numbers = to_numbers(plain, after=0)
    blocks = list(numbers.blocks())
    book = SiteBook([Site(id=number, name=str(number), quantity="scalar") for number in range(9)])
    for packet, block in zip(plain.packets(), blocks, strict=True):
        truth = to_block(packet, book, histogram=True)
        assert (block.step, block.time, block.epoch) == (truth.step, truth.time, truth.epoch)
        for name in ("sites", "rows", "bins", "binned"):
            np.testing.assert_array_equal(getattr(block, name), getattr(truth, name))
    apart = [codec.encode_block(7 + index, codec.pack(block)) for index, block in enumerate(blocks)]
    assert codec.encode_numbers(7, numbers) == b"".join(apart)


def test_steps_with_other_numbers_or_of_another_epoch_are_apart(pipe):
    packer, _, sent = pipe
    one, two = packer.site("one", "scalar"), packer.site("two", "scalar")
    packer.put_event("note", "the sites are new", {})
    packer.ship()
    for step, epoch in enumerate((1, 1, 1, 2, 2)):
        packer.epoch = epoch
        packer.put_all([(one, 1.0)] if step < 2 else [(one, 1.0), (two, 2.0)])
        packer.end_step()
        packer.begin()
    packer.ship()
    assert [(each.epoch, each.steps) for each in sent[1:]] == [(1, [0, 1]), (1, [2]), (2, [3, 4])]


@pytest.mark.parametrize(
    "plain", [PlainSteps((0, 0), None, [1], [0.0], [1.0, 3.0]), PlainSteps((0,), None, [4], [0.0], [2.0])]
)
def test_a_step_that_needs_merging_is_a_packet(plain):
    """A number is logged twice in it, or something else of it was taken before."""
    assert to_numbers(plain, after=4) is None
    book = SiteBook([Site(id=0, name="a", quantity="scalar")])
    (block,) = [to_block(packet, book, histogram=True) for packet in plain.packets()]
    assert block.rows[0, schema.MEAN] == 2.0


def test_the_store_takes_numbers_of_many_steps_as_it_takes_blocks(tmp_path):
    header = RunHeader(schema_version=1, created=1.0, sonde_version="0")
    numbers = Numbers(
        steps=np.arange(3, 2003), times=np.arange(2000.0), sites=np.array([0, 1], np.uint32),
        values=np.random.default_rng(0).normal(size=(2000, 2)),
    )  # fmt: skip
    for name in ("together", "apart"):
        writer = RunWriter(tmp_path / name, header, journal_bytes=1 << 16)
        writer.take_sites([Site(id=0, name="loss", quantity="scalar"), Site(id=1, name="lr", quantity="scalar")])
        if name == "together":
            writer.take_numbers(numbers)
        else:
            for block in numbers.blocks():
                writer.take_block(block)
        writer.close()
    together, apart = (sonde.open_run(tmp_path / name) for name in ("together", "apart"))
    for place, key in enumerate(("loss:scalar", "lr:scalar")):
        series = together.series(key, "mean")
        np.testing.assert_array_equal(series.values, numbers.values[:, place])
        np.testing.assert_array_equal(series.steps, apart.series(key, "mean").steps)


def test_an_empty_step_is_not_sent_but_counts(pipe):
    packer, _, sent = pipe
    for _ in range(3):
        packer.end_step()
        packer.begin()
    assert (sent, packer.step) == ([], 3)


def test_scaled_gradients_are_unscaled_with_their_histogram(pipe):
    packer, book, sent = pipe
    values = torch.tensor([0.001, -0.5, 3.0, 0.0])
    gradient, scale = packer.site("w", "gradient"), packer.site("scale", "scalar")
    packer.see(gradient, values * 1024)
    packer.see(scale, torch.tensor(1024.0))
    packer.unscale([gradient], scale)
    packer.end_step()
    packer.begin()
    block = to_block(sent[0], book, histogram=True)
    truth = Reading.of(values.numpy())
    np.testing.assert_allclose(block.rows[0], truth.row, rtol=1e-6)
    np.testing.assert_array_equal(block.bins[0], truth.bins)


def test_a_scale_that_is_not_a_power_of_two_costs_the_histogram(pipe):
    packer, book, sent = pipe
    gradient, scale = packer.site("w", "gradient"), packer.site("scale", "scalar")
    packer.see(gradient, torch.tensor([3.0]))
    packer.put(scale, 3.0)
    packer.unscale([gradient], scale)
    packer.end_step()
    packer.begin()
    block = to_block(sent[0], book, histogram=True)
    assert not block.binned[0]
    assert block.rows[0, schema.MEAN] == pytest.approx(1.0)


def test_a_block_continues_what_was_sent_about_its_step():
    book = SiteBook([Site(id=0, name="a", quantity="scalar"), Site(id=1, name="b", quantity="scalar")])
    first = to_block(Packet(3, numbers=[(0, 1.0), (1, 5.0)]), book, histogram=True)
    second = to_block(Packet(3, numbers=[(0, 3.0)]), book, histogram=True)
    send, whole = continue_block(first, second)
    assert send.sites.tolist() == [0]
    assert send.rows[0, schema.MEAN] == 2.0
    assert whole.sites.tolist() == [0, 1]


def test_a_packet_that_cannot_be_read_does_not_end_the_worker(caplog):
    class Broken:
        def take(self):
            raise RuntimeError("lost on the way")

    pool, book, sink = ArenaPool(1 << 20), SiteBook(), MemorySink()
    worker = Worker(sink, pool, book, histogram=True, clock=FakeClock())
    packer = Packer(book, pool, kernel_for, worker.send, clock=FakeClock(), histogram=True, expected_sites=1)
    packer.see(packer.site("a", "output"), torch.ones(2))
    packer.end_step()
    packer._holds[CPU][0].kernel.ship = lambda arena: Broken()
    packer.begin()
    packer.see(packer.site("a", "output"), torch.ones(2))
    packer.end_step()
    packer.begin()
    assert worker.flush(30)
    assert worker.close(PATIENCE_S)
    assert [block.step for block in sink.blocks] == [1]
    assert "lost on the way" in caplog.text
    assert sink.events[0].event_type == "fault"
    assert sink.closed


def test_a_job_that_fails_neither_ends_the_worker_nor_makes_a_flush_wait(monkeypatch, caplog):
    sink = MemorySink()
    worker = Worker(sink, ArenaPool(1), SiteBook(), histogram=True, clock=FakeClock())
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_sinks", lambda: 1 / 0)
        assert not worker.flush(PATIENCE_S)
    assert worker.flush(PATIENCE_S)
    assert worker.close(PATIENCE_S)
    assert [event.event_type for event in sink.events] == ["fault"]
    assert "a job of the worker failed" in caplog.text


def test_the_worker_refuses_more_than_it_can_hold(monkeypatch):
    import threading

    from sonde.record import worker as module

    monkeypatch.setattr(module, "MAX_WAITING", 3)
    gate = threading.Event()

    class Slow(MemorySink):
        def take_block(self, block):
            gate.wait(PATIENCE_S)
            super().take_block(block)

    book = SiteBook([Site(id=0, name="a", quantity="scalar")])
    worker = Worker(Slow(), ArenaPool(1), book, histogram=True, clock=FakeClock())
    accepted = [worker.send([Packet(step, numbers=[(0, 1.0)])]) for step in range(10)]
    assert accepted.count(True) <= 5
    assert not accepted[-1]
    gate.set()
    assert worker.close(PATIENCE_S)


def test_the_first_step_of_a_deep_model_takes_its_updates_at_once(tmp_path, monkeypatch):
    def see_one(packer, *args):
        raise AssertionError("parameters are taken one by one")

    monkeypatch.setattr(Packer, "_see_change", see_one)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(80)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", budget=None, on_error="raise"):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
