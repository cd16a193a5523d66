import io

import pytest
from rich.console import Console

from sonde.views.terminal import TrainingProgress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def console(terminal):
    return Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None, legacy_windows=False)


def train(progress, clock, losses):
    with progress:
        for step, loss in enumerate(losses, start=1):
            clock.now += 0.05
            progress.update(step, loss=loss)


def test_a_log_file_gets_a_line_for_every_tenth():
    clock, out = Clock(), console(terminal=False)
    train(TrainingProgress(200, title="digits", console=out, clock=clock), clock, [2.0 / (i + 1) for i in range(200)])
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "digits  step 20/200  loss 0.100  20.0 steps/s"
    assert lines[-1].startswith("digits  step 200/200")


def test_a_terminal_gets_one_line_that_is_redrawn_a_few_times_a_second():
    clock, out = Clock(), console(terminal=True)
    train(TrainingProgress(200, console=out, clock=clock), clock, [2.0] * 100 + [1.0] * 100)
    text = out.file.getvalue()
    assert 60 <= text.count("steps/s") <= 110
    last = text.splitlines()[-2]
    assert "step 200/200" in last
    assert "━" * 20 in last
    assert "10 s" in last
    assert "█" in last


def test_a_loss_that_is_not_a_number_is_shown_as_such():
    clock, out = Clock(), console(terminal=True)
    train(TrainingProgress(4, console=out, clock=clock), clock, [1.0, float("nan"), 2.0, float("nan")])
    assert "loss NaN" in out.file.getvalue()
    assert "\N{MULTIPLICATION SIGN}" in out.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_to_report_is_not_an_error(terminal):
    out = console(terminal)
    with TrainingProgress(0, console=out, clock=Clock()) as progress:
        progress.update(1)
