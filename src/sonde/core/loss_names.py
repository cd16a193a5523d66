"""Recognise the training loss among logged numbers by its name."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

UNLIKE: Final = 3
_TRAINING: Final = ("train_loss", "train/loss", "loss/train", "train.loss", "total_loss", "training_loss")
_OTHER: Final = ("val", "test", "dev", "eval")


def likeness(name: str) -> int:
    """Return how much a name is like that of the training loss; the less, the more.

    >>> likeness("loss"), likeness("train/loss"), likeness("aux_loss"), likeness("accuracy")
    (0, 1, 2, 3)
    """
    lowered = name.lower()
    if lowered == "loss":
        return 0
    if lowered in _TRAINING:
        return 1
    return 2 if "loss" in lowered else UNLIKE


@lru_cache(maxsize=256)
def is_loss_name(name: str) -> bool:
    """Return whether a number with this name may be a loss of the training.

    >>> is_loss_name("train_loss"), is_loss_name("val_loss")
    (True, False)
    """
    return likeness(name) < UNLIKE and not any(word in name.lower() for word in _OTHER)
