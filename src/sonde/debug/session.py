"""The debug session: inspector, gradient debugger, diagnostics, hooks and profiler around one model."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from torch import nn
from torch.optim import Optimizer

from sonde.debug.actions import Actions, WebhookSender
from sonde.debug.alerts import LEVELS, MAX_ALERTS, Alert
from sonde.debug.architecture import describe_architecture, evaluate_architecture
from sonde.debug.config import DebugConfig, Gate
from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.hooks import HookManager, Listeners, TrainingStopped
from sonde.debug.model_diagnostics import ModelDiagnostics
from sonde.debug.numbers import as_number
from sonde.debug.profiler import Profiler
from sonde.debug.recording import Feed, LiveHooks, Place, take_folder
from sonde.debug.report import DebugReport, make_report
from sonde.debug.tensor_inspector import TensorInspector
from sonde.diagnosis.case import LOSS_NAMES
from sonde.errors import ClosedError, OptionError
from sonde.hooks.guard import UNGUARDED, Handle, remove_all
from sonde.hooks.names import named_modules, own_wrapper_words, plain_name
from sonde.hooks.on_step import on_step
from sonde.probes.memory.process import resident_bytes
from sonde.probes.profile.module_times import ModuleTimes
from sonde.record.plan import What
from sonde.records import Finding
from sonde.schedule import Schedule
from sonde.session import Session
from sonde.store import open_run
from sonde.watching import open_session, watch

logger = logging.getLogger("sonde")

_NEVER: Final = Schedule("never", lambda step: False)


class DebugSession:
    """Watches a model while it trains, and takes values that are passed in.

    It attaches to the model: statistics of parameters, gradients and outputs are recorded into a run, and its parts are
    fed from that. Without a model there is only what is passed in.

    Args:
        config: What to do; see `DebugConfig`.
        model: The model, if there is one.
        optimizer: Its optimizer or optimizers; by default every optimizer that owns one of its parameters.
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
        _check_kinds(config, model)
        self.config = config or DebugConfig()
        self.id = uuid.uuid4().hex[:12]
        self.folder: Path | None = None
        """The run's folder, once the session has started; None if nothing is recorded."""
        self.report: DebugReport | None = None
        self.rank = 0
        """Which process of a distributed training this is, once the session has started."""
        self.step = 0
        """Optimizer steps since the start. Without a model, a number that is logged again begins the next."""
        self.sleep = sleep
        self.hooks = HookManager(Actions(self))
        self.profiler = Profiler()
        self.webhooks = WebhookSender()
        self.alerts: deque[dict[str, Any]] = deque(maxlen=MAX_ALERTS)
        """The last alerts, of hooks and of all parts, oldest first."""
        self._model, self._optimizer = model, optimizer
        self._schedule = self.config.schedule
        self._gate = Gate(self.config, _kinds(model), self._is_due if model is not None else None)
        self._make_parts()
        self._listeners = Listeners()
        self._feed = Feed(self.config.max_gradient_history)
        self._recording: Session | None = None
        self._is_started = False
        self._place: Place | None = None
        self._logged: set[str] = set()
        self._owners: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._findings: list[Finding] = []
        self._live: LiveHooks | None = None
        self._times = ModuleTimes() if self.config.enable_profiling and model is not None else None
        self._step_handles: list[Handle] = []
        self._bundle_reason = ""
        self._is_catching_up = False
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def _make_parts(self) -> None:
        gate, config = self._gate, self.config
        self._inspector = TensorInspector(
            config.max_tracked_tensors,
            on_alert=self._report,
            accepts=lambda what, layer: config.enable_tensor_inspection and gate.accepts(what, layer),
        )
        self._gradients = GradientDebugger(
            config.max_gradient_history,
            on_alert=self._report,
            accepts=lambda what, layer: config.enable_gradient_debugging and gate.accepts(what, layer),
        )
        self._diagnostics = ModelDiagnostics(self._report, enabled=config.enable_model_diagnostics)
        self._inspector.step_now = lambda: self.step + 1
        self._gradients.known_losses = self._diagnostics.losses
        self._gradients.known_findings = lambda: self.findings
        self._diagnostics.known_findings = self._all_findings

    def __repr__(self) -> str:
        state = "stopped" if self.report is not None else "running" if self._is_started else "not started"
        of = "" if self._model is None else f" of {type(self._model).__name__}"
        return f"<DebugSession {self.id}{of} ({state}, {self.step} steps)>"

    # ------------------------------------------------------------------ parts

    @property
    def tensor_inspector(self) -> TensorInspector:
        """Inspects single tensors."""
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
        """What is wrong with the training as far as is known now, the most likely cause first."""
        return self._recording.findings if self._recording is not None else list(self._findings)

    def _all_findings(self) -> list[Finding]:
        """Return what is wrong with the run, with the gradients, and with tensors that are not finite."""
        tensors = [alert.finding for alert in self._inspector.get_alerts() if alert.severity == "critical"]
        return [*self._gradients.judge().findings, *tensors]

    # ------------------------------------------------------------------ start and stop

    def start(self) -> Self:
        """Attach to the model and begin to record. Starting twice is an error; so is starting again after the end."""
        if self.report is not None or self._is_started:
            state = "has stopped" if self.report is not None else "is running"
            raise ClosedError(f"start() on a debug session that {state}. Make a new one with debug_session().")
        if self.config.enable_visualization:
            self._check_can_draw()
        self._open_recording()
        self._is_started = True
        if self._model is not None:
            self._diagnostics.record_architecture(describe_architecture(self._model))
            self._gradients.step_now = lambda: self.step + 1
            self.hooks.set_step(1)
            self._live = LiveHooks(self._model, self.hooks, self._metadata, self._is_due)
            self._live.refresh()
            self.hooks.on_change = self._live.refresh
            if self._times is not None:
                self._times.attach()
            wrap = UNGUARDED.wrap
            self._step_handles = on_step(wrap("steps", self._before_step), wrap("steps", self._after_step))
        return self

    def stop(self) -> DebugReport:
        """Detach from the model, finish the run and return the report. Stopping twice returns the same report."""
        return self._finish(None)

    def _finish(self, error: BaseException | None) -> DebugReport:
        if self.report is not None:
            return self.report
        self._detach()
        if self._logged:
            self._end_step_by_hand()
        if error is None:
            self._evaluate_architecture()
        if self._recording is not None:
            self._recording.__exit__(None if error is None else type(error), error, None)
            self._findings = self._recording.findings
        self._bring_up_to_date()
        with contextlib.suppress(TrainingStopped):  # it is over
            self._report_findings()
        self.webhooks.close()
        dashboard = None
        try:
            dashboard = self._write_dashboard()
        finally:
            report = self._conclude(dashboard)
        return report

    def _conclude(self, dashboard: str | None) -> DebugReport:
        self.report = self._make_report(dashboard)
        if self.kept_in is not None:
            # Ranks share the folder; each has a report of its own.
            shared = self._place is not None and self._place.write_as > 0
            self.report.save(self.kept_in / (f"debug_report_rank{self.rank}.json" if shared else "debug_report.json"))
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
        self._finish(None if isinstance(error, TrainingStopped) else error)
        return isinstance(error, TrainingStopped)

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.__exit__(kind, error, trace)

    def __await__(self) -> Generator[Any, None, Self]:
        """Return the session, so that `await session.start()` works."""
        yield from ()
        return self

    @property
    def kept_in(self) -> Path | None:
        """The run's folder, if it outlives the session."""
        return None if self._temporary is not None else self.folder

    # ------------------------------------------------------------------ verbs

    def log(self, **scalars: Any) -> None:
        """Record single numbers of this step, such as a loss.

        With a model, steps are those of its optimizer. Without one, logging the same name again starts the next step.
        An `accuracy`, `throughput_samples_per_sec` or `gpu_utilization` that falls and stays low raises an alert.

        Raises:
            ClosedError: The session has not started, or has stopped.

        """
        self._check_running("log")
        if self._model is None:
            self._log_by_hand(scalars)
        elif self._recording is not None:
            self._recording.log(**scalars)
        for name, value in scalars.items():
            if isinstance(value, int | float):  # a tensor is not waited for
                self._diagnostics.record_metric(name, float(value))

    def _log_by_hand(self, scalars: Mapping[str, Any]) -> None:
        if not self._logged.isdisjoint(scalars):
            self._end_step_by_hand()
        self._logged.update(scalars)
        if self._recording is not None:
            self._recording.log(**scalars)
        name = next((name for name in LOSS_NAMES if name in scalars), None)
        if name is not None:
            self._diagnostics.record_training_dynamics(self.step + 1, as_number(scalars[name], name))

    def _end_step_by_hand(self) -> None:
        self._logged.clear()
        self.step += 1
        self.hooks.set_step(self.step + 1)
        if self._recording is not None:
            self._recording.step()

    def record(self, site: str, values: Any) -> None:
        """Record the statistics of a tensor under a name."""
        self._check_running("record")
        wanted = self.config.enable_tensor_inspection and self._gate.accepts(f"record {site}", None)
        if self._recording is not None and wanted:
            self._recording.record(site, values)

    def note(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something on the run's timeline, while the run is open."""
        if self._recording is not None and not self._recording.is_closed:
            self._recording.event(event_type, message, data)

    def debug_tensor(self, tensor: Any, name: str, layer: str | None = None, operation: str | None = None) -> str:
        """Inspect a tensor; return the id of the inspection."""
        return self.tensor_inspector.inspect_tensor(tensor, name, layer, operation)

    def debug_gradients(self, layer: str, values: Any) -> None:
        """Record the gradient of a layer."""
        self.gradient_debugger.record_gradient_flow(layer, values)

    def on_alert(self, listener: Callable[[dict[str, Any]], Any]) -> None:
        """Call a function with every alert as it happens: of hooks, of all parts, and every new finding.

        An alert is a dict with `source`, `kind`, `severity`, `message`, `step` and `layer`. Findings on a watched model
        are made in the background and delivered at the end of the next step. A listener that raises `TrainingStopped`
        ends the training; any other exception is logged once.
        """
        self._listeners.add(listener)

    def take_alert(self, alert: dict[str, Any], *, is_finding: bool = False) -> None:
        """Remember an alert, log it, note it in the run and call the listeners."""
        self.alerts.append(alert)
        logger.log(LEVELS[alert["severity"]], "%s", alert["message"])
        if not is_finding:  # findings are in the run already
            self.note("alert", alert["message"], alert)
        self._listeners.call(alert)

    def _report(self, alert: Alert) -> None:
        if not self._is_catching_up:
            self.take_alert(alert.to_json())

    def _report_findings(self) -> None:
        for finding in self._feed.take_findings():
            if not finding.withdrawn:
                self.take_alert(Alert(finding).to_json(), is_finding=True)

    def clear(self) -> None:
        """Forget tensors, gradients, metrics, times and alerts, to free memory in a long training.

        The run on disk, the findings, the hooks and the step stay.
        """
        self._feed.clear()
        self._inspector.clear()
        self._gradients.reset()
        self._diagnostics.clear()
        self.profiler.clear()
        self.alerts.clear()

    def save_bundle(self, reason: str = "by hand") -> Path | None:
        """Save what is needed to repeat the current step; None after a fault of Sonde's, which is logged."""
        if self._recording is None or self._model is None:
            raise OptionError("save_bundle() needs a session that was started with a model.")
        return self._recording.save_bundle(reason)

    def want_bundle(self, reason: str) -> None:
        """Save a bundle before the optimizer steps: in the middle of a pass there is nothing whole to save yet."""
        if self._recording is None or self._model is None:
            raise OptionError("A bundle needs a session that was started with a model.")
        self._bundle_reason = self._bundle_reason or reason

    def snapshot(self) -> dict[str, Any]:
        """Return the state of everything now as JSON-ready values."""
        return self._report_now().to_json()

    generate_snapshot = snapshot

    def export(self, path: str | Path) -> Path:
        """Write the final report, or the current one while the session runs; see `DebugReport.save` for the formats."""
        return (self.report or self._report_now()).save(path)

    def _report_now(self) -> DebugReport:
        if self._recording is not None:
            self._recording.flush()
        self._bring_up_to_date()
        return self._make_report(None)

    # ------------------------------------------------------------------ how

    def _check_running(self, verb: str) -> None:
        if not self._is_started or self.report is not None:
            state = "has not started: call start() first" if self.report is None else "has stopped: make a new one"
            raise ClosedError(f"{verb}() on a debug session that {state}.")

    def _check_can_draw(self) -> None:
        """Report before the training, not after it, that no dashboard can be written."""
        from sonde.views.figures.theme import graph_objects

        if self.config.output_dir is None:
            logger.warning("enable_visualization has no effect without an output_dir: the dashboard goes there.")
        else:
            graph_objects()

    def _open_recording(self) -> None:
        if self.config.output_dir is not None:
            self._place = take_folder(Path(self.config.output_dir))
        elif self._model is not None:
            self._temporary = tempfile.TemporaryDirectory(prefix="sonde-debug-")
            self._place = Place(Path(self._temporary.name) / "run")
        if self._place is None:
            return
        self.folder, self.rank = self._place.folder, self._place.rank
        try:
            self._recording = self._watch(self._place)
        except BaseException:
            self._leave(self._place)
            raise
        if self._model is not None:
            self._recording.subscribe(self._feed)

    def _watch(self, place: Place) -> Session:
        if self._model is None:
            return open_session(run=place.folder, rank=place.write_as)
        what = self._what()
        return watch(
            self._model,
            self._optimizer,
            run=place.folder,
            what=what or ["gradients"],  # watch needs a quantity, even if no step is ever sampled
            where=self.config.layers,
            every=self._schedule if what else _NEVER,
            histogram=self.config.histogram,
            diagnose=self.config.enable_model_diagnostics,
            rank=place.write_as,
            budget=None,  # how often to look is the user's choice here
        )

    def _leave(self, place: Place) -> None:
        """Remove a folder that was made for nothing."""
        if self._temporary is not None:
            self._temporary.cleanup()
        with contextlib.suppress(OSError):
            place.folder.rmdir()
        self._temporary, self._place, self.folder = None, None, None

    def _what(self) -> list[What]:
        what: list[What] = []
        if self.config.enable_tensor_inspection:
            what += ["parameters", "outputs"]
        if self.config.enable_gradient_debugging:
            what += ["gradients", "updates"]
        if self.config.enable_model_diagnostics and not what:
            what = ["gradients"]  # most of the diagnosis rests on them
        return what

    def _evaluate_architecture(self) -> None:
        if self._model is not None and self.config.enable_model_diagnostics:
            try:
                self._diagnostics.evaluation = evaluate_architecture(self._model)
            except RuntimeError as error:  # a device that is out of memory, or has failed
                logger.warning("the architecture could not be evaluated: %s", error)

    def _take_layer_times(self) -> None:
        """Hand the profiler what each layer took in a call; a container is the sum of what is in it, and left out."""
        if self._times is None:
            return
        times, self._times = self._times, None
        times.remove()
        assert self._model is not None
        own = own_wrapper_words(self._model)
        leaves = {name: each for name, each in self._model.named_modules() if not any(True for _ in each.children())}
        for row in times.table():
            if row.calls and row.name in leaves and self._gate.selects(plain_name(row.name, own)):
                backward = None if row.backward_ms is None else row.backward_ms / row.calls / 1e3
                size = sum(parameter.numel() for parameter in leaves[row.name].parameters())
                forward, name = row.forward_ms / row.calls / 1e3, plain_name(row.name, own)
                self.profiler.record_layer_execution(name, row.kind, forward, backward, parameter_count=size)

    def _detach(self) -> None:
        self._take_layer_times()
        self.hooks.on_change = None
        if self._live is not None:
            self._live.remove()
        remove_all(self._step_handles)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._times is not None:
            self._times.end_backward()
        if self._bundle_reason and self._is_ours(optimizer):
            reason, self._bundle_reason = self._bundle_reason, ""
            self.save_bundle(reason)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self.step += 1
        self.hooks.set_step(self.step + 1)  # the step under way, as the run counts it
        if self._live is not None:
            self._live.refresh()
        self._report_findings()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is one that was given or, if none was, one that owns a parameter of the model."""
        known = self._owners.get(optimizer)
        if known is None:
            known = self._owners[optimizer] = self._owns_ours(optimizer)
        return known

    def _owns_ours(self, optimizer: Optimizer) -> bool:
        if self._optimizer is not None:
            ours = [self._optimizer] if isinstance(self._optimizer, Optimizer) else list(self._optimizer)
            return any(optimizer is each for each in ours)
        parameters = set() if self._model is None else {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])

    def _is_due(self) -> bool:
        return self._schedule(self.step + 1)

    def _metadata(self) -> Mapping[str, Any]:
        """Return what conditions may ask about besides the tensor."""
        resident = resident_bytes()
        memory = None if resident is None else resident / 2**20
        return {"loss": self._feed.last_loss, "gradient_norm": self._feed.last_gradient_norm, "memory_mb": memory}

    def _bring_up_to_date(self) -> None:
        """Hand over what was recorded from the model. Its problems are reported as findings, not once more here."""
        self._is_catching_up = self._recording is not None and self.config.enable_model_diagnostics
        try:
            self._feed.empty_into(self._inspector, self._gradients, self._diagnostics, self.profiler)
        finally:
            self._is_catching_up = False

    def _write_dashboard(self) -> str | None:
        if not self.config.enable_visualization or self.kept_in is None:
            return None
        if self._place is not None and self._place.write_as > 0:
            return None  # the first rank draws the run of all
        # Imported here: a session that draws nothing does not need plotly.
        from sonde.debug.visualizer import DebugVisualizer

        visualizer = DebugVisualizer()
        visualizer.plot_run(open_run(self.kept_in))
        visualizer.plot_parts(self._gradients, self._inspector, self._diagnostics)
        return str(visualizer.create_dashboard(path=self.kept_in / "dashboard.html"))

    def _make_report(self, dashboard: str | None) -> DebugReport:
        return make_report(self, self._gradients, self._inspector, self._diagnostics, dashboard)


def _kinds(model: nn.Module | None) -> dict[str, str]:
    return {} if model is None else {name: type(each).__name__ for name, each, _ in named_modules({"": model})}


def debug_session(
    model: nn.Module | None = None, optimizer: Any = None, config: DebugConfig | None = None
) -> DebugSession:
    """Make a debug session; start it with `start()`, `with`, or `async with`."""
    return DebugSession(config, model, optimizer)


def debug_session_with_config(config: DebugConfig) -> DebugSession:
    """Make a debug session without a model: only what is passed in counts."""
    return DebugSession(config)


def _check_kinds(config: Any, model: Any) -> None:
    """Raise where arguments are in the order of the other way to make a session."""
    if config is not None and not isinstance(config, DebugConfig):
        raise OptionError(
            f"config takes a DebugConfig; got {type(config).__name__}. Write debug_session(model, optimizer, config) "
            "or DebugSession(config, model, optimizer)."
        )
    if model is not None and not isinstance(model, nn.Module):
        raise OptionError(
            f"model takes a torch.nn.Module; got {type(model).__name__}. Write debug_session(model, optimizer, config) "
            "or, without a model, debug_session(config=config)."
        )
