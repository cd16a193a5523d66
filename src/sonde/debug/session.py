"""The debug session: inspector, gradient debugger, diagnostics, hooks and profiler around one model."""

from __future__ import annotations

import itertools
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sonde.attach import open_session, watch
from sonde.debug.actions import Actions
from sonde.debug.architecture import describe_architecture
from sonde.debug.config import DebugConfig
from sonde.debug.feed import Feed
from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.hooks import HookManager, TrainingStopped
from sonde.debug.live_hooks import LiveHooks
from sonde.debug.model_diagnostics import ModelDiagnostics
from sonde.debug.profiler import Profiler
from sonde.debug.report import DebugReport, Issue
from sonde.debug.tensor_inspector import TensorInspector
from sonde.debug.webhook import WebhookSender
from sonde.errors import ClosedError, OptionError
from sonde.probes.module_times import ModuleTimes
from sonde.records import Finding
from sonde.session import Session, What
from sonde.store import open_run

_MAX_ALERTS: Final = 1000


class DebugSession:
    """Looks after a model while it trains, and takes whatever is handed in.

    It attaches to the model by itself: statistics of parameters, gradients and outputs are recorded into a run, and the
    parts below are fed from it. Without a model only what is handed in counts.

    Args:
        config: What to do; see `DebugConfig`.
        model: The model, if there is one.
        optimizer: Its optimizer or optimizers; found by itself if left out.
        sleep: How a paused training waits.

    Example:
        with debug_session(model, optimizer) as session:
            train(model, optimizer)
        print(session.report.summary())

    """

    def __init__(
        self,
        config: DebugConfig | None = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config or DebugConfig()
        self.id = uuid.uuid4().hex[:12]
        self.folder: Path | None = None
        """The run's folder, once the session has started; None if nothing is recorded."""
        self.report: DebugReport | None = None
        self.step = 0
        """Optimizer steps since the start."""
        self.sleep = sleep
        self.hooks = HookManager(Actions(self))
        self.profiler = Profiler()
        self.webhooks = WebhookSender()
        self.alerts: deque[dict[str, Any]] = deque(maxlen=_MAX_ALERTS)
        self._model, self._optimizer = model, optimizer
        self._inspector = TensorInspector(self.config.max_tracked_tensors)
        self._gradients = GradientDebugger(self.config.max_gradient_history)
        self._diagnostics = ModelDiagnostics()
        self._listeners: list[Callable[[dict[str, Any]], Any]] = []
        self._feed = Feed(self.config.max_gradient_history)
        self._recording: Session | None = None
        self._findings: list[Finding] = []
        self._live: LiveHooks | None = None
        self._times = ModuleTimes() if self.config.enable_profiling and model is not None else None
        self._step_handles: list[RemovableHandle] = []
        self._bundle_reason = ""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process = psutil.Process()

    # ------------------------------------------------------------------ parts

    @property
    def tensor_inspector(self) -> TensorInspector:
        """Looks at single tensors."""
        self._bring_up_to_date()
        return self._inspector

    @property
    def gradient_debugger(self) -> GradientDebugger:
        """Follows gradients."""
        self._bring_up_to_date()
        return self._gradients

    @property
    def model_diagnostics(self) -> ModelDiagnostics:
        """Judges the training as a whole."""
        self._bring_up_to_date()
        return self._diagnostics

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the training, best first, as far as can be told by now."""
        return self._recording.findings if self._recording is not None else list(self._findings)

    # ------------------------------------------------------------------ start and stop

    def start(self) -> Self:
        """Attach to the model and begin to record. Starting twice is an error; so is starting again after the end."""
        if self.report is not None or self._recording is not None or self._live is not None:
            raise ClosedError(
                "start() on a debug session that was started before. Make a new one with debug_session()."
            )
        self._open_recording()
        if self._model is not None:
            self._diagnostics.record_architecture(describe_architecture(self._model))
            self._live = LiveHooks(self._model, self.hooks, self._metadata, self._is_due)
            self._live.refresh()
            self.hooks.on_change = self._live.refresh
            if self._times is not None:
                self._times.attach()
            before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
            self._step_handles = [before(self._before_step), after(self._after_step)]
        return self

    def stop(self) -> DebugReport:
        """Let go of the model, finish the run and return the report. Stopping twice returns the same report."""
        if self.report is not None:
            return self.report
        self._detach()
        if self._recording is not None:
            self._recording.close()
            self._findings = self._recording.findings
        self._bring_up_to_date()
        self.webhooks.close()
        dashboard = self._write_dashboard()
        self.report = self._make_report(dashboard)
        if self.folder is not None and self._temporary is None:
            self.report.save(self.folder / "debug_report.json")
        self._recording = None
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary, self.folder = None, None
        return self.report

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._recording is not None and error is not None and not isinstance(error, TrainingStopped):
            self._recording.event("exception", f"{type(error).__name__}: {error}")
        self.stop()
        return isinstance(error, TrainingStopped)

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.__exit__(kind, error, trace)

    def __await__(self) -> Generator[Any, None, Self]:
        """Give itself back, so that `await session.start()` is right everywhere."""
        yield from ()
        return self

    # ------------------------------------------------------------------ verbs

    def log(self, **scalars: Any) -> None:
        """Record single numbers of this step, such as a loss."""
        if self._recording is not None:
            self._recording.log(**scalars)

    def record(self, site: str, values: Any) -> None:
        """Record the statistics of a tensor under a name."""
        if self._recording is not None:
            self._recording.record(site, values)

    def note(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something on the run's timeline."""
        if self._recording is not None:
            self._recording.event(event_type, message, data)

    def debug_tensor(self, tensor: Any, name: str, layer: str | None = None, operation: str | None = None) -> str:
        """Inspect a tensor; return the id of the look."""
        return self.tensor_inspector.inspect_tensor(tensor, name, layer, operation)

    def debug_gradients(self, layer: str, values: Any) -> None:
        """Record the gradient of a layer."""
        self.gradient_debugger.record_gradient_flow(layer, values)

    def on_alert(self, listener: Callable[[dict[str, Any]], Any]) -> None:
        """Call a function with every alert that a hook raises."""
        self._listeners.append(listener)

    def take_alert(self, alert: dict[str, Any]) -> None:
        """Take an alert: remember it, note it in the run, tell the listeners."""
        self.alerts.append(alert)
        self.note("alert", alert["message"], alert)
        for listener in self._listeners:
            listener(alert)

    def save_bundle(self, reason: str = "by hand") -> Path:
        """Save what is needed to repeat the present step."""
        if self._recording is None or self._model is None:
            raise OptionError("save_bundle() needs a session that was started with a model.")
        return self._recording.save_bundle(reason)

    def want_bundle(self, reason: str) -> None:
        """Save a bundle before the optimizer steps: in the middle of a pass there is nothing whole to save yet."""
        if self._recording is None or self._model is None:
            raise OptionError("A bundle needs a session that was started with a model.")
        self._bundle_reason = self._bundle_reason or reason

    def snapshot(self) -> dict[str, Any]:
        """Return the state of everything now, for JSON."""
        if self._recording is not None:
            self._recording.flush()
        self._bring_up_to_date()
        return self._make_report(None).to_json()

    def export(self, path: str | Path) -> Path:
        """Write the report as strict JSON: the final one, or that of now."""
        report = self.report
        if report is None:
            if self._recording is not None:
                self._recording.flush()
            self._bring_up_to_date()
            report = self._make_report(None)
        return report.save(path)

    # ------------------------------------------------------------------ how

    def _open_recording(self) -> None:
        if self.config.output_dir is not None:
            self.folder = _free_folder(Path(self.config.output_dir))
        elif self._model is not None:
            self._temporary = tempfile.TemporaryDirectory(prefix="sonde-debug-")
            self.folder = Path(self._temporary.name) / "run"
        if self.folder is None:
            return
        what = self._what()
        if self._model is None or not what:
            self._recording = open_session(run=self.folder)
            return
        self._recording = watch(
            self._model,
            self._optimizer,
            run=self.folder,
            what=what,
            every=self.config.every,
            histogram=self.config.histogram,
            diagnose=self.config.enable_model_diagnostics,
        )
        self._recording.subscribe(self._feed)

    def _what(self) -> list[What]:
        what: list[What] = []
        if self.config.enable_tensor_inspection:
            what += ["parameters", "outputs"]
        if self.config.enable_gradient_debugging:
            what += ["gradients", "updates"]
        return what

    def _take_layer_times(self) -> None:
        """Hand the profiler what each layer took in a call; a container is the sum of what is in it, and left out."""
        if self._times is None:
            return
        times, self._times = self._times, None
        times.remove()
        rows = times.table()
        leaves = {name: each for name, each in self._named_layers() if not any(True for _ in each.children())}
        for row in rows:
            if row.calls and row.name in leaves:
                backward = None if row.backward_ms is None else row.backward_ms / row.calls / 1e3
                size = sum(parameter.numel() for parameter in leaves[row.name].parameters())
                forward = row.forward_ms / row.calls / 1e3
                self.profiler.record_layer_execution(row.name, row.kind, forward, backward, parameter_count=size)

    def _named_layers(self) -> list[tuple[str, nn.Module]]:
        return [] if self._model is None else list(self._model.named_modules())

    def _detach(self) -> None:
        self._take_layer_times()
        self.hooks.on_change = None
        if self._live is not None:
            self._live.remove()
        for handle in self._step_handles:
            handle.remove()
        self._step_handles.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._times is not None:
            self._times.end_backward()
        if self._bundle_reason and self._is_ours(optimizer):
            reason, self._bundle_reason = self._bundle_reason, ""
            self.save_bundle(reason)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_ours(optimizer):
            return
        self.step += 1
        self.hooks.set_step(self.step)
        if self._live is not None:
            self._live.refresh()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if self._optimizer is None:
            return True
        ours = [self._optimizer] if isinstance(self._optimizer, Optimizer) else list(self._optimizer)
        return any(optimizer is each for each in ours)

    def _is_due(self) -> bool:
        return self.step % self.config.every == 0

    def _metadata(self) -> Mapping[str, Any]:
        return _Metadata(self._feed, self._process)

    def _bring_up_to_date(self) -> None:
        self._feed.empty_into(self._inspector, self._gradients, self._diagnostics, self.profiler)

    def _write_dashboard(self) -> str | None:
        if not self.config.enable_visualization or self.folder is None or self._temporary is not None:
            return None
        # Imported here: a session that draws nothing does not need plotly.
        from sonde.debug.visualizer import DebugVisualizer

        visualizer = DebugVisualizer()
        visualizer.plot_run(open_run(self.folder))
        visualizer.add_plot("gradient_history", self._gradients.generate_gradient_flow_visualization())
        return str(visualizer.create_dashboard(path=self.folder / "dashboard.html"))

    def _make_report(self, dashboard: str | None) -> DebugReport:
        analysis = self._gradients.analyze_gradient_flow()
        issues = list(self._issues())
        advice = [finding.fix for finding in self.findings if finding.severity != "info"]
        advice += [*analysis.recommendations, *self._diagnostics.analyze_training_dynamics().recommendations]
        advice += self.profiler.suggestions()
        return DebugReport(
            session_id=self.id,
            run=None if self.folder is None or self._temporary is not None else str(self.folder),
            steps=self.step,
            issues=tuple(issues),
            findings=tuple(self.findings),
            tensors=self._inspector.generate_report(),
            gradients=asdict(analysis),
            diagnostics=self._diagnostics.generate_report(),
            performance=self.profiler.generate_report(),
            hooks={name: asdict(statistics) for name, statistics in self.hooks.get_statistics().items()},
            recommendations=tuple(dict.fromkeys(advice)),
            dashboard=dashboard,
        )

    def _issues(self) -> Iterator[Issue]:
        for finding in self.findings:
            yield Issue(severity=finding.severity, source="finding", message=finding.cause, fix=finding.fix)
        for alert in self._gradients.get_alerts():
            grave = alert.kind in ("nonfinite", "exploding")
            yield Issue(severity="critical" if grave else "warning", source="gradient", message=alert.message)
        for tensor in self._inspector.get_alerts():
            yield Issue(severity=tensor.severity, source="tensor", message=tensor.message)
        for told in self._diagnostics.get_alerts():
            yield Issue(severity=told.severity, source="diagnostics", message=told.message)
        for slow in self.profiler.analyze_performance():
            yield Issue(severity="warning", source="performance", message=slow.message, fix=slow.suggestion)


class _Metadata(Mapping[str, Any]):
    """What conditions may ask about. Memory is looked up only if one does."""

    _NAMES = ("loss", "gradient_norm", "memory_mb")

    def __init__(self, feed: Feed, process: psutil.Process) -> None:
        self._feed, self._process = feed, process

    def __getitem__(self, name: str) -> Any:
        if name == "loss":
            return self._feed.last_loss
        if name == "gradient_norm":
            return self._feed.last_gradient_norm
        if name == "memory_mb":
            return self._process.memory_info().rss / 2**20
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._NAMES)

    def __len__(self) -> int:
        return len(self._NAMES)


def debug_session(
    model: nn.Module | None = None, optimizer: Any = None, config: DebugConfig | None = None
) -> DebugSession:
    """Make a debug session; start it with `start()`, `with`, or `async with`."""
    return DebugSession(config, model, optimizer)


def _free_folder(folder: Path) -> Path:
    """Return a run's folder within `folder` that is not there yet."""
    return next(path for number in itertools.count(1) if not (path := folder / f"session-{number}").exists())
