"""Record the training of a Hugging Face `Trainer`, and of those built on it (TRL's `SFTTrainer` and others).

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[SondeCallback(run="runs/bert")])

Logged numbers get the names that the Trainer's own integrations use: `train/loss`, `eval/loss`. The loss of every step
is `loss`, from the model's own output.
"""

from __future__ import annotations

import os
from typing import Any, Unpack

from sonde.errors import MissingExtra
from sonde.integrations.recorder import Recorder, plain_settings
from sonde.options import Keywords

try:
    from transformers import TrainerCallback
    from transformers.integrations.integration_utils import rewrite_logs
    from transformers.utils import logging
except ImportError as error:
    raise MissingExtra("transformers", "transformers", "sonde.integrations.transformers") from error


class SondeCallback(TrainerCallback):  # type: ignore[misc] # its package is not needed for checking types
    """Records a Trainer's model, optimizer, logged numbers, epochs and checkpoints; reports findings in its log.

    Args:
        run: The folder to write; see `sonde.watch`.
        **options: Options of `sonde.watch`.

    """

    def __init__(self, run: str | os.PathLike[str] = "runs/transformers-*", **options: Unpack[Keywords]) -> None:
        self._recorder = Recorder(run, logging.get_logger("transformers.sonde").warning, options)

    @property
    def session(self) -> Any:
        """The session, once training has begun."""
        return self._recorder.session

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Start recording."""
        optimizer = parts.get("optimizer")
        self._recorder.open(
            parts["model"],
            [] if optimizer is None else [optimizer],
            steps_before=state.global_step,
            scheduler=parts.get("lr_scheduler"),
            loader=parts.get("train_dataloader"),
            config=plain_settings(args.to_sanitized_dict()),
            steps_by_hand=True,
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Record the epoch."""
        self._recorder.epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """End the step with the Trainer's number, and report what was found."""
        self._recorder.step(state.global_step)
        self._recorder.report_findings()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:
        """Record what the Trainer logs: its loss is the rounded mean of the steps since it logged last."""
        self._recorder.log_means(rewrite_logs(dict(logs or {})))

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Record the checkpoint."""
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        self._recorder.event("checkpoint", path, {"path": path})

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Finish the run."""
        self._recorder.close()
        for finding in self._recorder.findings:  # in the Trainer's own log, which is saved beside checkpoints
            entry = {"sonde_finding": finding.kind, "severity": finding.severity, "step": finding.step}
            if entry not in state.log_history:
                state.log_history.append(entry)
