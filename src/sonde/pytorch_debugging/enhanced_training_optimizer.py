"""The training optimizer: `sonde.training` with logging, debugging, early stopping, checkpoints and resuming."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from sonde.errors import OptionError, RunExists
from sonde.parallel.ranks import agree, is_connected, num_ranks
from sonde.pytorch_debugging.debugger import PyTorchDebugger
from sonde.pytorch_debugging.training_logger import TrainingLogger, checked_name
from sonde.pytorch_debugging.training_options import PendingTraining, TrainingOptions, TrainingResults, begin
from sonde.training import Glimpse, Moment, SupervisedTrainer, load_checkpoint
from sonde.training.checkpoints import BEST, LATEST, model_state, save_checkpoint

INTERRUPTED: Final = "checkpoint_interrupted.pt"


class _Trainer(SupervisedTrainer):
    """A trainer that saves its state when it is stopped in the middle of an epoch."""

    def _run_epochs(self) -> None:
        super()._run_epochs()
        if self._interrupted:
            save_checkpoint(self.work_dir / INTERRUPTED, self.state_dict())


class EnhancedTrainingOptimizer:
    """Trains a model on the batches of a loader.

    The run (statistics of every tensor, findings, checkpoints) is in `checkpoint_dir/experiment_name` and opens with
    `sonde.open_run`; the logs are in `log_dir`.

    Args:
        model: The model.
        train_loader: Yields `(inputs, targets)`, or dicts with `inputs` and `labels`.
        val_loader: The same for validation; without one there is no early stopping.
        experiment_name: The name of the run and its logs; by default the time of the start, on which the ranks of a
            distributed training agree.
        log_dir: The folder for the logs.
        log_level: The lowest level in the text log.
        device: `"auto"` uses CUDA if there is a device.
        debug_mode: Whether to check gradients at every step and parameters after every epoch.
        enable_pytorch_debugging: Whether to use a `PyTorchDebugger`, whose events and report are in `log_dir`.
        enable_profiling: Whether to profile the first steps; the trace is in `log_dir`.
        kwargs: See `TrainingOptions`.

    Example:
        optimizer = create_enhanced_training_optimizer(model, train_loader, val_loader, max_epochs=3)
        results = optimizer.train()          # or: results = await optimizer.train()

    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any,
        val_loader: Any = None,
        experiment_name: str | None = None,
        log_dir: str | Path = "logs",
        log_level: int | str = "INFO",
        device: str | torch.device = "auto",
        debug_mode: bool = False,
        enable_pytorch_debugging: bool = False,
        enable_profiling: bool = False,
        *,
        clock: Callable[[], float] = time.perf_counter,
        **kwargs: Any,
    ) -> None:
        _check_parts(model, train_loader)
        self.options = TrainingOptions.from_arguments(kwargs)
        self.model = model
        self.experiment_name = checked_name(experiment_name) or _choose_name(Path(self.options.checkpoint_dir))
        self.work_dir = Path(self.options.checkpoint_dir) / self.experiment_name
        self.debug_mode = debug_mode
        # Before any file is opened: an invalid option must leave no file behind.
        config = self.options.trainer_config(model, train_loader, val_loader, self.work_dir)
        self.trainer = _Trainer(config, None if device == "auto" else device)
        self.logger = TrainingLogger(log_dir, self.experiment_name, log_level, clock=clock)
        self.debugger: PyTorchDebugger | None = None
        if debug_mode or enable_pytorch_debugging or enable_profiling:
            self.debugger = PyTorchDebugger(
                self.logger,
                debug_mode=debug_mode,
                enable_anomaly_detection=enable_pytorch_debugging,
                enable_profiling=enable_profiling,
                enable_memory_tracking=enable_pytorch_debugging,
                enable_gradient_checking=debug_mode or enable_pytorch_debugging,
                log_dir=str(Path(log_dir) / f"{self.experiment_name}_debug"),
            )
        self.results: TrainingResults | None = None
        self._clock = clock
        self._epoch_began = 0.0
        self._unlogged: tuple[int, int, torch.Tensor] | None = None
        self._observe()

    # ------------------------------------------------------------------ training

    def train(self, resume_from: str | os.PathLike[str] | bool | None = None) -> TrainingResults | PendingTraining:
        """Train and return the results.

        If an event loop runs in this thread, the training starts when the result is awaited, in its own thread;
        cancelling the task stops it after the current step and saves its state. Otherwise the call blocks, and its
        result can be awaited too.

        Args:
            resume_from: True, the run's folder or a checkpoint in it resumes that run. The weights of any other
                checkpoint are loaded into the model, and a new training starts with them.

        """
        return begin(lambda: self.run(resume_from), lambda: self.trainer.stop("cancelled"))

    def run(self, resume_from: str | os.PathLike[str] | bool | None = None) -> TrainingResults:
        """Train, blocking; see `train`."""
        resume = self._prepare(resume_from)
        scopes = contextlib.nullcontext() if self.debugger is None else self.debugger._enabled_scopes()
        with self.logger.training_context(self._described()), scopes:
            began = self._clock()
            history = self.trainer.run(resume=resume)
            self.results = self._results(history, self._clock() - began)
            if self.trainer.stop_reason is not None:
                self.logger.log_early_stopping(self.trainer.stop_reason, self.trainer.cum_epochs)
        if self.debugger is not None:
            self.debugger._notes.take_findings(self.trainer.session.findings)
            self.debugger.save_debug_report()
        return self.results

    def get_training_summary(self) -> dict[str, Any]:
        """Return the state of the training: options, progress, best epoch and findings."""
        trainer = self.trainer
        best = trainer.best
        return {
            "experiment_name": self.experiment_name,
            "run": str(self.work_dir),
            "options": self._described(),
            "epochs_completed": len(self.logger.epochs),
            "steps": trainer.cum_steps,
            "best_epoch": None if best is None else best.epoch,
            "best_score": None if best is None else best.score,
            "monitor": trainer.monitor,
            "stop_reason": trainer.stop_reason,
            "final_metrics": dict(self.logger.last_metrics),
            "duration": self.logger.duration,
            "num_errors": self.logger.num_errors,
            "findings": [finding.to_json() for finding in trainer.session.findings],
            "debug_summary": None if self.debugger is None else self.debugger.get_debug_summary(),
        }

    def create_training_visualizations(self) -> Path | None:
        """Plot the training's curves into an HTML page; return its path."""
        return self.logger.create_training_visualizations()

    def cleanup(self) -> None:
        """Close the debugger and the logs. It can be called twice."""
        if self.debugger is not None:
            self.debugger.close()
        self.logger.close()

    # ------------------------------------------------------------------ inside

    def _prepare(self, resume_from: str | os.PathLike[str] | bool | None) -> bool:
        """Return whether to resume the run in the work_dir; load weights from elsewhere."""
        # Only the first rank checks: it may have started its run before the others get here.
        if not resume_from and self.logger.rank == 0 and (self.work_dir / "run.json").exists():
            raise RunExists(
                f"{self.work_dir} holds the run of an earlier training. Resume it with train(resume_from=True), or "
                "choose another experiment_name."
            )
        if resume_from is None or isinstance(resume_from, bool):
            return bool(resume_from)
        path = Path(resume_from)
        if not path.exists():
            raise OptionError(f"resume_from={str(path)!r}: there is no such checkpoint or run.")
        inside = path.resolve() == self.work_dir.resolve() or self.work_dir.resolve() in path.absolute().parents
        if inside:
            return True
        source = path / LATEST if path.is_dir() else path
        self.model.load_state_dict(model_state(load_checkpoint(source)))
        self.logger.log_event("checkpoint_load", f"weights of {source}", {"path": str(source)})
        return False

    def _observe(self) -> None:
        on = self.trainer.on
        on(Moment.before_epoch, self._begin_epoch)
        on(Moment.after_train_step, self._see_step)
        on(Moment.after_checkpoint, self._see_checkpoint)
        on(Moment.after_epoch, self._end_epoch)
        if self.debugger is not None and self.debugger.enable_gradient_checking:
            on(Moment.before_update, self._check_gradients)

    def _begin_epoch(self, glimpse: Glimpse) -> None:
        self._epoch_began = self.logger.begin_epoch(glimpse.epoch, self.options.max_epochs)

    def _see_step(self, glimpse: Glimpse) -> None:
        self._unlogged = None if glimpse.loss is None else (glimpse.epoch, glimpse.step, glimpse.loss.detach())
        if glimpse.step % self.options.log_interval == 0:
            self._log_loss()

    def _log_loss(self) -> None:
        """Log the loss of the last step, once. In an epoch shorter than the interval it is the only one."""
        if self._unlogged is not None:
            (epoch, step, loss), self._unlogged = self._unlogged, None
            rate = float(self.trainer.optimizer.param_groups[0]["lr"])
            self.logger.log_metrics({"loss": float(loss), "learning_rate": rate}, step=step, epoch=epoch)

    def _check_gradients(self, glimpse: Glimpse) -> None:
        assert self.debugger is not None
        step = glimpse.step + 1  # the current one, under which its loss will be logged as well
        norm = self.debugger._check_gradients(self.model, step=step)
        if norm is not None and step % self.options.log_interval == 0:
            self.logger.log_metrics({"gradient_norm": norm}, step=step, epoch=glimpse.epoch)

    def _see_checkpoint(self, glimpse: Glimpse) -> None:
        self.logger.log_checkpoint(self.trainer.work_dir / f"epoch_{glimpse.epoch}" / "checkpoint.pt", glimpse.epoch)

    def _end_epoch(self, glimpse: Glimpse) -> None:
        self._log_loss()
        numbers = {name: value for name, value in glimpse.scores.items() if isinstance(value, int | float)}
        if numbers:
            self.logger.log_validation_metrics(numbers, glimpse.epoch)
        if self.debugger is not None and self.debug_mode:
            self.debugger.check_model_parameters(self.model)
        self.logger.end_epoch(glimpse.epoch, self._epoch_began, self.options.max_epochs)

    def _described(self) -> dict[str, Any]:
        plain = {name: getattr(self.options, name) for name in self.options.__dataclass_fields__}
        return {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str)}

    def _results(self, history: dict[int, dict[str, float]], duration: float) -> TrainingResults:
        trainer = self.trainer
        best = None if trainer.best is None else trainer.best.epoch
        results = TrainingResults(
            run=str(self.work_dir),
            history={epoch: dict(scores) for epoch, scores in history.items()},
            epochs=max(history, default=trainer.cum_epochs) + 1 if history else trainer.cum_epochs,
            steps=trainer.cum_steps,
            duration=duration,
            stop_reason=trainer.stop_reason,
            final_metrics=dict(self.logger.last_metrics),
            findings=[finding.to_json() for finding in trainer.session.findings],
        )
        if best is not None:
            results |= {"best_epoch": best, "best_metrics": dict(history.get(best, {}))}
        for name, link in (("best_checkpoint", BEST), ("latest_checkpoint", LATEST)):
            if (trainer.work_dir / link).exists():
                results[name] = str(trainer.work_dir / link)
        return results


def _check_parts(model: Any, loader: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model takes a torch.nn.Module; got {type(model).__name__}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(f"{type(model).__name__} has no parameters to train: it has none, or all are frozen.")
    if not isinstance(loader, Iterable):
        raise OptionError(f"train_loader takes something that gives batches; got {type(loader).__name__}.")
    if isinstance(loader, Sized) and not len(loader):
        raise OptionError("train_loader gives no batches: there is nothing to train on.")


def create_enhanced_training_optimizer(
    model: nn.Module, train_loader: Any, val_loader: Any = None, **kwargs: Any
) -> EnhancedTrainingOptimizer:
    """Return a training optimizer; see `EnhancedTrainingOptimizer` for its arguments."""
    return EnhancedTrainingOptimizer(model, train_loader, val_loader, **kwargs)


async def train_model_with_logging(
    model: nn.Module,
    train_loader: Any,
    val_loader: Any = None,
    resume_from: str | os.PathLike[str] | bool | None = None,
    **kwargs: Any,
) -> TrainingResults:
    """Train a model, close the logs and return the results."""
    optimizer = create_enhanced_training_optimizer(model, train_loader, val_loader, **kwargs)
    try:
        return await optimizer.train(resume_from)
    finally:
        optimizer.cleanup()


def _choose_name(folder: Path) -> str:
    """Return a name that no run in the folder has: the time. The ranks of a training agree on it."""
    if num_ranks() == 1:
        return _free_name(folder)
    if not is_connected():
        raise OptionError(
            f"experiment_name is missing, and {num_ranks()} processes train together (WORLD_SIZE): each would take the "
            "time of its own start. Pass experiment_name, or call torch.distributed.init_process_group before."
        )
    return agree(f"training/{folder}", lambda: _free_name(folder)) or _free_name(folder)


def _free_name(folder: Path) -> str:
    base = time.strftime("training-%Y%m%d-%H%M%S")
    name, number = base, 1
    while (folder / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name
