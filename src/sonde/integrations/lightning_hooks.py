"""The hooks of Lightning's callbacks, for both packages in which Lightning comes."""

from __future__ import annotations

import logging
import os
from typing import Any, Unpack

from sonde.integrations.recorder import Recorder, plain_settings
from sonde.options import Keywords


class LightningHooks:
    """Records a LightningModule, its optimizers, `self.log`, epochs and checkpoints; reports findings while it trains.

    Args:
        run: The folder to write; see `sonde.watch`.
        **options: Options of `sonde.watch`.

    """

    def __init__(self, run: str | os.PathLike[str] = "runs/lightning-*", **options: Unpack[Keywords]) -> None:
        self._recorder = Recorder(run, self._report, options)
        self._trainer: Any = None
        self._logged: dict[str, Any] = {}
        self._step_names: set[str] = set()

    @property
    def session(self) -> Any:
        """The session, once training has begun."""
        return self._recorder.session

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording, before the sanity check of validation."""
        self._trainer = trainer
        self._open(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording, where that had to wait for a checkpoint to be loaded."""
        self._open(trainer, pl_module, is_restored=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the epoch, and what was logged for the one before: its metrics are complete only now."""
        self._record_metrics(trainer)
        self._recorder.epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss that `training_step` returned, and what was logged."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            # Lightning has divided it for gradient accumulation.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._recorder.log({"loss": loss.detach() * parts if parts > 1 else loss.detach()})
        self._record_metrics(trainer, of_step=True)
        self._recorder.report_findings()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what validation has logged."""
        if not trainer.sanity_checking:
            self._record_metrics(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what was logged last."""
        self._record_metrics(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Record that a checkpoint is saved; nothing is added to it."""
        step = trainer.global_step
        self._recorder.event("checkpoint", f"checkpoint at global step {step}", {"global_step": step})

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the run of a training that failed or was interrupted."""
        self._recorder.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finish the run."""
        if stage == "fit":
            self._recorder.close()
            self._trainer = None

    def _open(self, trainer: Any, pl_module: Any, *, is_restored: bool = False) -> None:
        if trainer.ckpt_path is not None and not is_restored:
            return  # its steps and weights are loaded later
        # Optimizers are found when they step: some strategies make them late.
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        self._recorder.open(
            pl_module,
            trainer.optimizers,
            steps_before=trainer.global_step,
            scheduler=schedulers[0] if len(schedulers) == 1 else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            config=plain_settings(dict(pl_module.hparams)),
        )

    def _record_metrics(self, trainer: Any, *, of_step: bool = False) -> None:
        """Record the metrics that are new.

        Lightning's list keeps those of earlier moments as the same tensors. Metrics of steps are recorded at steps
        only: at the end of an epoch the list has the last of them, or their mean, once more.
        """
        metrics = dict(trainer.callback_metrics)
        new = {name: value for name, value in metrics.items() if self._logged.get(name) is not value}
        self._logged = metrics
        if of_step:
            self._step_names.update(new)
        else:
            new = {name: value for name, value in new.items() if name not in self._step_names}
        self._recorder.log({name: value for name, value in new.items() if name != "loss"})

    def _report(self, line: str) -> None:
        bar = getattr(self._trainer, "progress_bar_callback", None)
        if bar is not None and getattr(bar, "is_enabled", False):
            bar.print(line)
        else:
            logging.getLogger("lightning.pytorch").warning(line)
        for logger in getattr(self._trainer, "loggers", ()):
            logger.log_metrics({"sonde/findings": len(self._recorder.findings)}, step=self._trainer.global_step)
