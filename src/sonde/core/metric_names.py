"""What the name of a logged number says: a loss or not, of which data, and which way is better."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

UNLIKE: Final = 3
_TRAINING: Final = ("train_loss", "train/loss", "loss/train", "train.loss", "total_loss", "training_loss")
_HELD_OUT: Final = frozenset({"val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation", "heldout"})
_LESS_IS_BETTER: Final = ("loss", "error", "perplexity", "distance")
"""Parts of names; a name that has one is not a score, whatever else it has (`dice_loss`)."""
_LESS: Final = frozenset(["bpc", "cer", "err", "fid", "kl", "mae", "mape", "mse", "nll", "ppl", "rmse", "wer"])
_MORE: Final = frozenset(
    {"acc", "accuracy", "ap", "auc", "auroc", "bleu", "correct", "dice", "f1", "hits", "iou", "jaccard", "map", "mcc",
     "miou", "ndcg", "precision", "psnr", "r2", "recall", "return", "returns", "reward", "rewards", "rouge", "score",
     "ssim", "top1", "top5"}
)  # fmt: skip
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


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
def is_held_out(name: str) -> bool:
    """Return whether a number with this name is of validation or test data.

    >>> is_held_out("val_loss"), is_held_out("testAcc"), is_held_out("valloss"), is_held_out("value_loss")
    (True, True, True, False)
    """
    lowered = name.lower()
    joined = any(lowered == f"{word}{what}" for word in _HELD_OUT for what in ("loss", "acc", "accuracy"))
    return joined or not _HELD_OUT.isdisjoint(_words(name))


@lru_cache(maxsize=256)
def is_loss_name(name: str) -> bool:
    """Return whether a number with this name may be a loss of the training.

    >>> is_loss_name("train_loss"), is_loss_name("val_loss"), is_loss_name("value_loss")
    (True, False, True)
    """
    return likeness(name) < UNLIKE and not is_held_out(name)


@lru_cache(maxsize=256)
def better_direction(name: str) -> int:
    """Return 1 if the name says that more is better, -1 if less is, 0 if it says neither.

    >>> [better_direction(name) for name in ("val_acc", "AUC", "dice_loss", "rmse", "lr", "testacc", "accumulated")]
    [1, 1, -1, -1, 0, 1, 0]
    """
    lowered, words = name.lower(), _words(name)
    if any(part in lowered for part in _LESS_IS_BETTER) or not _LESS.isdisjoint(words):
        return -1
    return 1 if not _MORE.isdisjoint(words) or any(word.endswith(("acc", "accuracy")) for word in words) else 0
