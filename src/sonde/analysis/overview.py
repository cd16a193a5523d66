"""Describe a run in a few facts: status, how it ended, and what changed since the last look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from sonde.analysis.summary import SiteSummary, keys_of, summarise_sites, usual_stat, worst_first
from sonde.analysis.unusual import RECENT, ModelOrder
from sonde.core.metric_names import UNLIKE, likeness
from sonde.records import Event, RunHeader, Site
from sonde.store import Run
from sonde.store.lease import Status

# --------------------------------------------------------------------------------
# How a training ended that did not finish: the exception and the user's own line, Ctrl-C, or that it was killed.


ENDING_EVENTS: Final = ("exception", "interrupted")
"""Types of the events that a training leaves behind when something ends it."""
_BY_HAND: Final = "KeyboardInterrupt"
_FRAME: Final = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n {4,}(\S.*))?', re.MULTILINE)
_NOT_THE_USERS: Final = ("site-packages", "dist-packages", "/lib/python3", "\\Lib\\", "<frozen ")
# Sonde itself, also where it runs from its own repository.
_OURS: Final = re.compile(
    r"[\\/]sonde[\\/](?:hooks|record|sensors|stats|forensics|probes|capture|parallel|integrations|training|cli|debug"
    r"|debuggers|pytorch_debugging|session\.py|watching\.py|__main__\.py)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    function: str
    code: str
    """The line itself; empty where the traceback does not have it."""
    is_users: bool
    """Whether it is of the user's own program, not of Python, an installed package or Sonde."""

    @property
    def place(self) -> str:
        """File and line in short: `train.py:7`."""
        return f"{_one_line(PurePath(self.file).name)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a training did not finish. None where the run does not say."""

    text: str
    """All of it in a sentence, on one line."""
    step: int | None = None
    """The step it had come to."""
    by_hand: bool = False
    """It was asked to stop, so nothing is wrong."""
    exception: str | None = None
    """The type of the exception that ended it."""
    message: str | None = None
    """What the exception says."""
    place: str | None = None
    """Where in the user's own files it came from: `train.py:7`."""
    traceback: str | None = None
    frames: tuple[Frame, ...] = ()
    """The lines of the traceback, outermost first."""

    @property
    def innermost(self) -> Frame | None:
        """The innermost line of the user's own program."""
        return next((frame for frame in reversed(self.frames) if frame.is_users), None)


def ending_of(run: Run) -> Ending | None:
    """Return how a run ended that was interrupted, failed or crashed; None of any other."""
    status = run.status
    if status == "crashed":
        last = int(run.steps[-1]) if len(run.steps) else None
        return Ending("The process ended without recording why: killed, out of memory, or the machine went down.", last)
    if status not in ("failed", "interrupted"):
        return None
    kind = "exception" if status == "failed" else "interrupted"
    matching = [event for event in run.events if event.event_type == kind]
    if matching:
        return _ending_of(matching[-1])
    by_hand = status == "interrupted"
    return Ending(f"The training {'was interrupted' if by_hand else 'failed'}.", by_hand=by_hand)


def _ending_of(event: Event) -> Ending:
    words = _one_line(event.message).rstrip(": ")
    exception, _, message = words.partition(": ")
    trace = event.data.get("traceback")
    trace = trace if isinstance(trace, str) else None
    frames = frames_of(trace or "")
    inner = next((frame for frame in reversed(frames) if frame.is_users), None)
    place = "" if inner is None else inner.place
    # Older runs record an interruption as an exception.
    by_hand = event.event_type == "interrupted" or exception == _BY_HAND
    if not by_hand:
        text = f"The training raised {words}{f' ({place})' if place else ''}"
    elif exception == _BY_HAND:
        text = "The training was interrupted."
    else:
        text = f"The training was interrupted, by {words}."
    return Ending(text, event.step, by_hand, exception, message, place or None, trace, frames)


def _one_line(message: str) -> str:
    return " ".join("".join(sign if sign.isprintable() else " " for sign in message).split())


def is_users_file(path: str) -> bool:
    """Return whether a path is that of a program of the user's, not of Python, of an installed package or of Sonde.

    >>> is_users_file("/home/me/train.py"), is_users_file("/opt/sonde/src/sonde/hooks/patches.py")
    (True, False)
    """
    return not any(sign in path for sign in _NOT_THE_USERS) and not _OURS.search(path)


def frames_of(traceback: str) -> tuple[Frame, ...]:
    r"""Return the lines of a traceback, outermost first; of chained exceptions those of the last one.

    >>> frames_of('  File "/home/me/train.py", line 7, in <module>\n    loss.backward()')[0].code
    'loss.backward()'
    """
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    return tuple(
        Frame(file, int(line), function, code, is_users_file(file))
        for file, line, function, code in _FRAME.findall(last)
    )


# --------------------------------------------------------------------------------
# The facts of a run in one place: what a header line, a list of runs and a JSON answer say about it.


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run is, in plain values. None and empty text where the run does not say."""

    name: str
    path: str
    status: Status
    model: str
    num_parameters: int | None
    device: str
    num_steps: int
    """How many steps were recorded."""
    first_step: int | None
    last_step: int | None
    seconds: float | None
    steps_per_second: float | None
    num_sites: int
    num_ranks: int
    num_attempts: int
    num_events: int
    dropped: int
    num_problems: int
    nbytes: int
    created: float
    cost: str = ""
    """What recording cost, and what was recorded less often to keep within the budget."""

    @property
    def num_taken(self) -> int:
        """How many steps the training took, recorded or not, as far as is known."""
        if self.first_step is None or self.last_step is None:
            return self.num_steps
        return max(self.num_steps, self.last_step - max(self.first_step, 1) + 1)

    def describe_steps(self) -> str:
        """Return how many steps the training took, and how many were recorded if some were left out."""
        taken = f"{self.num_taken:,} step{'' if self.num_taken == 1 else 's'}"
        return taken + (f", {self.num_steps:,} recorded" if self.num_taken > self.num_steps else "")


def facts_of(run: Run) -> RunFacts:
    """Collect the facts of a run."""
    times = run.blocks.time
    seconds = float(times[-1] - times[0]) if len(times) > 1 else None
    return RunFacts(
        name=run.path.name or run.path.resolve().name,
        path=run.address,
        status=run.status,
        model=str(run.header.model.get("name", "")),
        num_parameters=num_parameters(run.header),
        device=device_of(run.header),
        num_steps=count_steps(run),
        first_step=int(run.steps[0]) if len(run.steps) else None,
        last_step=int(run.steps[-1]) if len(run.steps) else None,
        seconds=seconds,
        steps_per_second=int(run.steps[-1] - run.steps[0]) / seconds if seconds else None,
        num_sites=len(run.sites),
        num_ranks=len(run.ranks),
        num_attempts=len(run.attempts),
        num_events=len(run.events),
        dropped=int(run.dropped),
        num_problems=len(run.problems),
        nbytes=int(run.nbytes),
        created=run.header.created,
        cost=next((event.message for event in reversed(run.events) if event.event_type in ("cost", "budget")), ""),
    )


def count_steps(run: Run) -> int:
    """Return how many steps were recorded; step 0 is the state before the first one and does not count."""
    return int((run.steps > 0).sum())


def num_parameters(header: RunHeader) -> int | None:
    """Return how many numbers the model learns, where its header says so."""
    number = header.model.get("num_parameters")
    return number if type(number) is int else None


def device_of(header: RunHeader) -> str:
    """Return the devices that the parameters lie on, with the name of the GPU where the run knows it."""
    listed = header.model.get("parameters")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    devices = list(dict.fromkeys(str(entry["device"]) for entry in entries if "device" in entry))
    cards = header.environment.get("cuda")
    if isinstance(cards, list) and cards and any(device.startswith("cuda") for device in devices):
        devices.append(f"({cards[0]})")
    return " ".join(devices[:4])


def find_loss(sites: list[Site]) -> Site | None:
    """Return the scalar that is the training loss: `loss`, else the first that has the word in its name."""
    scalars = [site for site in sites if site.quantity == "scalar"]
    ranked = sorted(scalars, key=lambda site: (site.phase != "train", likeness(site.name)))
    return ranked[0] if ranked and likeness(ranked[0].name) < UNLIKE else None


def loss_title(loss: Site) -> str:
    """Return the name of a loss, with where it comes from if the program did not log it itself."""
    return f"{loss.name} ({loss.kind})" if loss.kind else loss.name


def find_learning_rate(sites: list[Site]) -> Site | None:
    """Return the scalar that is the first learning rate."""
    rates = [site for site in sites if site.quantity == "scalar" and site.name.rpartition(".")[2] == "lr"]
    return rates[0] if rates else None


# --------------------------------------------------------------------------------
# What is new in a run since the last look: one line of a live log.


# Steps that the worst layer is judged by: enough past for a jump to be one, few enough to read at every look.
_WINDOW = 10 * RECENT


@dataclass(frozen=True, slots=True, eq=False)
class News:
    """What came since the last look. None where the run has no such scalar; `nonfinite` counts elements."""

    step: int | None
    new_steps: int
    loss: float | None
    learning_rate: float | None
    nonfinite: int
    worst: SiteSummary | None
    values: dict[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


class Newspaper:
    """Remembers what was reported already. `sites` adds the latest values of these to every piece of news."""

    def __init__(self, run: Run, *, sites: Sequence[Site] = (), stat: str | None = None) -> None:
        self._run, self._sites, self._stat = run, list(sites), stat
        self._last_step: int | None = None
        self._num_reported = 0

    def skip_to_end(self) -> None:
        """Count everything there is as reported, but for the latest step."""
        steps = self._run.steps
        self._last_step = int(steps[-2]) if len(steps) > 1 else None
        self._num_reported = len(self._run.events)

    def read(self) -> News | None:
        """Return what is new since the last call, or None."""
        run = self._run
        events = tuple(run.events[self._num_reported :])
        self._num_reported += len(events)
        new = run.steps if self._last_step is None else run.steps[run.steps > self._last_step]
        if not len(new):
            return News(None, 0, None, None, 0, None, {}, events) if events else None
        since, self._last_step = int(new[0]), int(new[-1])
        tensors = [site for site in run.sites if site.quantity not in ("scalar", "vital") and site.same_as is None]
        return News(
            step=self._last_step,
            new_steps=len(new),
            loss=self._latest(find_loss(run.sites)),
            learning_rate=self._latest(find_learning_rate(run.sites)),
            nonfinite=sum(int(run.series(site, "nonfinite", start=since).values.sum()) for site in tensors),
            worst=self._worst(tensors),
            values={site.key: value for site in self._sites if (value := self._latest(site)) is not None},
            events=events,
        )

    def _latest(self, site: Site | None) -> float | None:
        if site is None:
            return None
        stat = self._stat if site in self._sites and self._stat else usual_stat(site, keys_of(self._run))
        values = self._run.series(site, stat, start=self._last_step).values
        return float(values[-1]) if len(values) else None

    def _worst(self, tensors: list[Site]) -> SiteSummary | None:
        # Gradients tell first, and are a fraction of all sites; without them anything will do.
        judged = [site for site in tensors if site.quantity == "gradient"] or tensors
        if not judged:
            return None
        order = ModelOrder(self._run.header, self._run.sites)
        worst = worst_first(summarise_sites(self._run, judged, last=_WINDOW), order)[0]
        return worst if worst.mark.level != "fine" else None
