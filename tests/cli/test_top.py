"""`sonde top`, driven through a pseudo-terminal as a person would."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from tests.analysis.made_run import Recipe, write_run
from tests.waiting import PATIENCE_S

from sonde.views.terminal.top import PAGES, View


class Terminal:
    """A program on a pseudo-terminal of 24 lines of 80 characters."""

    def __init__(self, *args, lines=24, columns=80):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sonde", *map(str, args)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        )
        self.slave = slave
        self.text = ""
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a read may end inside a character

    def wait_for(self, text):
        deadline = time.monotonic() + PATIENCE_S
        while text not in plain(self.text):
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; the screen shows:\n{plain(self.text)[-3000:]}"
            self.text += self.decode(os.read(self.master, 65536))
        return self

    def press(self, keys):
        self.text = ""
        os.write(self.master, keys.encode())
        return self

    def close(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self.master)
        os.close(self.slave)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][AB0]", "", text)


@pytest.fixture
def terminal():
    opened = []

    def start(*args, **options):
        opened.append(Terminal(*args, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_pages_scroll_and_leave(terminal, tmp_path):
    write_run(tmp_path / "run", Recipe(steps=60, layers=3))
    screen = terminal("top", tmp_path / "run")
    screen.wait_for("q quit")
    assert "loss" in plain(screen.text)
    screen.press("3").wait_for("layers, worst first")
    screen.press("\x1b[C").wait_for("gradient flow, first layer to last")
    screen.press("5").wait_for("time of a step")
    screen.press("p").wait_for(" paused ")
    screen.press("q")
    assert screen.process.wait(PATIENCE_S) == 0
    # What it was before: echo and line mode are back.
    assert termios.tcgetattr(screen.slave)[3] == screen.before[3]


def test_nothing_is_wider_or_higher_than_the_screen(terminal, tmp_path):
    write_run(tmp_path / "run", Recipe(steps=30, layers=6))
    # One look only: a second one would be read as part of the first by a test that is held up.
    screen = terminal("top", tmp_path / "run", "--interval", 1000, lines=20, columns=72)
    screen.wait_for("q quit")
    drawn = plain(screen.text).split("\r\n")
    assert max(len(line) for line in drawn) <= 72
    assert len(drawn) <= 21


def test_without_a_terminal_it_names_what_to_use(sonde, first):
    result = sonde("top", first)
    assert result.exit_code == 2
    assert "sonde tail" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["2"], View(1)),
        (["right", "right"], View(2)),
        (["left"], View(len(PAGES) - 1)),
        (["tab", "down", "j", "up"], View(1, 1)),
        (["down", "3"], View(2, 0)),
        (["p"], View(paused=True)),
        (["x", "9"], View()),
        (["q"], None),
        (["ctrl-c"], None),
    ],
)
def test_keys(keys, expected):
    view = View()
    for key in keys:
        view = view.press(key)
    assert view == expected
