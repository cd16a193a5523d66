"""The options of a training optimizer, and its results, which can be awaited."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from sonde.core.arguments import whole_number
from sonde.errors import OptionError
from sonde.training import Accuracy, LossPerSample

_OPTIMIZERS: Final = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}
_SCHEDULERS: Final = ("plateau", "cosine", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The keyword arguments of a training optimizer, with their defaults."""

    learning_rate: float = 1e-3
    batch_size: int = 32
    """Recorded only: the loaders make the batches."""
    max_epochs: int = 100
    weight_decay: float = 1e-5
    gradient_clip: float | None = 1.0
    """Gradients are clipped to this norm; None does not clip."""
    patience: int = 10
    """Epochs without a lower validation loss after which to stop; 0 never stops early."""
    min_delta: float = 0.0
    checkpoint_dir: str | Path = "checkpoints"
    save_interval: int = 5
    """A checkpoint is kept every this many epochs, in addition to the last and the best."""
    criterion: Any = None
    """Takes outputs and targets; cross entropy by default."""
    metric: Any = None
    optimizer: Any = "adamw"
    """`adam`, `adamw`, `sgd`, `rmsprop`, a class, or an optimizer that is built already."""
    scheduler: Any = None
    """`plateau`, `cosine`, `step`, a description `{"class": ..., "args": {...}}`, or None."""
    use_amp: bool | str = False
    """True or `bf16`; `fp16` with a gradient scaler."""
    accumulation_steps: int = 1
    seed: int | None = None
    log_interval: int = 10
    """The loss is logged every this many steps."""
    watch: Any = None
    """Options of `sonde.watch` as a dict, or False."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> TrainingOptions:
        """Return the options from keyword arguments.

        Raises:
            OptionError: There is no such option, or its value is invalid.

        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in arguments:
            if name not in known:
                near = get_close_matches(name, known, n=3) or known
                raise OptionError(f"The training optimizer has no option {name!r} (nearest: {', '.join(near)}).")
        options = cls(**arguments)
        rate: Any = options.learning_rate
        if not isinstance(rate, int | float | torch.Tensor) or not rate >= 0:
            raise OptionError(f"learning_rate takes a number of at least 0; got {rate!r}.")
        counts = ("max_epochs", "save_interval", "accumulation_steps", "log_interval")
        whole: dict[str, Any] = {name: whole_number(name, getattr(options, name)) for name in counts}
        return dataclasses.replace(options, **whole)

    def trainer_config(self, model: nn.Module, train_loader: Any, val_loader: Any, work_dir: Path) -> dict[str, Any]:
        """Return the config of the trainer."""
        criterion = nn.CrossEntropyLoss() if self.criterion is None else self.criterion
        config: dict[str, Any] = {
            "work_dir": str(work_dir),
            "epochs": self.max_epochs,
            "model": model,
            "train_dataloader": train_loader,
            "val_dataloader": val_loader,
            "criterion": criterion,
            "metric": self._metric(criterion),
            "monitor": "loss" if self.metric is None else None,
            "optimizer": self._optimizer(),
            "scheduler": self._scheduler(),
            "clip_grad_norm": self.gradient_clip,
            "checkpoint_method": self.save_interval,
            "accumulation_steps": self.accumulation_steps,
            "amp": ("bf16" if self.use_amp else None) if isinstance(self.use_amp, bool) else self.use_amp,
            "watch": self.watch,
        }
        if self.patience and val_loader is not None:
            config["early_stopping"] = {"patience": self.patience, "min_delta": self.min_delta}
        if self.seed is not None:
            config |= {"init_seed": self.seed, "train_seeds": [self.seed + epoch for epoch in range(self.max_epochs)]}
        return {key: value for key, value in config.items() if value is not None}

    def _metric(self, criterion: Any) -> Any:
        if self.metric is not None:
            return self.metric
        losses = LossPerSample(criterion)
        return [losses, Accuracy()] if isinstance(criterion, nn.CrossEntropyLoss) else losses

    def _optimizer(self) -> Any:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return self.optimizer
        kind = self.optimizer
        if isinstance(kind, str):
            if kind.lower() not in _OPTIMIZERS:
                raise OptionError(f"optimizer={kind!r}: choose from {', '.join(_OPTIMIZERS)}, or give a class.")
            kind = _OPTIMIZERS[kind.lower()]
        return {"class": kind, "args": {"lr": self.learning_rate, "weight_decay": self.weight_decay}}

    def _scheduler(self) -> Any:
        if self.scheduler is None or not isinstance(self.scheduler, str):
            return self.scheduler
        schedulers = torch.optim.lr_scheduler
        described: dict[str, Any] = {
            "plateau": {"class": schedulers.ReduceLROnPlateau, "args": {"patience": max(1, self.patience // 2)}},
            "cosine": {"class": schedulers.CosineAnnealingLR, "args": {"T_max": self.max_epochs}},
            "step": {"class": schedulers.StepLR, "args": {"step_size": max(1, self.max_epochs // 3)}},
        }
        if self.scheduler not in described:
            raise OptionError(f"scheduler={self.scheduler!r}: choose from {', '.join(_SCHEDULERS)}, or describe one.")
        return described[self.scheduler]


class TrainingResults(dict[str, Any]):
    """The results of a training. Awaiting them returns them, so that `await optimizer.train()` works everywhere."""

    def __await__(self) -> Generator[Any, None, TrainingResults]:
        yield from ()
        return self


class PendingTraining:
    """A training that starts when it is awaited, in its own thread, so that the event loop is not blocked."""

    def __init__(self, run: Callable[[], TrainingResults], stop: Callable[[], None]) -> None:
        self._run, self._stop = run, stop

    def __await__(self) -> Generator[Any, None, TrainingResults]:
        return self._wait().__await__()

    async def _wait(self) -> TrainingResults:
        training = asyncio.ensure_future(asyncio.to_thread(self._run))
        try:
            return await asyncio.shield(training)
        except asyncio.CancelledError:
            # The current step is finished and the weights are saved before the cancellation is passed on.
            self._stop()
            await asyncio.gather(training, return_exceptions=True)
            raise


def begin(run: Callable[[], TrainingResults], stop: Callable[[], None]) -> TrainingResults | PendingTraining:
    """Train now, unless an event loop runs in this thread: then return an awaitable."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    return PendingTraining(run, stop)
