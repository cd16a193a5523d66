"""What a debug session does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sonde.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """The settings of a debug session."""

    enable_tensor_inspection: bool = True
    """Record statistics of parameters and outputs."""
    enable_gradient_debugging: bool = True
    """Record statistics of gradients and updates, and follow them."""
    enable_model_diagnostics: bool = True
    """Judge the training while it runs: `session.findings`."""
    enable_profiling: bool = False
    """Time the forward and backward of every layer, for `session.profiler`."""
    enable_visualization: bool = False
    """Write a dashboard when the session stops. Needs plotly."""
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
        if not 0 < self.sampling_rate <= 1:
            raise OptionError(f"sampling_rate takes a share above 0 and up to 1; got {self.sampling_rate!r}.")
        for name in ("max_tracked_tensors", "max_gradient_history"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} takes a whole number of at least 1; got {value!r}.")

    @property
    def every(self) -> int:
        """Each so many steps are looked at."""
        return max(1, round(1 / self.sampling_rate))

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
        """Everything, at every step, with long histories and a dashboard."""
        return cls(
            output_dir=output_dir,
            enable_profiling=True,
            enable_visualization=True,
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
