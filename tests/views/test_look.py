import io

import pytest
from rich.console import Console

from sonde.views.terminal import Look, make_console


def stream(encoding):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)


def test_a_console_never_fails_on_a_character():
    file = stream("ascii")
    console = make_console(file=file, width=80)
    assert not Look.of(console).unicode
    console.print("40\N{MULTIPLICATION SIGN} → ● 層.weight")
    assert file.buffer.getvalue() == b"40x > * ?.weight\n"


def test_unicode_is_kept_where_it_can_be_shown():
    file = stream("utf-8")
    console = make_console(file=file, width=80)
    assert Look.of(console).unicode
    console.print("→")
    assert file.buffer.getvalue().decode() == "→\n"


def test_no_colour_when_not_a_terminal_or_not_wanted(monkeypatch):
    assert not Look.of(make_console(file=io.StringIO())).colour
    assert Look.of(Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")).colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Look.of(Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")).colour


def test_a_long_name_keeps_its_end():
    assert Look().fit("encoder.layers.11.mlp", 10) == "…rs.11.mlp"
    assert Look(unicode=False).fit("encoder.layers.11.mlp", 10) == "~rs.11.mlp"
    assert Look().fit("head", 10) == "head"


def test_the_width_follows_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "123")
    assert make_console(file=io.StringIO()).width == 123
    assert make_console(file=io.StringIO(), width=70).width == 70


def test_a_closed_pipe_is_the_error_it_is():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        make_console(file=Closed()).print("hello")
