"""What a debug session does."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sonde.arguments import whole_number
from sonde.errors import OptionError
from sonde.schedule import Schedule, every


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """The settings of a debug session."""

    enable_tensor_inspection: bool = True
    """Record statistics of parameters and outputs."""
    enable_gradient_debugging: bool = True
    """Record statistics of gradients and updates, and follow them."""
    enable_model_diagnostics: bool = True
    """Judge the training while it runs: `session.findings`. Alone it still records gradients, on which it rests."""
    enable_profiling: bool = False
    """Time the forward and backward of every layer, for `session.profiler`."""
    enable_visualization: bool = False
    """Write a dashboard into `output_dir` when the session stops. Needs plotly."""
    max_tracked_tensors: int = 1000
    """How many inspections are remembered; the oldest go first."""
    max_gradient_history: int = 100
    """How many steps of each layer's gradient are remembered."""
    output_dir: str | Path | None = None
    """Where the run and the report go; None keeps nothing after the session."""
    sampling_rate: float = 1.0
    """The share of steps in which the model is looked at: 0.1 looks at each tenth. What is handed in always counts."""
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


_MAX_CHARACTERS: Final = 120


def file_name(name: str) -> str:
    """Return a name that is one file in one folder, whatever the thing is called.

    >>> file_name("../layer 1/weights")
    'layer_1_weights'
    """
    kept = "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in name)
    return kept.strip("._")[:_MAX_CHARACTERS] or "unnamed"
