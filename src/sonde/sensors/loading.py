"""Sensors for how batches are made."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from sonde.core.facts import LoaderFacts, Plain
from sonde.schedule import at
from sonde.sensors.sensor import Sensor

_PLAIN: Final = ("batch_size", "num_workers", "drop_last", "pin_memory", "persistent_workers", "prefetch_factor")
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
