"""Connects a debug session to a recording: where it writes, what it is fed with, and its hooks on the live model."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from sonde.core import files, schema, signals, statistics
from sonde.core.schema import Rows
from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.gradient_layer import GradientPoint, UnitActivity
from sonde.debug.hooks import Hook, HookManager
from sonde.debug.model_diagnostics import ModelDiagnostics, ModelPerformanceMetrics
from sonde.debug.profiler import Profiler
from sonde.debug.tensor_inspector import TensorInspector
from sonde.diagnosis.case import LOSS_NAMES
from sonde.errors import OptionError
from sonde.hooks.guard import UNGUARDED, Handle, remove_all
from sonde.hooks.names import is_wrapper, named_modules
from sonde.hooks.on_backward import on_gradient
from sonde.hooks.on_call import on_module
from sonde.hooks.unpack import unpack
from sonde.parallel.ranks import agree, identity, is_connected
from sonde.probes.memory.process import RSS
from sonde.record.live_steps import LiveStep, StepFeed
from sonde.records import Block, Reading, Site

logger = logging.getLogger("sonde")

_MAX_LOSSES: Final = 10_000
_MAX_NUMBERS: Final = 10_000
_TIMES: Final = {
    signals.part_of(signals.STEP_TIME): "step",
    signals.part_of(signals.DATA_WAIT): "data_wait",
    **{signals.part_of(signals.time_of(phase)): phase for phase in signals.PHASE_TIMES},
}
"""By part of a signal of the loop that is in seconds: the timer it goes to."""
_SAMPLES: Final = signals.part_of(signals.UNIT_SAMPLES)
_UNIT_GRADIENT: Final = signals.part_of(signals.UNIT_GRADIENT)
_UNITS: Final = (signals.part_of(signals.EVER_ACTIVE), _SAMPLES, _UNIT_GRADIENT)
"""Parts of the signals of units."""


_Label = tuple[str, str, str]
"""Quantity, name and key of a site."""


def _label(site: Site) -> _Label | None:
    wanted = site.quantity in ("parameter", "output") and site.phase == "train"
    return (site.quantity, site.name, site.key) if wanted or site.quantity == "gradient" else None


class Feed(StepFeed[_Label]):
    """Hands what is recorded from the model to the parts of a debug session.

    It holds as many steps as a layer's history does: older ones would be forgotten anyway. Losses are kept for all
    steps, since how a training goes shows in the whole curve.
    """

    def __init__(self, history: int) -> None:
        super().__init__(_label, history)
        self._sites: dict[int, Site] = {}
        self._gradients: list[int] = []
        self._loss_site: int | None = None
        self._losses: dict[int, float] = {}
        self._loop: dict[int, str] = {}
        self._numbers: deque[tuple[str, float]] = deque(maxlen=_MAX_NUMBERS)
        self._units: dict[int, Rows] = {}
        self.last_loss: float | None = None
        self.last_gradient_norm: float | None = None

    def take_sites(self, sites: list[Site]) -> None:
        """Take new sites."""
        super().take_sites(sites)
        with self._lock:
            for site in sites:
                self._sites[site.id] = site
                if site.quantity == "gradient":
                    self._gradients.append(site.id)
                elif site.name == signals.LOOP and site.part in _TIMES:
                    self._loop[site.id] = _TIMES[site.part]
                elif site.name == RSS:
                    self._loop[site.id] = RSS
                elif site.quantity == "vital" and site.part in _UNITS:
                    self._units[site.id] = np.zeros(schema.NUM_COLUMNS)
                self._see_loss_site(site)

    def take_block(self, block: Block) -> None:
        """Take the readings of a step."""
        super().take_block(block)
        with self._lock:
            for at in np.flatnonzero(np.isin(block.sites, list(self._units))):
                self._units[int(block.sites[at])] = block.rows[at]
            self._take_numbers(block)
            self._take_loop(block)

    def clear(self) -> None:
        """Forget what has not been handed over yet."""
        self.take()
        with self._lock:
            self._losses.clear()
            self._numbers.clear()

    def empty_into(
        self,
        inspector: TensorInspector,
        gradients: GradientDebugger,
        diagnostics: ModelDiagnostics,
        profiler: Profiler,
    ) -> None:
        """Hand over what has come since the last time."""
        steps = self.take()
        with self._lock:
            losses, self._losses = self._losses, {}
            numbers, self._numbers = list(self._numbers), deque(maxlen=_MAX_NUMBERS)
            sites, units = dict(self._sites), dict(self._units)
        for step in steps:
            self._hand_over(step, inspector, gradients, check=step is steps[-1])
        for number, loss in losses.items():
            diagnostics.record_performance(ModelPerformanceMetrics(training_step=number, loss=loss))
        for name, value in numbers:
            if name == RSS:
                profiler.record_memory(value / 2**20)
            else:
                profiler.record_time(name, value)
        for activity in _activity(sites, units):
            gradients.record_units(activity)

    @staticmethod
    def _hand_over(
        step: LiveStep[_Label], inspector: TensorInspector, gradients: GradientDebugger, *, check: bool
    ) -> None:
        rows = np.array(list(step.rows.values())).reshape(-1, schema.NUM_COLUMNS)
        numbers = {name: statistics.compute(name, rows).tolist() for name in ("norm", "mean", "std", "nonfinite")}
        points = zip(step.rows, rows, *numbers.values(), strict=True)
        for (quantity, name, key), row, norm, mean, std, bad in points:
            spread = None if math.isnan(std) else std
            if quantity == "gradient":
                known = None if math.isnan(mean) else mean
                reading = Reading(row, step=step.step)
                point = GradientPoint(
                    step=step.step, norm=norm, mean=known, std=spread, nonfinite=int(bad), reading=reading
                )
                gradients.record_point(name, point, check=check or bad > 0)
            elif not math.isnan(mean):
                inspector.update_time_series(key, mean, spread)

    def _take_loop(self, block: Block) -> None:
        """Keep the seconds of the step's phases and the memory of the process."""
        chosen = np.isin(block.sites, list(self._loop))
        for number, value in zip(block.sites[chosen].tolist(), block.rows[chosen, schema.MEAN].tolist(), strict=True):
            self._numbers.append((self._loop[number], value))

    def _see_loss_site(self, site: Site) -> None:
        """Prefer what the user logs as a loss to what the loss function returned."""
        logged = site.quantity == "scalar" and site.name in LOSS_NAMES
        returned = site.name == signals.LOSS and site.quantity == "output" and site.phase == "train"
        if logged or (returned and self._loss_site is None):
            self._loss_site = site.id

    def _take_numbers(self, block: Block) -> None:
        at = int(np.searchsorted(block.sites, -1 if self._loss_site is None else self._loss_site))
        if self._loss_site is not None and at < len(block.sites) and int(block.sites[at]) == self._loss_site:
            row = block.rows[at]
            self.last_loss = loss = math.nan if row[schema.NAN] else float(statistics.compute("value", row))
            if len(self._losses) < _MAX_LOSSES:
                self._losses[block.step] = loss
        chosen = np.isin(block.sites, self._gradients)
        if chosen.any():
            norms = statistics.compute("norm", block.rows[chosen])
            self.last_gradient_norm = float(np.sqrt(np.nansum(norms**2)))


def _activity(sites: Mapping[int, Site], units: Mapping[int, Rows]) -> Iterator[UnitActivity]:
    """Return how many units of each watched layer were ever active, or ever had a gradient."""
    samples = {sites[n].name: row for n, row in units.items() if sites[n].part == _SAMPLES and row[schema.COUNT]}
    kinds = {site.name: site.kind for site in sites.values() if site.quantity in ("parameter", "gradient")}
    for number, row in units.items():
        site, count = sites[number], int(row[schema.COUNT])
        by_gradient = site.part == _UNIT_GRADIENT
        # Rows of an embedding are words, and most words are rare.
        if not count or site.part == _SAMPLES or "Embedding" in kinds.get(site.name, ""):
            continue
        seen = samples.get(site.name)
        yield UnitActivity(
            layer=site.name,
            units=count,
            num_dead=int(row[schema.ZERO]),
            dead=None,
            samples=0 if seen is None else int(seen[schema.MEAN]),
            measured="gradients" if by_gradient else "activations",
        )


class LiveHooks:
    """Runs hooks on a live model. Only modules that a hook is for are touched, and only while one may still fire.

    Args:
        model: The model.
        manager: Runs the hooks.
        metadata: Returns what conditions may ask about besides the tensor.
        is_due: Returns whether this step is sampled.

    """

    def __init__(
        self,
        model: nn.Module,
        manager: HookManager,
        metadata: Callable[[], Mapping[str, Any]],
        is_due: Callable[[], bool],
    ) -> None:
        self._model = model
        self._manager = manager
        self._metadata = metadata
        self._is_due = is_due
        self._handles: list[Handle] = []
        self._version = -1
        self._warned: set[str] = set()

    def refresh(self) -> None:
        """Attach to the modules that the present hooks are for. Cheap if nothing changed."""
        if self._version == self._manager.version:
            return
        self.remove()
        self._version = self._manager.version
        hooks = self._manager.live_hooks()
        layers = {name: module for name, module, _ in named_modules({"": self._model}) if not is_wrapper(module)}
        for name, module in layers.items():
            matching = [hook for hook in hooks if hook.matches(name)]
            if matching:
                backward = any(hook.trigger.needs_backward for hook in matching)
                after = UNGUARDED.wrap("hooks", self._hook(name, backward))  # the manager isolates each hook
                self._handles += on_module(module, after=after)
        for hook in hooks:
            if hook.name not in self._warned and not any(map(hook.matches, layers)):
                self._warned.add(hook.name)
                self._warn_of_no_match(hook, list(layers))

    def _warn_of_no_match(self, hook: Hook, layers: list[str]) -> None:
        """Warn of a hook that no layer matches: a slip in a pattern would otherwise be found after the training."""
        near = [name for pattern in hook.layer_patterns for name in get_close_matches(pattern, layers, n=2)]
        hint = f"nearest: {', '.join(near)}" if near else f"for example: {', '.join(layers[:4])}"
        logger.warning(
            "the hook %r matches no layer of %s (%s), so it runs only where execute_hooks is called by hand; %s.",
            hook.name,
            type(self._model).__name__,
            ", ".join(hook.layer_patterns),
            hint,
        )

    def remove(self) -> None:
        """Detach from the model."""
        remove_all(self._handles)
        self._version = -1

    def _hook(self, name: str, backward: bool) -> Callable[[nn.Module, Any, Any], None]:
        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_due():
                return
            tensor = next((tensor for _, tensor in unpack(output)), None)
            if tensor is None:
                return
            self._manager.execute_hooks(name, tensor.detach(), metadata=self._metadata())
            if backward and tensor.requires_grad:
                on_gradient(tensor, UNGUARDED.wrap("hooks", self._see_gradient), name)

        return after_forward

    def _see_gradient(self, name: str, gradient: Tensor) -> None:
        self._manager.execute_hooks(name, gradient.detach(), is_forward=False, metadata=self._metadata())


@dataclass(frozen=True, slots=True)
class Place:
    """A run's folder, and as which rank to write into it."""

    folder: Path
    rank: int = 0
    write_as: int = 0
    """The rank within the run: 0 where ranks could not agree on one run, and each writes a run of its own."""


def take_folder(parent: Path) -> Place:
    """Take the first free `session-N` in a folder.

    Ranks of a training take the same one, in which each has a part of its own. They agree through the store of
    torch.distributed: the first to come makes the folder and leaves its name. A rank may do without a session.
    """
    rank = _rank()
    if rank is None:
        return Place(_make_free(parent, ""))
    name = agree(f"debug-session/{parent}", lambda: _make_free(parent, "").name) if is_connected() else ""
    return Place(parent / name, rank, rank) if name else Place(_make_free(parent, f"-rank{rank}"), rank)


def _make_free(parent: Path, suffix: str) -> Path:
    """Make the first folder `session-N` that does not exist."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise OptionError(f"output_dir={str(parent)!r} cannot be a folder: {reason}. Choose another.") from None
    return files.claim(parent / f"session-{number}{suffix}" for number in itertools.count(1))


def _rank() -> int | None:
    """Return the rank of this process; None if it is the only one."""
    who = identity()
    return who.rank if is_connected() or (who.world > 1 and who.is_known) else None
