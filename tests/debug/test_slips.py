"""Slips of a user of debug sessions: each is answered with what is wrong and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sonde
from sonde.debug import (
    DebugConfig,
    DebugVisualizer,
    HookAction,
    HookBuilder,
    HookTrigger,
    TerminalVisualizer,
    debug_session,
)
from sonde.errors import OptionError, RunNotFound


@pytest.mark.parametrize("below", [".", "session"])
def test_an_output_dir_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OptionError, match=r"output_dir=.*taken.* cannot be a folder: a file is in the way\. Choose"):
        debug_session(nn.Linear(2, 2), config=DebugConfig(output_dir=tmp_path / "taken" / below)).start()


def test_a_hook_that_matches_no_layer_is_reported_once_with_the_nearest(caplog):
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(2, 2))
    hook = HookBuilder("look").trigger(HookTrigger.EveryForward).action(HookAction.SaveSnapshot())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with debug_session(model, optimizer) as session:
        session.hooks.register(hook.layer_patterns(["encodr"]).build())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert caplog.text.count("the hook 'look' matches no layer of Sequential (encodr)") == 1
    assert "nearest: encoder." in caplog.text


def test_a_report_is_not_written_over_a_folder(tmp_path):
    with debug_session(config=DebugConfig(output_dir=tmp_path / "out")) as session:
        session.log(loss=1.0)
    with pytest.raises(OptionError, match=r"is a folder; name the file to write, such as .*report\.json"):
        session.export(tmp_path)


def test_a_listener_that_cannot_be_called_is_refused():
    with pytest.raises(OptionError, match=r"on_alert\(...\) takes a function of an alert; got 3"):
        debug_session().on_alert(3)


def test_a_run_is_drawn_by_its_path(tmp_path):
    pytest.importorskip("plotly", reason="figures need the view extra: pip install 'sonde[view]'")
    with sonde.open_session(run=tmp_path / "run") as session:
        session.log(loss=1.0)
        session.step()
    assert "run_training_metrics" in DebugVisualizer().plot_run(tmp_path / "run")
    with pytest.raises(RunNotFound, match="Nearest: "):
        DebugVisualizer().plot_run(tmp_path / "rum")


def test_nothing_to_draw_is_reported():
    draw = TerminalVisualizer(40, 8, mode="ascii", colours="none")
    assert draw.ascii_line_plot([], title="empty") == "empty\nno finite value among 0"
    assert draw.ascii_line_plot([float("nan")] * 3) == "no finite value among 3"
    assert draw.heat_map([]) == "no values to draw"
    with pytest.raises(OptionError, match="width takes a whole number of at least 1; got -1"):
        draw.sparkline([1, 2], width=-1)


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_not_a_path_is_not_opened(path):
    with pytest.raises(OptionError, match="open_run takes the folder of a run, such as 'runs/first'; got"):
        sonde.open_run(path)
