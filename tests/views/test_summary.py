import io

import numpy as np
import pytest
from rich.console import Console
from tests.analysis.made_run import Recipe, write_run

from sonde.analysis import verdict_on
from sonde.store import open_run
from sonde.views.terminal import make_console, print_summary, render_site
from sonde.views.terminal.style import Look


def page(run, width=80, **how):
    console = Console(file=io.StringIO(), width=width, color_system=None, **how)
    print_summary(run, console)
    return console.file.getvalue()


def sections(text):
    return [line.split(" ─")[0].strip() for line in text.splitlines() if " ──" in line]


def text_of_page(text):
    """Return the lines but for commands, which are left whole to be copied."""
    return [line for line in text.splitlines() if not line.startswith(("sonde ", "python:"))]


def test_the_page_at_80_columns(run):
    text = page(run)
    lines = text.splitlines()
    assert lines[0] == "first · finished · 60 steps in 3.0 s (20.0 steps/s)"
    assert lines[1].startswith("TinyTransformer · 918 k parameters · cpu · 58 sites · ")
    assert sections(text) == [
        "loss",
        "layers, worst first",
        "gradient flow, first layer to last",
        "events",
        "try next",
    ]
    assert max(map(len, text_of_page(text))) <= 80
    at = next(i for i, line in enumerate(lines) if line.startswith("layers, worst first"))
    assert lines[at + 1].split() == ["layer", "gradient", "update/w", "stands", "out"]
    assert lines[at + 2].startswith("●  blocks.5.mlp")
    assert lines[at + 2].rstrip().endswith("non-finite at step 45")
    assert lines[at + 3].startswith("●  blocks.2.mlp")
    assert "faded" in lines[at + 3]
    assert lines[at + 4].startswith("·  embed")
    assert "and 4 layers more; none of them stands out" in text
    assert "12 of 65,536 elements of blocks.5.mlp.weight:gradient" in text
    assert "--site blocks.5.mlp.weight:gradient" in text
    assert "▲ 45" in text


def test_a_wide_page_has_the_heat_map_beside_the_loss_and_more_columns(run):
    text = page(run, 130)
    assert "gradients over time" in text
    assert max(map(len, text_of_page(text))) <= 130
    head = next(line for line in text.splitlines() if "stands out" in line)
    assert head.split() == ["layer", "kind", "weight", "gradient", "update/w", "output", "stands", "out"]


@pytest.mark.parametrize("width", [40, 60, 100, 111, 200])
def test_no_line_is_wider_than_the_page(run, width):
    assert max(map(len, text_of_page(page(run, width)))) <= width


def test_without_unicode_the_page_is_ascii(run):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    print_summary(run, make_console(file=stream, width=130))
    text = stream.buffer.getvalue().decode("ascii")
    assert "faded" in text
    # A question mark is the sign of a row that stands out, and of nothing that could not be written.
    assert [line[0] for line in text.splitlines() if "?" in line] == ["?"]


def test_a_healthy_run_says_so(tmp_path):
    write_run(tmp_path / "well", Recipe(steps=40, layers=2, dies_at=None, nan_at=None))
    text = page(open_run(tmp_path / "well"))
    assert "●" not in text
    assert "▲" not in text
    assert "falling" in text
    assert "every gradient, worst first" in text


def test_a_run_without_steps_or_loss_is_shown(tmp_path):
    write_run(tmp_path / "empty", Recipe(steps=0, nan_at=None))
    reply = " ".join(page(open_run(tmp_path / "empty")).split())
    assert "No steps were recorded: optimizer.step() ends one, or session.step()" in reply


def test_a_live_run_invites_to_follow_it(tmp_path):
    writer = write_run(tmp_path / "live", Recipe(steps=5, layers=1, nan_at=None, dies_at=None), close=False)
    text = page(open_run(tmp_path / "live"))
    writer.close()
    assert "sonde tail" in text
    assert "· live ·" in text


def test_one_site_in_full(run, draw):
    from sonde.analysis import summarise_sites

    [row] = summarise_sites(run, run.find("blocks.2.mlp.weight:gradient"))
    text = draw(*render_site(run, row, Look(80, colour=False)))
    assert sections(text) == ["RMS over steps", "magnitudes at step 60", "magnitudes over steps"]
    assert "256\N{MULTIPLICATION SIGN}256" in text
    assert "1e-4" in text


def test_a_scalar_has_a_curve_and_no_histogram(run, draw):
    from sonde.analysis import summarise_sites

    [row] = summarise_sites(run, run.find("loss:scalar"))
    text = draw(*render_site(run, row, Look(80, colour=False)))
    assert sections(text) == ["value over steps"]
    assert "▲" in text
    assert np.isfinite(row.last)


def test_a_large_run_is_read_from_where_it_can_be_afforded_and_says_so(run, monkeypatch):
    monkeypatch.setattr("sonde.analysis.summary._READING_BUDGET", 60)
    monkeypatch.setattr("sonde.analysis.summary._LEAST_STEPS", 20)
    text = page(run)
    assert "layers, worst first, since step 41" in text
    # The loss is always whole.
    assert any(line.startswith("2.") for line in text.splitlines())


def test_the_curve_of_the_loss_and_the_verdict_say_the_same_of_it(run):
    [going] = {metric.going for metric in verdict_on(run).metrics if metric.is_training}
    assert going
    line = next(line for line in page(run).splitlines() if "   best " in line)
    assert going in line.split("   ")[2]
