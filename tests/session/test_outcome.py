"""How a run ended: who was asked to stop was interrupted, who left in peace has finished, all else has failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import pytest
import torch
from tests.session.endings import ending_of

import sonde
from sonde import session as sessions
from sonde.core.outcome import outcome_of
from sonde.testing import tiny_mlp


@pytest.fixture
def train(tmp_path):
    """Train two steps, then do something; return the run."""
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(then):
        with contextlib.suppress(BaseException), sonde.watch(model, optimizer, run=tmp_path / "run"):
            for _ in range(2):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            then()
        return sonde.open_run(tmp_path / "run")

    return run


@contextlib.contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Job:
    """Ends a process in a method, as trainers do."""

    def end(self, number, frame):
        self.leave()

    def leave(self):
        sys.exit(0)


class Preempted(Exception): ...


def preempt(number, frame):
    raise Preempted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
@pytest.mark.parametrize("handler", [lambda *_: sys.exit(1), Job().end, preempt], ids=["exit 1", "method", "raises"])
def test_a_signal_whose_handler_ends_the_training_interrupts_it(train, number, handler):
    with handling(number, handler):
        run = train(lambda: os.kill(os.getpid(), number))
    assert run.status == "interrupted"
    assert ending_of(run).event_type == "interrupted"
    assert run.steps.tolist() == [0, 1, 2]


def test_ctrl_c_interrupts_a_training(train):
    run = train(lambda: signal.raise_signal(signal.SIGINT))
    assert run.status == "interrupted"
    assert ending_of(run).message == "KeyboardInterrupt"


@pytest.mark.parametrize("code", [None, 0])
def test_a_normal_exit_is_neither_a_failure_nor_news(train, code):
    run = train(lambda: sys.exit(code))
    assert run.status == "finished"
    assert not [event for event in run.events if event.event_type in ("exception", "interrupted")]


@pytest.mark.parametrize("code", [1, 2, "no data"])
def test_leaving_with_an_error_is_a_failure(train, code):
    run = train(lambda: sys.exit(code))
    assert run.status == "failed"
    assert ending_of(run).message == f"SystemExit: {code}"


@pytest.mark.parametrize("code", [130, 143])
def test_a_code_that_a_shell_gives_to_a_signal_is_an_interruption(train, code):
    run = train(lambda: sys.exit(code))
    assert (run.status, ending_of(run).message) == ("interrupted", f"SystemExit: {code}")


def test_a_cancelled_task_is_interrupted():
    async def cancelled():
        await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(cancelled())
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as error:
            return outcome_of(error)

    assert asyncio.run(main()) == "interrupted"


def test_a_generator_that_is_no_longer_used_has_finished(tmp_path):
    def losses():
        model = tiny_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde.watch(model, optimizer, run=tmp_path / "run"):
            while True:
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                yield loss

    training = losses()
    next(training)
    next(training)
    training.close()
    run = sonde.open_run(tmp_path / "run")
    assert (run.status, run.steps.tolist()) == ("finished", [0, 1, 2])


@pytest.mark.parametrize(("when", "status"), [("before", "finished"), ("after", "failed")])
def test_of_a_session_that_was_not_closed_only_an_error_since_its_beginning_counts(tmp_path, monkeypatch, when, status):
    if when == "before":  # in another cell of the notebook
        monkeypatch.setattr(sys, "last_value", ValueError("a slip"), raising=False)
    session = sonde.open_session(run=tmp_path / "run")
    if when == "after":
        monkeypatch.setattr(sys, "last_value", ValueError("the end"), raising=False)
    sessions._close_at_exit()
    assert session.is_closed
    assert sonde.open_run(tmp_path / "run").status == status
