"""Build datasets and loaders from a config, and save the random state of loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from sonde.errors import OptionError
from sonde.training.config import build_from_config, find_class, is_description
from sonde.training.datapoints import NumberedBatch

DEFAULT_BATCH_SIZE = 32


class NumberedDataset(Dataset[tuple[int, Any]]):
    """A dataset whose items carry their index, so that scores do too, in any order of loading."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return int(index), self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


@dataclass(frozen=True, slots=True)
class NumberedCollate:
    """Collates numbered items with the loader's own collate function."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[tuple[int, Any]]) -> NumberedBatch:
        """Collate the items, and keep their indices."""
        return NumberedBatch([index for index, _ in items], self.collate([item for _, item in items]))


def build_loader(config: Mapping[str, Any], split: str) -> Any:
    """Build `<split>_dataset` and `<split>_dataloader`; None where a config has neither.

    A split without its own dataloader gets a plain one of `batch_size` samples, shuffled for training.
    """
    described = config.get(f"{split}_dataloader")
    if isinstance(described, Mapping) and not is_description(described):
        raise OptionError(
            f"'{split}_dataloader' is a dict with the keys {sorted(map(str, described))}; describe a loader as "
            f"{{'class': DataLoader, 'args': {{...}}}}, or leave it out and set 'batch_size'."
        )
    if described is not None and not is_description(described):
        return described  # built already, or something of the user's own
    dataset = build_from_config(config.get(f"{split}_dataset"))
    if dataset is None:
        return None if described is None else build_from_config(described)
    if described is None:
        described = {"class": DataLoader, "args": _plain_args(config, split, dataset)}
    if split == "train" or not _can_be_numbered(described, dataset):
        return build_from_config(described, dataset=dataset)
    collate = NumberedCollate(described["args"].get("collate_fn") or default_collate)
    return build_from_config(described, dataset=NumberedDataset(dataset), collate_fn=collate)


def _plain_args(config: Mapping[str, Any], split: str, dataset: Any) -> dict[str, Any]:
    args: dict[str, Any] = {"batch_size": config.get("batch_size", DEFAULT_BATCH_SIZE)}
    if split == "train" and not isinstance(dataset, IterableDataset):
        args["shuffle"] = True
    return args


def _can_be_numbered(described: Mapping[str, Any], dataset: Any) -> bool:
    loader = find_class(described["class"])
    is_torch = isinstance(loader, type) and issubclass(loader, DataLoader)
    batched = described["args"].get("batch_size", 1) is not None
    return is_torch and batched and not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")


def num_batches(loader: Any) -> int | None:
    """Return the number of batches of a loader; None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a stream
        return None


def begin_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch to a sampler that has `set_epoch`."""
    for name in ("sampler", "batch_sampler"):
        set_epoch = getattr(getattr(loader, name, None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _generators(loader: Any) -> dict[str, torch.Generator]:
    places = {"loader": loader, "sampler": getattr(loader, "sampler", None)}
    found = {name: getattr(place, "generator", None) for name, place in places.items()}
    return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}


def loader_state(loader: Any) -> dict[str, torch.Tensor]:
    """Return the state of the random generators that belong to a loader."""
    return {name: generator.get_state() for name, generator in _generators(loader).items()}


def restore_loader_state(loader: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Restore the generators of a loader to what `loader_state` returned."""
    for name, generator in _generators(loader).items():
        if name in state:
            generator.set_state(state[name])
