"""Sensors for how batches are made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from sonde.core.facts import LoaderFacts, Plain
from sonde.core.signals import LOOP, SAME_ORDER
from sonde.hooks.guard import Handle
from sonde.hooks.replace_function import ReplacedFunction
from sonde.schedule import at
from sonde.sensors.sensor import Context, Sensor, StepEnd

_PLAIN: Final = ("batch_size", "num_workers", "drop_last", "pin_memory", "persistent_workers", "prefetch_factor")
_DRAWING: Final = ReplacedFunction(DistributedSampler, "__iter__")
"""The beginning of a pass over the data of any DistributedSampler."""
_LEAST_STEPS: Final = 2
"""Steps of a pass over the data for its order to matter. A peek at one batch is not a pass."""
_GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class Loader(Sensor):
    """What the data loader says about itself. Nothing is drawn from it, and its random state is not touched."""

    produces = ("facts.loader",)
    when = at(0)
    cost = "a look at the settings of the loader, once"

    def start(self) -> None:
        """Read its settings."""
        loader = self.context.watched.helpers.loader
        if loader is not None:
            self.context.book.add(loader=loader_facts(loader))


def loader_facts(loader: Any) -> LoaderFacts:
    """Return the plain settings of a loader; what it does not say is left out."""
    settings: dict[str, Plain] = {}
    for name in _PLAIN:
        value = getattr(loader, name, None)
        if isinstance(value, bool | int | float):
            settings[name] = value
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        settings["dataset_kind"] = type(dataset).__name__
        settings["iterable"] = isinstance(dataset, IterableDataset)
        settings["generator_in_dataset"] = any(
            isinstance(value, _GENERATORS) for value in getattr(dataset, "__dict__", {}).values()
        )
    if isinstance(loader, DataLoader):
        settings |= _order(loader)
    settings |= _lengths(loader, dataset)
    return LoaderFacts(kind=type(loader).__name__, settings=settings)


def _order(loader: DataLoader[Any]) -> dict[str, Plain]:
    settings: dict[str, Plain] = {"sampler": type(loader.sampler).__name__}
    settings["worker_init_fn"] = loader.worker_init_fn is not None
    if isinstance(loader.sampler, RandomSampler):
        settings["shuffle"] = True
        settings["replacement"] = bool(loader.sampler.replacement)
    elif isinstance(loader.sampler, SequentialSampler):
        settings["shuffle"] = False
    return settings


def _lengths(loader: Any, dataset: Any) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    if isinstance(dataset, IterableDataset):
        return found  # asking such a loader for its length makes it check that length from then on
    for name, each in (("length", loader), ("dataset_length", dataset)):
        try:
            found[name] = len(each)
        except (TypeError, NotImplementedError, AttributeError):
            continue  # it has none, or does not know it
    return found


@dataclass(slots=True)
class _Pass:
    """A pass over the data of a sampler, and how many steps were taken in it."""

    sampler: int
    order: tuple[int, int]
    """What the sampler seeds its order by."""
    steps: int = 0


class SameOrder(Sensor):
    """Passes over the data whose order a DistributedSampler repeats: it depends on its seed and `set_epoch` alone."""

    produces = (SAME_ORDER,)
    cost = "two attributes of the sampler per pass over the data; one number per step from the second pass on"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._before: dict[int, _Pass] = {}
        """The last pass that was trained on, by sampler."""
        self._now: _Pass | None = None
        self._count: dict[int, int] = {}
        self._known = 0

    def listen(self) -> Iterator[Handle]:
        """Listen to the beginning of passes."""
        yield _DRAWING.listen(before=self.context.watched.guard.wrap("the sampler", self._begin))

    def _begin(self, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        sampler = args[0]
        # A subclass that draws in another way may take its order from elsewhere.
        if not sampler.shuffle or type(sampler).__iter__ is not DistributedSampler.__iter__:
            return
        if self._now is not None and self._now.steps >= _LEAST_STEPS:
            self._before[self._now.sampler] = self._now
        self._now = _Pass(id(sampler), (int(sampler.seed), int(sampler.epoch)))

    def on_step_end(self, end: StepEnd) -> None:
        """Compare a pass with the one before when it is as long; the last step of an epoch may belong to the next."""
        now = self._now
        if now is None:
            return
        now.steps += 1
        before = self._before.get(now.sampler)
        if before is not None and now.steps == max(_LEAST_STEPS, before.steps - 1):
            same = before.order == now.order
            self._known = self._count[now.sampler] = self._count.get(now.sampler, 1) + 1 if same else 1
        if end.due and self._known:
            self.signals.put(LOOP, SAME_ORDER, self._known)
