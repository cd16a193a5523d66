"""Send findings and chosen series of a run to an experiment tracker while it is recorded.

    sonde.watch(model, optimizer, run="runs/first", to=[sonde.to_wandb(series=["*:scalar value", "*:gradient norm"])])

Each tracker is one small sink. Sinks are fed by Sonde's worker thread; one that fails is dropped with a warning, and
training continues. A tracker's package is imported when its sink is made.
"""

from __future__ import annotations

import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Final

from sonde.analysis import tag_of
from sonde.core import statistics
from sonde.core.arguments import whole_number
from sonde.core.schema import Bins, Rows
from sonde.errors import MissingExtra, OptionError
from sonde.records import Block, Event, Finding, Site

SCALARS: Final = ("*:scalar value",)
"""What is sent unless series are chosen: what was logged, learning rates, the memory of the process."""
_REFUSED: Final = re.compile(r"[^-/:.\w ]")  # what MLflow does not take in names
_LEVELS: Final = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class TrackerSink(ABC):
    """Takes what a session records, and hands chosen series and all findings to a tracker.

    Args:
        series: Which, each as a site's key or a glob of them and a statistic: `fc1.weight:gradient norm`.
        every: Which steps of them: each n-th.

    """

    def __init__(self, series: Iterable[str] = SCALARS, every: int = 1) -> None:
        self._series = [_parsed(each) for each in ([series] if isinstance(series, str) else series)]
        self._every = whole_number("every", every)
        self._ids: dict[str, int] = {}
        self._chosen: list[tuple[Site, str]] = []
        self._needed: set[int] = set()
        self._read: dict[int, tuple[Rows, Bins | None]] = {}
        self._step, self._time = 0, 0.0
        self._reported: dict[str, Finding] = {}

    @abstractmethod
    def write(self, values: dict[str, float], step: int, timestamp: float) -> None:
        """Write the values of a step by name."""

    @abstractmethod
    def write_finding(self, finding: Finding, *, is_new: bool) -> None:
        """Write a finding: a new one, or one that has changed or was withdrawn."""

    def take_sites(self, sites: list[Site]) -> None:
        """Choose from new sites."""
        for site in sites:
            self._ids[site.key] = site.id
            stats = [stat for pattern, stat in self._series if site.same_as is None and _fits(site, pattern, stat)]
            self._chosen += [(site, stat) for stat in stats]
            if stats:
                others = (self._ids.get(f"{site.name}:{statistics.find(stat).over}") for stat in stats)
                self._needed.update((site.id, *(each for each in others if each is not None)))

    def take_block(self, block: Block) -> None:
        """Keep the readings of a step until the next one begins: further blocks of it may come."""
        if block.step != self._step:
            self._write_step()
        self._step, self._time = block.step, block.time
        if block.step % self._every == 0:
            for index, site in enumerate(block.sites.tolist()):
                if site in self._needed:
                    self._read[site] = (block.rows[index], block.bins[index] if block.binned[index] else None)

    def take_event(self, event: Event) -> None:  # noqa: B027 - most trackers have no use for events
        """Ignore events."""

    def take_finding(self, finding: Finding) -> None:
        """Write a finding, unless that was done."""
        before = self._reported.get(finding.kind)
        state = (finding.severity, finding.cause, finding.withdrawn)
        if before is None or (before.severity, before.cause, before.withdrawn) != state:
            self._reported[finding.kind] = finding
            self.write_finding(finding, is_new=before is None)

    def flush(self) -> None:
        """Write everything taken so far."""
        self._write_step()

    def close(self) -> None:
        """Write the last step."""
        self._write_step()

    def _write_step(self) -> None:
        known = ((site, stat, self._value(site, stat)) for site, stat in self._chosen)
        values = {tag_of(site, stat): value for site, stat, value in known if value is not None}
        self._read.clear()
        if values:
            self.write(values, self._step, self._time)

    def _value(self, site: Site, stat: str) -> float | None:
        """Return a statistic of the step; None where it is not known. A scalar that was logged as NaN was NaN."""
        if site.id not in self._read:
            return None
        over = statistics.find(stat).over
        if over is None:
            value = float(statistics.compute(stat, *self._read[site.id]))
        else:
            whole = self._norm(self._ids.get(f"{site.name}:{over}", -1))
            value = self._norm(site.id) / whole if whole > 0 else math.nan
        return value if math.isfinite(value) or site.quantity == "scalar" else None

    def _norm(self, site: int) -> float:
        return float(statistics.compute("norm", self._read[site][0])) if site in self._read else math.nan


def _parsed(series: str) -> tuple[str, str]:
    pattern, _, stat = series.rpartition(" ")
    if not pattern:
        raise OptionError(f"series={series!r}: write a site's key and a statistic, such as 'fc1.weight:gradient norm'.")
    statistics.find(stat)
    return pattern, stat


def _fits(site: Site, pattern: str, stat: str) -> bool:
    fits = statistics.find(stat).quantity in (None, site.quantity)
    return fits and (site.key == pattern or fnmatchcase(site.key, pattern))


def _load(package: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtra(package, extra, f"sonde.to_{extra}()") from error


# ---------------------------------------------------------------------- trackers


class WandbSink(TrackerSink):
    """Writes to a run of Weights & Biases, as `sonde/...`.

    In a run of the program's own, values join the row that the program logs next: a row of their own would make W&B
    refuse the program's later rows.
    """

    def __init__(self, run: Any, series: Iterable[str], every: int, options: dict[str, Any]) -> None:
        super().__init__(series, every)
        wandb = _load("wandb", "wandb")
        self._is_own = run is None and wandb.run is None
        self._run = wandb.init(**options) if self._is_own else run or wandb.run

    def write(self, values: dict[str, float], step: int, timestamp: float) -> None:
        """Log a row."""
        row = {f"sonde/{name}": value for name, value in values.items()}
        if self._is_own:
            self._run.log(row, step=step)
        else:
            self._run.log({**row, "sonde/step": step}, commit=False)

    def write_finding(self, finding: Finding, *, is_new: bool) -> None:
        """Put a finding into the summary; send an alert for a new one that is more than a note."""
        self._run.summary[f"sonde/findings/{finding.kind}"] = "withdrawn" if finding.withdrawn else str(finding)
        if is_new and finding.severity != "info" and not finding.withdrawn:
            self._run.alert(title=finding.kind, text=str(finding), level=_LEVELS[finding.severity])

    def close(self) -> None:
        """Write the last step; finish a run that was started here."""
        super().close()
        if self._is_own:
            self._run.finish()


class MlflowSink(TrackerSink):
    """Writes metrics and tags of an MLflow run, as `sonde/...`."""

    def __init__(self, run_id: str | None, experiment: str, series: Iterable[str], every: int) -> None:
        super().__init__(series, every)
        mlflow = _load("mlflow", "mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        active = mlflow.active_run() if run_id is None else None
        self._is_own = run_id is None and active is None
        if active is not None:
            run_id = active.info.run_id
        elif run_id is None:
            known = self._client.get_experiment_by_name(experiment)
            place = known.experiment_id if known is not None else self._client.create_experiment(experiment)
            run_id = self._client.create_run(place).info.run_id
        self.run_id = run_id
        self._findings: dict[str, Any] = {}

    def write(self, values: dict[str, float], step: int, timestamp: float) -> None:
        """Log metrics; MLflow takes a thousand at once."""
        at = int(1000 * timestamp)
        metrics = [self._metric(_REFUSED.sub("_", f"sonde/{name}"), value, at, step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def write_finding(self, finding: Finding, *, is_new: bool) -> None:
        """Set a tag, and write all findings as an artifact."""
        self._findings[finding.kind] = finding.to_json()
        text = "withdrawn" if finding.withdrawn else str(finding)
        self._client.set_tag(self.run_id, f"sonde.finding.{finding.kind}", text[:5000])
        self._client.log_dict(self.run_id, self._findings, "sonde/findings.json")

    def close(self) -> None:
        """Write the last step; end a run that was started here."""
        super().close()
        if self._is_own:
            self._client.set_terminated(self.run_id)


class TensorBoardSink(TrackerSink):
    """Writes event files."""

    def __init__(self, folder: str | os.PathLike[str], series: Iterable[str], every: int) -> None:
        super().__init__(series, every)
        _load("tensorboard", "tensorboard")
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(folder))

    def write(self, values: dict[str, float], step: int, timestamp: float) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, timestamp)

    def write_finding(self, finding: Finding, *, is_new: bool) -> None:
        """Write a finding as text."""
        text = "withdrawn" if finding.withdrawn else str(finding)
        self._writer.add_text(f"findings/{finding.kind}", text, finding.last_step, time.time())

    def flush(self) -> None:
        """Write everything taken so far to the disk."""
        super().flush()
        self._writer.flush()

    def close(self) -> None:
        """Write the last step and close the file."""
        super().close()
        self._writer.close()


class CometSink(TrackerSink):
    """Writes metrics and others of a Comet experiment, as `sonde/...`."""

    def __init__(self, experiment: Any, series: Iterable[str], every: int, options: dict[str, Any]) -> None:
        super().__init__(series, every)
        comet = _load("comet_ml", "comet")
        running = experiment or comet.get_running_experiment()
        self._is_own = running is None
        self._experiment = running or comet.start(**options)

    def write(self, values: dict[str, float], step: int, timestamp: float) -> None:
        """Log metrics."""
        self._experiment.log_metrics({f"sonde/{name}": value for name, value in values.items()}, step=step)

    def write_finding(self, finding: Finding, *, is_new: bool) -> None:
        """Log a finding by its kind."""
        self._experiment.log_other(f"sonde/findings/{finding.kind}", "withdrawn" if finding.withdrawn else str(finding))

    def close(self) -> None:
        """Write the last step; end an experiment that was started here."""
        super().close()
        if self._is_own:
            self._experiment.end()


def to_wandb(run: Any = None, *, series: Iterable[str] = SCALARS, every: int = 1, **options: Any) -> WandbSink:
    """Send findings and series to Weights & Biases: to `run`, to the present run, or to one that is started here.

    `options` are those of `wandb.init`. See `TrackerSink` for `series` and `every`.
    """
    return WandbSink(run, series, every, options)


def to_mlflow(
    run_id: str | None = None, *, experiment: str = "Default", series: Iterable[str] = SCALARS, every: int = 1
) -> MlflowSink:
    """Send findings and series to MLflow: to the run with this id, to the active one, or to a new one.

    See `TrackerSink` for `series` and `every`.
    """
    return MlflowSink(run_id, experiment, series, every)


def to_tensorboard(
    folder: str | os.PathLike[str], *, series: Iterable[str] = SCALARS, every: int = 1
) -> TensorBoardSink:
    """Send findings and series to TensorBoard, as event files in a folder.

    See `TrackerSink` for `series` and `every`.
    """
    return TensorBoardSink(folder, series, every)


def to_comet(experiment: Any = None, *, series: Iterable[str] = SCALARS, every: int = 1, **options: Any) -> CometSink:
    """Send findings and series to Comet: to `experiment`, to the running one, or to one that is started here.

    `options` are those of `comet_ml.start`. See `TrackerSink` for `series` and `every`.
    """
    return CometSink(experiment, series, every, options)
