"""The common base of trainers and evaluators: config, model, debugger, moments, and the evaluation loop."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from sonde.core import files
from sonde.core.arguments import whole_number
from sonde.errors import OptionError, RunError
from sonde.hooks.guard import Guard, OnError, warn_of_fault
from sonde.options import OPTION_NAMES
from sonde.parallel.ranks import folder_of, this_rank
from sonde.record.plan import DEFAULT_WHAT
from sonde.session import IdleSession, Session
from sonde.store import layout
from sonde.training.config import SHARED_KEYS, build_from_config, check_config, describe
from sonde.training.datapoints import Datapoint, as_datapoint, batch_size, to_device
from sonde.training.loaders import num_batches
from sonde.training.moments import Glimpse, Moment, Moments, Observation, Observer, Split
from sonde.training.samples import Captures, SampleKeeper, build_debugger, sample_options
from sonde.training.scores import Metrics, ScoreBook, Scores, directions_of
from sonde.watching import watch

# --------------------------------------------------------------------------------
# Mixed precision: autocast around the forward, and a gradient scaler where the format needs one.


_FORMATS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of the forward and backward pass.

    Args:
        amp: None for full precision, `"bf16"` or `"fp16"`. Only fp16 needs a scaler: its range is small.
        device: Where the model is.

    Raises:
        OptionError: There is no such format.

    """

    def __init__(self, amp: str | None, device: torch.device) -> None:
        if amp is not None and amp not in _FORMATS:
            raise OptionError(f"amp={amp!r}: choose 'bf16', 'fp16' or None.")
        self.dtype = None if amp is None else _FORMATS[amp]
        self._device = device
        self.scaler: torch.amp.GradScaler | None = torch.amp.GradScaler(device.type) if amp == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for the model and the criterion, for one thread."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call] # torch

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients, so that they can be clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless the scaler found an infinity."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


# --------------------------------------------------------------------------------
# The loop over a dataset without gradients, used by validation, test and evaluation alike.


_WAITING_PER_JOB = 2


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode; at the end every module returns to the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def eval_steps(datapoints: Iterable[Datapoint], step: Callable[[Datapoint], Any], jobs: int = 1) -> Iterator[Datapoint]:
    """Run `step` on every datapoint and yield them in order, with several threads if `jobs` is above 1.

    Each datapoint is used by one thread only. Only a few are in progress at a time, so memory does not grow with the
    dataset. An error in a step is raised here, in order.
    """
    if jobs == 1:
        for datapoint in datapoints:
            with torch.no_grad():
                step(datapoint)
            yield datapoint
        return
    with ThreadPoolExecutor(jobs, thread_name_prefix="sonde-eval") as pool:
        waiting: deque[Future[Datapoint]] = deque()
        try:
            for datapoint in datapoints:
                waiting.append(pool.submit(_run_one, step, datapoint))
                if len(waiting) >= jobs * _WAITING_PER_JOB:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _run_one(step: Callable[[Datapoint], Any], datapoint: Datapoint) -> Datapoint:
    with torch.no_grad():  # set for each thread, like autocast
        step(datapoint)
    return datapoint


# --------------------------------------------------------------------------------
# What the config asks to be recorded.


# Options of `watch` that a runner sets itself.
_OWN_OPTIONS: Final = {"resume", "start_step", "loss_fn", "loader", "scheduler", "scaler", "config"}
_OPTIONS: Final = OPTION_NAMES - _OWN_OPTIONS


def watch_options(option: Any, what: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of `sonde.watch` that a config's `watch` asks for: a dict, True, False or None.

    Args:
        option: The value in the config.
        what: What to record by default.

    Raises:
        OptionError: It names something that `watch` does not take.

    """
    if option is None or option is True:
        return {"what": what}
    if option is False:
        return {"enabled": False}
    if not isinstance(option, Mapping):
        raise OptionError(f"watch takes a dict of options, True or False; got {option!r:.80}.")
    for key in option:
        if key not in _OPTIONS:
            near = get_close_matches(str(key), _OPTIONS, n=1) or sorted(_OPTIONS)
            raise OptionError(f"watch has no option {key!r} (nearest: {', '.join(near)}).")
    return {"what": what, **option}


# --------------------------------------------------------------------------------


logger = logging.getLogger("sonde")


class Runner:
    """Builds what a config describes and runs it. Subclasses define the order.

    Args:
        config: See `docs/training.md` for its keys.
        device: Where to run; `config["device"]`, CUDA if there is one, else the CPU.

    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("work_dir", "model")
    KNOWN: ClassVar[tuple[str, ...]] = SHARED_KEYS
    WATCHED: ClassVar[tuple[str, ...]] = DEFAULT_WHAT
    """What is recorded by default."""

    def __init__(self, config: Mapping[str, Any], device: str | torch.device | None = None) -> None:
        self.config = check_config(config, required=self.REQUIRED, known=self.KNOWN)
        self.run_dir = Path(self.config["work_dir"])
        """The folder of the run, which all ranks of a distributed training write."""
        self.work_dir = folder_of(this_rank(), self.run_dir)
        """The folder for checkpoints and scores of this process: that of the run, or a subfolder for ranks above 0."""
        self.device = _device(device or self.config.get("device"))
        self.eval_n_jobs = whole_number("eval_n_jobs", self.config.get("eval_n_jobs", 1))
        self.precision = Precision(self.config.get("amp"), self.device)
        self.watch_options = watch_options(self.config.get("watch"), self.WATCHED)
        self.sample_options = sample_options(self.config.get("save_samples"))
        self.session: Session = IdleSession(self.run_dir)
        self.moments = Moments()
        self.model: nn.Module
        self.metric: Any = None
        self.debugger: Any = None
        self._debuggers_not_built: dict[str, str] = {}
        self._captures = Captures()
        self._keeper: SampleKeeper | None = None
        self._guard = Guard("isolate", warn_of_fault)
        self.cum_epochs = 0
        self.cum_steps = 0

    def on(self, moment: Moment | str, observer: Observer, on_error: OnError = "isolate") -> Observation:
        """Call `observer` with a `Glimpse` at a moment, until the returned observation is removed.

        Args:
            moment: See `Moment`, which draws the loop.
            observer: Takes a `Glimpse`; what it returns is ignored.
            on_error: "isolate" logs an error in it once and removes it; "raise" lets it through.

        """
        return self.moments.on(moment, observer, on_error)

    # ------------------------------------------------------------------ parts

    def _init_metric(self) -> None:
        """Build `metric`: one, or a list of them."""
        metric = build_from_config(self.config.get("metric"))
        self.metric = Metrics(metric) if isinstance(metric, list | tuple) else metric

    def _init_model(self) -> None:
        """Build `model` and move it to the device."""
        model = build_from_config(self.config["model"])
        if not isinstance(model, nn.Module):
            raise OptionError(f"'model' describes a {type(model).__name__}; it must be a torch.nn.Module.")
        self.model = model.to(self.device)

    def _init_debugger(self) -> None:
        """Build `debugger` around the model, if there is one. It stays disabled until captures are wanted."""
        self.debugger, self._debuggers_not_built = build_debugger(self.config.get("debugger"), self.model)

    def _init_captures(self) -> None:
        self._captures = Captures(self.debugger, self._debuggers_not_built)

    def _close_debugger(self) -> None:
        """Release the model. A debugger that came built is only switched off: its owner closes it."""
        self._captures.close(keep=self.debugger is self.config.get("debugger"))

    def _watch(self, optimizer: Any, **more: Any) -> Session:
        """Start recording into the run's folder, or continue the run that is there."""
        # The run may have been started by rank 0 a moment ago: continuing it is right in both cases.
        resume = (self.run_dir / layout.HEADER).is_file()
        return watch(
            self.model,
            optimizer,
            run=self.run_dir,
            resume=resume,
            start_step=self.cum_steps + 1 if resume else None,
            config=describe(self.config),
            **more,
            **self.watch_options,
        )

    def _write_config(self) -> None:
        self.work_dir.mkdir(parents=True, exist_ok=True)
        files.write(self.work_dir / "config.json", describe(self.config), indent=2)

    # ------------------------------------------------------------------ evaluation

    def _datapoint(self, batch: Any, first_index: int = 0) -> Datapoint:
        """Return a batch of the loader as a datapoint. Override it for batches of another form."""
        return as_datapoint(batch, first_index)

    def _forward(self, dp: Datapoint) -> Any:
        """Call the model. Override it for a model with other arguments."""
        return self.model(dp["inputs"])

    def _eval_step(self, dp: Datapoint) -> None:
        """Evaluate one batch: outputs, scores and captures are put into the datapoint.

        With `eval_n_jobs` above 1 several threads are in here at once, each with a datapoint of its own.
        """
        with self.precision.autocast():
            dp["outputs"] = self._forward(dp)
            dp["scores"] = self.metric(dp) if self.metric is not None else {}
        if self.debugger is not None and self.debugger.enabled:
            dp["debug"] = self._captures.look(dp, self.model)

    def _run_eval_loop(self, loader: Any, split: Split, keeper: SampleKeeper | None = None) -> Scores:
        """Evaluate all batches of a loader, and return the scores."""
        book = ScoreBook(self.metric)
        total = num_batches(loader)
        with evaluating(self.model):
            steps = eval_steps(self._eval_datapoints(loader, split, total), self._eval_step, self.eval_n_jobs)
            for number, dp in enumerate(steps, start=1):
                rows = book.add(dp["meta_info"]["idx"], dp["scores"])
                self._guard.wrap("noting predictions", book.note)(
                    dp["meta_info"]["idx"], dp.get("outputs"), dp.get("labels")
                )
                if keeper is not None:
                    self._guard.wrap("storing samples", keeper.take)(dp, rows)
                self._fire(Moment.after_eval_step, split=split, batch=number, num_batches=total, datapoint=dp)
        return book.close()

    def _eval_datapoints(self, loader: Any, split: Split, total: int | None) -> Iterator[Datapoint]:
        seen = 0
        for number, batch in enumerate(loader):
            dp = to_device(self._datapoint(batch, seen), self.device)
            seen += batch_size(dp)
            self._fire(Moment.before_eval_step, split=split, batch=number, num_batches=total, datapoint=dp)
            yield dp

    def _sample_keeper(self, folder: Path) -> SampleKeeper | None:
        """Return what will store the samples of a loop in `folder`, or None if none are wanted or can be stored."""
        if not self.sample_options.most:
            return None
        directions = directions_of(self.metric)
        rank_by = self.monitor if self.monitor in directions else next(iter(directions), None)
        try:
            return SampleKeeper(folder, self.sample_options, rank_by, directions.get(rank_by or "", 1))
        except (OSError, RunError) as error:
            logger.warning("Samples are not stored in %s: %s", folder, error)
            return None

    def _close_keeper(self) -> None:
        if self._keeper is not None:
            self._guard.wrap("closing the stored samples", self._keeper.close)()

    @property
    def monitor(self) -> str | None:
        """The score that decides which epoch is best and which samples are worst: the metric's first by default."""
        wanted = self.config.get("monitor")
        if wanted is not None:
            return str(wanted)
        return next(iter(directions_of(self.metric)), None)

    # ------------------------------------------------------------------ moments

    def _fire(self, moment: Moment, **what: Any) -> None:
        if self.moments.wants(moment):
            self.moments.fire(Glimpse(moment=moment, epoch=self.cum_epochs, step=self.cum_steps, **what))


def _device(wanted: str | torch.device | None) -> torch.device:
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={wanted!r} is not a torch device: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        number = torch.cuda.device_count()
        raise OptionError(
            f"device={str(wanted)!r}: torch sees {number} CUDA devices here. Omit device to use what is available."
        )
    return device
