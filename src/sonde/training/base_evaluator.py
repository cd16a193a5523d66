"""Evaluate a model on a dataset, and capture every sample."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sonde.errors import OptionError, RunExists
from sonde.store import layout
from sonde.store.layout import CAPTURES, EVALUATION_SCORES, KEPT
from sonde.training import checkpoints
from sonde.training.checkpoints import kept_random_state, kept_switches, seed_everything
from sonde.training.config import EVALUATOR_KEYS
from sonde.training.loaders import build_loader, num_batches
from sonde.training.moments import Moment
from sonde.training.runner import Runner
from sonde.training.scores import Scores


class BaseEvaluator(Runner):
    """Evaluates a model, from a checkpoint if the config names one, and saves what the debugger captures.

    Args:
        config: See `docs/training.md` for its keys.
        device: Where to run; `config["device"]`, CUDA if there is one, else the CPU.

    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("work_dir", "model", "metric")
    KNOWN: ClassVar[tuple[str, ...]] = EVALUATOR_KEYS
    WATCHED: ClassVar[tuple[str, ...]] = ("parameters", "outputs")

    def __init__(self, config: Mapping[str, Any], device: str | torch.device | None = None) -> None:
        super().__init__(config, device)
        self.eval_dataloader: Any = None
        self.scores: Scores | None = None

    def run(self, *, overwrite: bool | None = None) -> Scores:
        """Evaluate, and return the scores.

        Args:
            overwrite: Whether to replace an evaluation that is in the work_dir; `config["overwrite"]` by default. An
                evaluation that was interrupted is always replaced.

        Raises:
            RunExists: The work_dir holds a finished evaluation or a training run, and `overwrite` is not set.

        """
        overwrite = bool(self.config.get("overwrite", False)) if overwrite is None else overwrite
        switches = {name: self.config.get(name) for name in ("deterministic", "detect_anomaly")}
        with kept_switches(**switches), kept_random_state():
            try:
                self._init_components_(overwrite)
                with self._watch(None, loader=self.eval_dataloader) as self.session:
                    self._fire(Moment.before_run, split="eval")
                    self.scores = self._eval_epoch_()
                    self._fire(Moment.after_run, split="eval", scores=self.scores.aggregated)
            finally:
                self._close_debugger()
        return self.scores

    def _init_components_(self, overwrite: bool) -> None:
        """Build all components, in this order."""
        self._init_work_dir(overwrite)
        if self.config.get("seed") is not None:
            seed_everything(self.config["seed"])
        self._init_dataloader()
        self._init_metric()
        self._init_model()
        self._load_checkpoint()
        self._init_debugger()
        self._init_captures()

    def _init_work_dir(self, overwrite: bool) -> None:
        """Remove the results of an earlier evaluation; those of a training run are never touched."""
        if checkpoints.epochs_in(self.work_dir):
            raise RunExists(f"{self.work_dir} holds a training run; give the evaluation a work_dir of its own.")
        if (self.work_dir / EVALUATION_SCORES).exists() and not overwrite:
            raise RunExists(
                f"{self.work_dir} holds an evaluation already. Choose another work_dir, or replace it (--overwrite, "
                "or run(overwrite=True))."
            )
        for name in (CAPTURES, KEPT, layout.TELEMETRY):
            shutil.rmtree(self.work_dir / name, ignore_errors=True)
        for name in (EVALUATION_SCORES, layout.HEADER, layout.EVENTS, layout.FINDINGS):
            (self.work_dir / name).unlink(missing_ok=True)
        self._write_config()

    def _init_dataloader(self) -> None:
        """Build the loader of `eval_dataset`."""
        self.eval_dataloader = build_loader(self.config, "eval")
        if self.eval_dataloader is None:
            raise OptionError("The config lacks 'eval_dataset' (or an 'eval_dataloader' that is built already).")

    def _load_checkpoint(self) -> None:
        """Load `checkpoint_filepath` into the model, if there is one."""
        path = self.config.get("checkpoint_filepath")
        if path is not None:
            loaded = checkpoints.load_checkpoint(path, self.device)
            self.model.load_state_dict(checkpoints.model_state(loaded))

    def _eval_epoch_(self) -> Scores:
        """Evaluate everything, with the debugger on."""
        self._captures.begin(self.work_dir / CAPTURES, None, "eval")
        self._keeper = self._sample_keeper(self.work_dir / KEPT)
        self._fire(Moment.before_eval_loop, split="eval", num_batches=num_batches(self.eval_dataloader))
        try:
            self.scores = self._run_eval_loop(self.eval_dataloader, "eval", self._keeper)
            self._after_eval_loop_()
        finally:
            self._close_keeper()
        self._fire(Moment.after_eval_loop, split="eval", scores=self.scores.aggregated)
        return self.scores

    def _after_eval_loop_(self) -> None:
        """Save captures, then scores: the scores list what is missing from the captures."""
        assert self.scores is not None
        self._close_keeper()
        self.scores = scores = self._captures.end(self.scores, self.monitor)
        scores.write(self.work_dir / EVALUATION_SCORES)
        self.session.log(**scores.flat("eval_"))
        self.session.step()  # no optimizer does: the whole evaluation counts as one step
