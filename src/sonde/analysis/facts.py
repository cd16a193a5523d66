"""The facts of a run in one place: what a header line, a list of runs and a JSON answer say about it."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.records import RunHeader, Site
from sonde.store import Run
from sonde.store.lease import Status


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


def facts_of(run: Run) -> RunFacts:
    """Collect the facts of a run."""
    times = run.blocks.time
    seconds = float(times[-1] - times[0]) if len(times) > 1 else None
    return RunFacts(
        name=run.path.name or run.path.resolve().name,
        path=str(run.path),
        status=run.status,
        model=str(run.header.model.get("name", "")),
        num_parameters=num_parameters(run.header),
        device=device_of(run.header),
        num_steps=count_steps(run),
        first_step=int(run.steps[0]) if len(run.steps) else None,
        last_step=int(run.steps[-1]) if len(run.steps) else None,
        seconds=seconds,
        steps_per_second=(len(times) - 1) / seconds if seconds else None,
        num_sites=len(run.sites),
        num_ranks=len(run.ranks),
        num_attempts=len(run.attempts),
        num_events=len(run.events),
        dropped=int(run.dropped),
        num_problems=len(run.problems),
        nbytes=int(run.nbytes),
        created=run.header.created,
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
    ranked = sorted(scalars, key=lambda site: (site.phase != "train", _likeness(site.name)))
    return ranked[0] if ranked and _likeness(ranked[0].name) < _UNLIKE else None


_UNLIKE = 3


def _likeness(name: str) -> int:
    lowered = name.lower()
    if lowered == "loss":
        return 0
    if lowered in ("train_loss", "train/loss", "loss/train", "train.loss", "total_loss"):
        return 1
    return 2 if "loss" in lowered else _UNLIKE


def find_learning_rate(sites: list[Site]) -> Site | None:
    """Return the scalar that is the first learning rate."""
    rates = [site for site in sites if site.quantity == "scalar" and site.name.rpartition(".")[2] == "lr"]
    return rates[0] if rates else None
