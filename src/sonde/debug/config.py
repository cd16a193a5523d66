"""Settings of a debug session, and what they mean for values that are passed in."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sonde.core.arguments import whole_number
from sonde.errors import OptionError
from sonde.schedule import Schedule, every
from sonde.select import Where, selector

_MAX_CHARACTERS: Final = 120
_MAX_NAMES: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """The settings of a debug session."""

    enable_tensor_inspection: bool = True
    """Record statistics of parameters and outputs, and look at tensors that are passed in."""
    enable_gradient_debugging: bool = True
    """Record statistics of gradients and updates, and look at gradients and activations that are passed in."""
    enable_model_diagnostics: bool = True
    """Diagnose the training while it runs (`session.findings`), and take metrics that are passed in. Alone it still
    records gradients, which most rules need."""
    enable_profiling: bool = False
    """Time the forward and backward of every layer, for `session.profiler`."""
    enable_visualization: bool = False
    """Write a dashboard into `output_dir` when the session stops. Needs plotly."""
    layers: Where = None
    """Which layers and parameters to look at: a name, a glob (`encoder.*`), `re:` or `kind:` and a pattern, or a list
    of them, as for `sonde.watch(where=...)`; None looks at all. Applies to what is passed in for a layer as well."""
    max_tracked_tensors: int = 1000
    """How many inspections are remembered; the oldest are dropped first."""
    max_gradient_history: int = 100
    """How many steps of each layer's gradient are remembered."""
    output_dir: str | Path | None = None
    """Where the run and the report go; None keeps nothing after the session."""
    sampling_rate: float = 1.0
    """The share of steps to look at: 0.1 looks at each tenth. Of tensors and gradients that are passed in without a
    model it is the share of those of each name, beginning with the first. Single numbers always count."""
    histogram: bool = True
    """Whether readings have histograms."""

    def __post_init__(self) -> None:
        rate: Any = self.sampling_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise OptionError(f"sampling_rate takes a share above 0 and up to 1; got {rate!r}.")
        for name in ("max_tracked_tensors", "max_gradient_history"):
            whole_number(name, getattr(self, name))
        if self.output_dir is not None and not isinstance(self.output_dir, str | os.PathLike):
            raise OptionError(f"output_dir takes a path, or None to keep nothing; got {self.output_dir!r}.")
        selector(self.layers)  # a pattern that cannot be read is reported now

    @property
    def schedule(self) -> Schedule:
        """Which steps are looked at: as evenly spread as the share allows."""
        rate = self.sampling_rate
        if math.isclose(1 / rate, round(1 / rate), rel_tol=1e-9):
            return every(round(1 / rate))
        return Schedule(f"share({rate:g})", lambda step: _due(step, rate) > _due(step - 1, rate))

    @classmethod
    def light(cls, output_dir: str | Path | None = None) -> Self:
        """Gradients and findings, one step in ten, without histograms."""
        return cls(
            output_dir=output_dir,
            sampling_rate=0.1,
            histogram=False,
            enable_tensor_inspection=False,
            max_tracked_tensors=100,
            max_gradient_history=50,
        )

    @classmethod
    def standard(cls, output_dir: str | Path | None = None) -> Self:
        """Everything but the dashboard, at every step."""
        return cls(output_dir=output_dir)

    @classmethod
    def deep(cls, output_dir: str | Path | None = None) -> Self:
        """Everything, at every step, with long histories and, where there is an `output_dir`, a dashboard."""
        return cls(
            output_dir=output_dir,
            enable_profiling=True,
            enable_visualization=output_dir is not None,
            max_tracked_tensors=10_000,
            max_gradient_history=1000,
        )

    @classmethod
    def production(cls, output_dir: str | Path | None = None) -> Self:
        """Look at one step in a hundred, for findings."""
        return cls(
            output_dir=output_dir,
            sampling_rate=0.01,
            histogram=False,
            max_tracked_tensors=100,
            max_gradient_history=50,
        )


def _due(step: int, rate: float) -> int:
    """Return how many looks are due up to a step. 0.29 * 100 is a hair below 29, and must not fall short of it."""
    return math.floor(step * rate + 1e-9)


class Gate:
    """Decides which of the values that are passed in are looked at: by layer, and by the sampling rate.

    Args:
        config: The settings.
        kinds: Class names of the modules of the model, by name, for selections by `kind:`.
        is_due: Returns whether the current step of the model is sampled; None without a model.

    """

    def __init__(
        self, config: DebugConfig, kinds: Mapping[str, str] | None = None, is_due: Callable[[], bool] | None = None
    ) -> None:
        self._schedule, self._selected = config.schedule, selector(config.layers)
        self._all_layers, self._all_steps = config.layers is None, config.sampling_rate == 1
        self._kinds = kinds or {}
        self._is_due = is_due
        self._counts: OrderedDict[str, int] = OrderedDict()

    def selects(self, layer: str) -> bool:
        """Return whether a layer is selected: by its own name, or by that of a module it belongs to."""
        if self._all_layers:
            return True
        parts = layer.split(".")
        owners = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        return any(self._selected(name, self._kinds.get(name, "")) for name in owners)

    def accepts(self, what: str, layer: str | None) -> bool:
        """Return whether to look at something now. Of each `what` the first look counts, then the share asked for."""
        if layer is not None and not self.selects(layer):
            return False
        if self._all_steps:
            return True
        if self._is_due is not None:
            return self._is_due()
        before = self._counts.pop(what, 0)
        self._counts[what] = before + 1
        while len(self._counts) > _MAX_NAMES:
            self._counts.popitem(last=False)
        return before == 0 or self._schedule(before)


def file_name(name: str) -> str:
    """Return a name that is one file in one folder, whatever the thing is called.

    >>> file_name("../layer 1/weights")
    'layer_1_weights'
    """
    kept = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
    return kept.strip("._")[:_MAX_CHARACTERS] or "unnamed"
