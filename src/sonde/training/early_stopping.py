"""Track the best epoch so far, and decide when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sonde.core.arguments import whole_number
from sonde.errors import OptionError


class BestScore:
    """Remembers the best value of a score.

    Args:
        direction: 1 if more is better, -1 if less is.
        min_delta: A value must be better by more than this to count.

    """

    def __init__(self, direction: int, min_delta: float = 0.0) -> None:
        self.direction, self.min_delta = direction, float(min_delta)
        self.score: float | None = None
        self.epoch: int | None = None

    def update(self, epoch: int, score: float) -> bool:
        """Take an epoch's score; return whether it is the best so far. NaN never is."""
        if math.isnan(score):
            return False
        if self.score is not None and (score - self.score) * self.direction <= self.min_delta:
            return False
        self.score, self.epoch = float(score), epoch
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"score": self.score, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.score, self.epoch = state["score"], state["epoch"]


class EarlyStopping:
    """Stops training when a score has not improved for `patience` epochs.

    Args:
        metric: The name of the score.
        direction: 1 if more is better, -1 if less is.
        patience: How many epochs without a better score to wait.
        min_delta: How much better it must be to count.

    """

    def __init__(self, metric: str, direction: int, patience: int, min_delta: float = 0.0) -> None:
        self.metric, self.patience = metric, whole_number("patience", patience)
        self.best = BestScore(direction, min_delta)
        self.waited = 0

    def update(self, epoch: int, score: float) -> bool:
        """Take an epoch's score; return whether it is time to stop."""
        self.waited = 0 if self.best.update(epoch, score) else self.waited + 1
        return self.should_stop

    @property
    def should_stop(self) -> bool:
        """Whether patience has run out."""
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"waited": self.waited, **self.best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.waited = state["waited"]
        self.best.load_state_dict(state)


def direction_of(name: str, directions: Mapping[str, int], wanted: Any = None) -> int:
    """Return the direction of a score, from an option (`"max"` or `"min"`) or else from the metric.

    Raises:
        OptionError: Neither defines it.

    """
    if wanted in ("max", "min"):
        return 1 if wanted == "max" else -1
    if wanted is not None:
        raise OptionError(f"direction={wanted!r}: choose 'max' or 'min'.")
    if name not in directions:
        known = ", ".join(directions) or "none"
        raise OptionError(
            f"The direction of {name!r} is unknown. Give the metric DIRECTIONS = {{{name!r}: 1}}, "
            f"or -1 (it has directions for: {known}), or name another score."
        )
    return directions[name]


def early_stopping_from(config: Any, directions: Mapping[str, int], monitor: str | None) -> EarlyStopping | None:
    """Build the config's `early_stopping`: None, or `{"patience": 5, "metric": ..., "min_delta": ...}`.

    Raises:
        OptionError: It is invalid.

    """
    if config is None or config is False or isinstance(config, EarlyStopping):
        return config or None
    if not isinstance(config, Mapping):
        raise OptionError(f"early_stopping takes a dict such as {{'patience': 5}}; got {config!r:.80}.")
    known = {"enabled", "patience", "epochs", "metric", "min_delta", "direction"}
    strange = set(config) - known
    if strange:
        raise OptionError(f"early_stopping has {', '.join(sorted(strange))}; it takes {', '.join(sorted(known))}.")
    if not config.get("enabled", True):
        return None
    metric = config.get("metric", monitor)
    if metric is None:
        raise OptionError("early_stopping needs a score to look at: give the config a metric and a val_dataset.")
    patience = config.get("patience", config.get("epochs", 10))
    direction = direction_of(metric, directions, config.get("direction"))
    return EarlyStopping(metric, direction, patience, config.get("min_delta", 0.0))
