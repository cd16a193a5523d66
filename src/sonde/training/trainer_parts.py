"""The components of a trainer: how each is built from the config, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sonde.core.arguments import whole_number
from sonde.errors import OptionError, RunExists
from sonde.store import layout
from sonde.training import checkpoints
from sonde.training.checkpoints import ResumePoint, random_state, restore_random_state, seed_everything
from sonde.training.config import TRAINER_KEYS, build_from_config, check_choice
from sonde.training.early_stopping import BestScore, EarlyStopping, direction_of, early_stopping_from
from sonde.training.loaders import build_loader, loader_state, restore_loader_state
from sonde.training.runner import Runner
from sonde.training.scores import Scores, directions_of


class TrainerParts(Runner):
    """The components of a trainer. `BaseTrainer` adds the loop."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("work_dir", "epochs", "model", "optimizer")
    KNOWN: ClassVar[tuple[str, ...]] = TRAINER_KEYS

    def __init__(self, config: Mapping[str, Any], device: str | torch.device | None = None) -> None:
        super().__init__(config, device)
        self.tot_epochs = whole_number("epochs", self.config.get("epochs", 1))
        self.accumulation_steps = whole_number("accumulation_steps", self.config.get("accumulation_steps", 1))
        self.scheduler_interval = check_choice(self.config, "scheduler_interval", ("epoch", "step"))
        self.checkpoint_indices: list[int] = []
        self.train_dataloader: Any = None
        self.val_dataloader: Any = None
        self.test_dataloader: Any = None
        self.criterion: Any = None
        self.optimizer: torch.optim.Optimizer
        self.scheduler: Any = None
        self.early_stopping: EarlyStopping | None = None
        self.best: BestScore | None = None
        self.history: dict[int, dict[str, float]] = {}
        """The aggregated validation scores of every epoch."""
        self.scores: Scores | None = None
        """The scores of the last validation, sample by sample."""
        self.stop_reason: str | None = None
        self._resume_point = ResumePoint()
        self._interrupted = False
        self._init_checkpoint_indices()

    # ------------------------------------------------------------------ parts

    def _init_components_(self, resume: bool) -> None:
        """Build all components, in this order."""
        self._init_state(resume)
        if self.config.get("init_seed") is not None:
            seed_everything(self.config["init_seed"])
        self._init_dataloaders()
        self._init_criterion()
        self._init_metric()
        self._init_model()
        self._init_optimizer()
        self._init_scheduler()
        self._init_debugger()
        self._init_captures()
        self._init_early_stopping()

    def _init_checkpoint_indices(self) -> None:
        """Compute from `checkpoint_method` the epochs whose checkpoint is kept and whose captures are saved."""
        method = self.config.get("checkpoint_method", "latest")
        self.checkpoint_indices = checkpoints.checkpoint_indices(self.tot_epochs, method)

    def _init_state(self, resume: bool) -> None:
        """Find the epoch to start with."""
        self.stop_reason, self._interrupted = None, False
        self.history, self.scores = {}, None
        if not resume and ((self.work_dir / layout.HEADER).exists() or checkpoints.epochs_in(self.work_dir)):
            raise RunExists(
                f"{self.work_dir} holds a run already. Resume it (--resume, or run(resume=True)), "
                "or choose another work_dir."
            )
        validates = any(self.config.get(f"val_{part}") is not None for part in ("dataset", "dataloader"))
        if resume:
            self._resume_point = checkpoints.find_resume_point(self.work_dir, validates=validates)
        self.cum_epochs = self._resume_point.epoch
        self.cum_steps = int((self._resume_point.checkpoint or {}).get("step", 0))
        self._write_config()

    def _init_dataloaders(self) -> None:
        """Build the loaders of all splits in the config."""
        self.train_dataloader = build_loader(self.config, "train")
        self.val_dataloader = build_loader(self.config, "val")
        self.test_dataloader = build_loader(self.config, "test")
        if self.train_dataloader is None:
            raise OptionError("The config lacks 'train_dataset' (or a 'train_dataloader' that is built already).")

    def _init_criterion(self) -> None:
        """Build `criterion`, if there is one."""
        self.criterion = build_from_config(self.config.get("criterion"))
        if isinstance(self.criterion, torch.nn.Module):
            self.criterion = self.criterion.to(self.device)

    def _init_optimizer(self) -> None:
        """Build `optimizer` over the model's parameters, or those that the function `params` of its args selects."""
        described = self.config["optimizer"]
        args = described.get("args", {}) if isinstance(described, Mapping) else {}
        pick = args.get("params")
        params = pick(self.model) if callable(pick) else self.model.parameters()
        built = build_from_config(described, params=params)
        if not isinstance(built, torch.optim.Optimizer):
            raise OptionError(f"'optimizer' describes a {type(built).__name__}; it must be a torch optimizer.")
        self.optimizer = built

    def _init_scheduler(self) -> None:
        """Build `scheduler` around the optimizer, if there is one."""
        described = self.config.get("scheduler")
        self.scheduler = None if described is None else build_from_config(described, optimizer=self.optimizer)

    def _init_early_stopping(self) -> None:
        """Build `early_stopping`, and the record of the best epoch."""
        directions = directions_of(self.metric)
        described = self.config.get("early_stopping")
        self.early_stopping = early_stopping_from(described, directions, self.monitor)
        if self.monitor is not None and self.val_dataloader is not None:
            self.best = BestScore(direction_of(self.monitor, directions))

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return all state that further training depends on."""
        return {
            "epoch": self.cum_epochs,
            "step": self.cum_steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else {},
            "scaler": self.precision.state_dict(),
            "random": random_state(),
            "loader": loader_state(self.train_dataloader),
            "best": self.best.state_dict() if self.best is not None else {},
            "early_stopping": self.early_stopping.state_dict() if self.early_stopping is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.cum_epochs, self.cum_steps = int(state["epoch"]), int(state["step"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"]:
            self.scheduler.load_state_dict(state["scheduler"])
        self.precision.load_state_dict(state["scaler"])
        restore_loader_state(self.train_dataloader, state["loader"])
        if self.best is not None and state["best"]:
            self.best.load_state_dict(state["best"])
        if self.early_stopping is not None and state["early_stopping"]:
            self.early_stopping.load_state_dict(state["early_stopping"])
        restore_random_state(dict(state["random"]))
