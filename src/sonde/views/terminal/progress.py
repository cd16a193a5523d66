"""Live progress of a training loop: a bar with the loss on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sonde.views.terminal.bars import bar, sparkline
from sonde.views.terminal.style import BAD, BAR, QUIET, TITLE, Look, duration, make_console, short

_REFRESH_SECONDS = 0.1
_RATE_STEPS = 50
_SPARK_WIDTH = 24


class TrainingProgress:
    """Shows step, loss and speed while a loop runs.

        with TrainingProgress(total=300) as progress:
            for step, batch in enumerate(loader):
                ...
                progress.update(step + 1, loss=float(loss))

    On a terminal one line is redrawn a few times a second. Elsewhere (a log file, a pipe) it prints a line for every
    tenth of the way.

    Args:
        total: How many steps there will be.
        title: What is being trained.
        console: Where to draw; standard output by default.
        clock: Seconds, for the rate; tests pass in their own.

    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "training",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._title, self._clock = max(total, 1), title, clock
        self._console = console or make_console()
        self._look = Look.of(self._console)
        self._losses: list[float] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)
        self._step, self._start, self._drawn, self._printed_tenths = 0, clock(), -math.inf, 0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._start = self._clock()
        self._recent.append((self._start, 0))
        if self._console.is_terminal:
            # Redrawn from `update`, so that watching a loop needs no thread.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
            self._live.stop()

    def update(self, step: int, *, loss: float | None = None) -> None:
        """Report that `step` steps are done, and the loss."""
        now = self._clock()
        self._step = step
        self._recent.append((now, step))
        if loss is not None:
            self._losses.append(loss)
        if self._live is not None and now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            self._live.update(self._line(), refresh=True)
        elif self._live is None:
            self._print_tenth()

    def _print_tenth(self) -> None:
        tenth = self._step * 10 // self._total
        if tenth > self._printed_tenths:
            self._printed_tenths = tenth
            self._console.print(self._words())

    @property
    def _rate(self) -> float:
        (start, first), (now, last) = self._recent[0], self._recent[-1]
        return (last - first) / (now - start) if now > start else float("nan")

    def _words(self) -> Text:
        text = Text.assemble((self._title, TITLE), f"  step {self._step}/{self._total}")
        if self._losses:
            style = TITLE if math.isfinite(self._losses[-1]) else BAD
            text.append("  loss ").append(short(self._losses[-1]), style)
        if not math.isnan(self._rate):
            text.append(f"  {short(self._rate)} steps/s", QUIET)
        return text

    def _line(self) -> Text:
        share = min(self._step / self._total, 1.0)
        text = bar(share, 20, self._look, style=BAR)
        text.append(" ").append_text(self._words()).append("  ").append_text(self._spark())
        left = (self._total - self._step) / self._rate if self._rate else float("nan")
        if share >= 1:
            text.append(f"  {duration(self._clock() - self._start)}", QUIET)
        elif math.isfinite(left):
            text.append(f"  {duration(left)} left", QUIET)
        text.truncate(self._console.width, overflow="ellipsis")
        text.no_wrap = True
        return text

    def _spark(self) -> Text:
        losses = np.array(self._losses, dtype=np.float64)
        if not len(losses):
            return Text("")
        parts = np.array_split(losses, min(_SPARK_WIDTH, len(losses)))
        bad = np.array([not np.isfinite(part).all() for part in parts])
        means = np.array([np.median(part[np.isfinite(part)]) if np.isfinite(part).any() else np.nan for part in parts])
        return sparkline(means, self._look, bad=bad, log=bool((losses[np.isfinite(losses)] > 0).all()))
