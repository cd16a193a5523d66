"""The training loop, for any loss and for models that learn from labels."""

from __future__ import annotations

import contextlib
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sonde.errors import OptionError
from sonde.store import layout, open_run
from sonde.store.layout import CAPTURES, KEPT, TEST, TEST_SCORES, VALIDATION_SCORES, epoch_folder
from sonde.training import checkpoints
from sonde.training.checkpoints import kept_random_state, kept_switches, seed_everything, seed_of
from sonde.training.datapoints import Datapoint, batch_size, grouped, to_device
from sonde.training.loaders import begin_epoch, num_batches
from sonde.training.moments import Moment
from sonde.training.scores import LossPerSample, Scores
from sonde.training.trainer_parts import TrainerParts

logger = logging.getLogger("sonde")

_FILLED: Final = (CAPTURES, KEPT)
"""The folders that a validation fills."""


class BaseTrainer(TrainerParts, ABC):
    """Trains a model for a number of epochs, validates it after each, and keeps checkpoints to resume from.

    A subclass implements `_compute_loss`; `SupervisedTrainer` suits most tasks as it is. Every part of the loop is a
    method that can be overridden and a moment that can be observed (`on`).

    Args:
        config: See `docs/training.md` for its keys.
        device: Where to train; `config["device"]`, CUDA if there is one, else the CPU.

    Raises:
        OptionError: A key of the config is missing, misspelt, or has an invalid value.

    """

    @abstractmethod
    def _compute_loss(self, dp: Datapoint) -> Tensor:
        """Run the model on a batch, put its output into `dp["outputs"]`, and return the scalar loss."""

    # ------------------------------------------------------------------ the run

    def run(self, *, resume: bool | None = None) -> dict[int, dict[str, float]]:
        """Train, and return the aggregated validation scores by epoch.

        Args:
            resume: Whether to resume a run that is in the work_dir; `config["resume"]` by default. A complete run is
                left as it is; without a run, a new one starts.

        Raises:
            RunExists: The work_dir holds a run, and `resume` is not set.

        """
        resume = bool(self.config.get("resume", False)) if resume is None else resume
        switches = {name: self.config.get(name) for name in ("deterministic", "detect_anomaly")}
        with kept_switches(**switches), self._kept_random_state(resume):
            try:
                self._init_components_(resume)
                # Before the session starts, since it measures updates against the parameters at its start.
                self._load_resume_point()
                if not self._is_complete:
                    self._run_watched()
            finally:
                self._close_debugger()
        return self.history

    def _run_watched(self) -> None:
        parts = {"loader": self.train_dataloader, "scheduler": self.scheduler, "scaler": self.precision.scaler}
        with self._watch(self.optimizer, **parts) as self.session:
            self._fire(Moment.before_run)
            self._run_epochs()
            self._test_epoch_()
            self._fire(Moment.after_run)

    @property
    def _is_complete(self) -> bool:
        is_trained = self.stop_reason is not None or self._resume_point.epoch >= self.tot_epochs
        is_tested = self.test_dataloader is None or self._test_results.is_file()
        return is_trained and is_tested and not self._was_cut_off

    @property
    def _was_cut_off(self) -> bool:
        """Whether the work_dir holds a run whose end has not been recorded."""
        return (self.work_dir / layout.HEADER).is_file() and open_run(self.work_dir).status == "crashed"

    @property
    def _test_results(self) -> Path:
        return self.work_dir / TEST / TEST_SCORES

    @property
    def num_steps(self) -> int | None:
        """The number of optimizer steps over all epochs; None if the loader has no length."""
        batches = num_batches(self.train_dataloader)
        return None if batches is None else self.tot_epochs * -(-batches // self.accumulation_steps)

    def stop(self, reason: str = "asked to stop") -> None:
        """Stop after this step. The epoch stays unfinished and is trained again when the run is resumed."""
        self.stop_reason = reason
        self._interrupted = True

    def _kept_random_state(self, resume: bool) -> contextlib.AbstractContextManager[None]:
        # A run with seeds restores the random state. Without seeds, training uses the process's generators.
        seeds = ("init_seed", "train_seeds", "val_seeds")
        seeded = resume or any(self.config.get(key) is not None for key in seeds)
        return kept_random_state() if seeded else contextlib.nullcontext()

    def _run_epochs(self) -> None:
        first = self._resume_point
        for epoch in range(first.epoch, self.tot_epochs):
            if self.stop_reason is not None:
                break
            self.cum_epochs = epoch
            self.session.epoch(epoch)
            self._fire(Moment.before_epoch)
            if not (epoch == first.epoch and first.is_trained):
                self._train_epoch_()
                if self._interrupted:
                    break
                self._save_checkpoint()
            self._val_epoch_()
            self._fire(Moment.after_epoch, split="val", scores=self.history.get(epoch, {}))
        if self.stop_reason is not None:
            self.session.event("stopped", self.stop_reason, {"epoch": self.cum_epochs})

    # ------------------------------------------------------------------ training

    def _train_epoch_(self) -> None:
        """Train one epoch."""
        self._before_train_loop()
        total = num_batches(self.train_dataloader)
        done = 0
        for batches in grouped(self.train_dataloader, self.accumulation_steps):
            self._train_step([self._datapoint(batch) for batch in batches], done, total)
            done += len(batches)
            if self._interrupted:
                return
        if not done:
            raise OptionError(
                f"The training loader gave no batches in epoch {self.cum_epochs}: it is empty, or an iterator that is "
                "exhausted. Use something that can be iterated in every epoch, such as a DataLoader or a list."
            )
        self._after_train_loop_()

    def _before_train_loop(self) -> None:
        """Prepare for training: seeds, the sampler's epoch, training mode, no captures."""
        checkpoints.set_aside(epoch_folder(self.work_dir, self.cum_epochs), _FILLED)
        seed = seed_of(self.config.get("train_seeds"), self.cum_epochs, "train_seeds")
        if seed is not None:
            seed_everything(seed)
        begin_epoch(self.train_dataloader, self.cum_epochs)
        self._captures.set_enabled(False)
        self.model.train()
        self._fire(Moment.before_train_loop, num_batches=num_batches(self.train_dataloader))

    def _after_train_loop_(self) -> None:
        """Finish the training of an epoch."""
        if self.scheduler is not None and self.scheduler_interval == "epoch" and not self._waits_for_scores:
            self.scheduler.step()
        self._fire(Moment.after_train_loop)

    def _train_step(self, datapoints: list[Datapoint], done: int, total: int | None) -> None:
        """Make one optimizer step over one batch or several."""
        where = {"batch": done, "num_batches": total}
        self._fire(Moment.before_train_step, **where)
        self.optimizer.zero_grad()
        losses = [
            self._forward_backward(dp, share, {**where, "batch": done + index})
            for index, (dp, share) in enumerate(zip(datapoints, _shares(datapoints), strict=True))
        ]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        self._fire(Moment.before_update, loss=loss, **where)
        self._update()
        self.cum_steps += 1
        self._fire(Moment.after_update, loss=loss, **where)
        self.session.log(loss=loss)
        where["batch"] = done + len(datapoints)
        self._fire(Moment.after_train_step, datapoint=datapoints[-1], loss=loss, **where)

    def _forward_backward(self, dp: Datapoint, share: float | None, where: dict[str, Any]) -> Tensor:
        """Run one batch forward and backward, and return its part of the step's loss."""
        to_device(dp, self.device)  # one batch at a time, so that accumulation saves memory
        self._fire(Moment.before_forward, datapoint=dp, **where)
        with self.precision.autocast():
            loss = self._compute_loss(dp)
            loss = loss if share is None else loss * share
        self._fire(Moment.after_forward, datapoint=dp, loss=loss.detach(), **where)
        self._fire(Moment.before_backward, datapoint=dp, loss=loss.detach(), **where)
        self.precision.backward(loss)
        self._fire(Moment.after_backward, datapoint=dp, loss=loss.detach(), **where)
        return loss.detach()

    def _update(self) -> None:
        """Clip gradients if configured, step the optimizer, and the scheduler if its interval is "step"."""
        norm, value = self.config.get("clip_grad_norm"), self.config.get("clip_grad_value")
        grad_norm = None
        if norm is not None or value is not None:
            self.precision.unscale(self.optimizer)
        if norm is not None:
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        if value is not None:
            torch.nn.utils.clip_grad_value_(self.model.parameters(), value)
        self.precision.update(self.optimizer)
        if grad_norm is not None:
            self.session.log(grad_norm=grad_norm)
        if self.scheduler is not None and self.scheduler_interval == "step" and not self._waits_for_scores:
            self.scheduler.step()

    # ------------------------------------------------------------------ validation

    def _val_epoch_(self) -> None:
        """Validate one epoch, without changing the random state of training."""
        if self.val_dataloader is None:
            self._end_epoch(self.cum_epochs, None)
            return
        with kept_random_state():
            seed = seed_of(self.config.get("val_seeds"), self.cum_epochs, "val_seeds")
            if seed is not None:
                seed_everything(seed)
            self._before_val_loop()
            try:
                self.scores = self._run_eval_loop(self.val_dataloader, "val", self._keeper)
                self._after_val_loop_()
            finally:
                self._close_keeper()

    def _before_val_loop(self) -> None:
        """Prepare for validation: captures are on in checkpoint epochs, and off in others."""
        folder = epoch_folder(self.work_dir, self.cum_epochs)
        self._captures.set_enabled(False)
        self._keeper = None
        if self.cum_epochs in self.checkpoint_indices:
            # An interrupted validation is repeated from the same checkpoint and gives the same captures.
            for name in _FILLED:
                shutil.rmtree(folder / name, ignore_errors=True)
            self._captures.begin(folder / CAPTURES, self.cum_epochs, "val")
            self._keeper = self._sample_keeper(folder / KEPT)
        self._fire(Moment.before_val_loop, split="val", num_batches=num_batches(self.val_dataloader))

    def _after_val_loop_(self) -> None:
        """Save captures, then scores: the scores list what is missing from the captures."""
        epoch = self.cum_epochs
        assert self.scores is not None
        folder = epoch_folder(self.work_dir, epoch)
        self._close_keeper()
        scores = self._captures.end(self.scores, self.monitor)
        scores.write(folder / VALIDATION_SCORES)
        self.session.log(**scores.flat("val_"))
        self._end_epoch(epoch, scores)
        self._fire(Moment.after_val_loop, split="val", scores=scores.aggregated)

    def _end_epoch(self, epoch: int, scores: Scores | None) -> None:
        """Finish an epoch: best score, learning rate, early stopping; delete checkpoints that are not kept.

        On resume it runs again with the scores of the last complete epoch, so it depends on nothing else.
        """
        is_best = False
        self.scores = scores
        if scores is not None:
            self.history[epoch] = scores.flat()
            is_best = self._judge(epoch, scores)
        folder = epoch_folder(self.work_dir, epoch)
        checkpoints.point_to(self.work_dir / checkpoints.LATEST, folder / checkpoints.CHECKPOINT)
        if is_best:
            checkpoints.point_to(self.work_dir / checkpoints.BEST, folder / checkpoints.CHECKPOINT)
        best = self.best.epoch if self.best is not None else None
        keep = {epoch, *self.checkpoint_indices} | ({best} if best is not None else set())
        checkpoints.drop_old_checkpoints(self.work_dir, keep)

    def _judge(self, epoch: int, scores: Scores) -> bool:
        flat = scores.flat()
        is_best = self.best is not None and self.best.update(epoch, _score(flat, self.monitor))
        if self._waits_for_scores:
            self.scheduler.step(_score(flat, self.monitor))
        stopping = self.early_stopping
        if stopping is not None and stopping.update(epoch, _score(flat, stopping.metric)):
            self.stop_reason = f"{stopping.metric} has not improved for {stopping.patience} epochs"
        return is_best

    @property
    def _waits_for_scores(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def _test_epoch_(self) -> None:
        """Evaluate the best checkpoint on the test dataset, if there is one. Nothing is captured."""
        if self.test_dataloader is None or self._interrupted or self._test_results.is_file():
            return
        with kept_random_state(), self._best_weights():
            if self.config.get("test_seed") is not None:
                seed_everything(self.config["test_seed"])
            self._captures.set_enabled(False)
            self._fire(Moment.before_test_loop, split="test", num_batches=num_batches(self.test_dataloader))
            scores = self._run_eval_loop(self.test_dataloader, "test")
            scores.write(self._test_results)
            self.session.log(**scores.flat("test_"))
            self._fire(Moment.after_test_loop, split="test", scores=scores.aggregated)

    @contextlib.contextmanager
    def _best_weights(self) -> Iterator[None]:
        best = self.work_dir / checkpoints.BEST
        if not best.exists():
            yield
            return
        latest = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(checkpoints.load_checkpoint(best, self.device)["model"])
        try:
            yield
        finally:
            self.model.load_state_dict(latest)

    # ------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self) -> None:
        """Write the epoch's checkpoint. It holds the state before the epoch's validation."""
        path = epoch_folder(self.work_dir, self.cum_epochs) / checkpoints.CHECKPOINT
        self._fire(Moment.before_checkpoint)
        self.session.flush()  # a run that resumes from this checkpoint has recorded every step before it
        checkpoints.save_checkpoint(path, self.state_dict())
        self._fire(Moment.after_checkpoint)

    def _load_resume_point(self) -> None:
        """Restore the state in which an earlier run was interrupted."""
        point = self._resume_point
        if point.checkpoint is None or point.trained_epoch is None:
            return
        self._read_history(point.trained_epoch)
        self.load_state_dict(point.checkpoint)
        if not point.is_trained:
            scores = self._scores_of(point.trained_epoch) if self.val_dataloader is not None else None
            self._end_epoch(point.trained_epoch, scores)
        self.cum_epochs = point.epoch
        logger.info("resuming %s in epoch %d", self.work_dir, point.epoch)

    def _read_history(self, last: int) -> None:
        for epoch in checkpoints.epochs_in(self.work_dir):
            if epoch < last and self._scores_path(epoch).is_file():
                self.history[epoch] = self._scores_of(epoch).flat()

    def _scores_of(self, epoch: int) -> Scores:
        return Scores.read(self._scores_path(epoch))

    def _scores_path(self, epoch: int) -> Path:
        return epoch_folder(self.work_dir, epoch) / VALIDATION_SCORES


def _shares(datapoints: list[Datapoint]) -> list[float | None]:
    """Return the weight of each batch's mean loss in the mean over all samples of a step; None for a single batch."""
    if len(datapoints) == 1:
        return [None]
    sizes = [batch_size(dp) for dp in datapoints]
    return [size / sum(sizes) for size in sizes]


def _score(flat: Mapping[str, float], name: str | None) -> float:
    if name is None or name not in flat:
        raise OptionError(f"The validation has no score {name!r}; it has {', '.join(flat) or 'none'}. Check 'monitor'.")
    return flat[name]


class SupervisedTrainer(BaseTrainer):
    """Trains `model(inputs)` on `criterion(outputs, labels)`.

    Without a `metric`, validation scores the loss of every sample.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = (*BaseTrainer.REQUIRED, "criterion")

    def _init_metric(self) -> None:
        super()._init_metric()
        if self.metric is None:
            self.metric = LossPerSample(self.criterion)

    def _compute_loss(self, dp: Datapoint) -> Tensor:
        dp["outputs"] = self._forward(dp)
        try:
            loss: Tensor = self.criterion(dp["outputs"], dp["labels"])
        except (AttributeError, TypeError) as error:
            if dp.get("labels") is not None:
                raise
            raise OptionError(
                "The training loader returned a batch without labels, which the criterion needs. Return "
                "(inputs, labels) or {'inputs': ..., 'labels': ...}, or override _compute_loss."
            ) from error
        return loss
