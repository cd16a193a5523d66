"""`PyTorchDebugger`: checks, scopes and reports around a training loop that exists already."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.errors import OptionError
from sonde.forensics.nonfinite_scope import NonFiniteScope
from sonde.probes.readings import gradients, parameters, read_parameters, readings_of, total_norm
from sonde.pytorch_debugging import checks, passes, report, scopes
from sonde.pytorch_debugging.checks import HALF_PRECISION_MAX, GradientReport, RowsByName
from sonde.pytorch_debugging.events import MAX_KEPT, ROUTINE, EventList, Kept, Level, UserLogger, level_of, plain
from sonde.pytorch_debugging.recording import LiveChecks, Notes, made_folder
from sonde.records import Finding, Reading

if TYPE_CHECKING:
    from sonde.probes.memory.scope import MemoryScope
    from sonde.probes.profile.scope import ProfileScope

_ROUTINE_IN_RUN: Final = 5
_WEIGHT: Final = "weight of "
"""What the names of parameters begin with where they are read together with the gradients."""


class PyTorchDebugger:
    """Checks gradients, parameters, passes, memory and time on request, and keeps what it found.

    Everything goes into a run under `log_dir` (open it with `sonde show`) and, bounded, into the lists below, from
    which reports are made. Nothing here changes what is trained, and no exception is swallowed.

    Args:
        logger: A `logging` logger, or an object with `log_info`, `log_warning` and `log_error`.
        debug_mode: Whether `debug_forward_pass` and `debug_backward_pass` record anything; else they run the plain
            calls.
        enable_anomaly_detection: Whether `anomaly_detection()` is on by default.
        enable_profiling: Whether `profiling()` is on by default.
        enable_memory_tracking: Whether `memory_tracking()` is on by default.
        enable_gradient_checking: Whether `check_gradients` checks anything, and `debug_training_session` every step.
        log_dir: The folder for runs, traces and reports.
        max_kept: How many events, snapshots and violations are kept in memory; all are counted and in the run.

    Example:
        debugger = PyTorchDebugger(enable_gradient_checking=True)
        loss.backward()
        norm = debugger.check_gradients(model)

    """

    def __init__(
        self,
        logger: Any = None,
        debug_mode: bool = False,
        enable_anomaly_detection: bool = False,
        enable_profiling: bool = False,
        enable_memory_tracking: bool = False,
        enable_gradient_checking: bool = False,
        log_dir: str | Path = "debug_logs",
        *,
        max_kept: int = MAX_KEPT,
    ) -> None:
        self.logger = logger
        self.debug_mode = debug_mode
        self.enable_anomaly_detection = enable_anomaly_detection
        self.enable_profiling = enable_profiling
        self.enable_memory_tracking = enable_memory_tracking
        self.enable_gradient_checking = enable_gradient_checking
        self.log_dir = made_folder(log_dir)
        self.gradient_threshold: float | None = None
        """A norm above it is an explosion, unless a check is given its own threshold; None: the history decides."""
        self.parameter_limit = HALF_PRECISION_MAX
        """Parameters with larger magnitudes are out of range."""
        self.profiler_active = False
        self.debug_events = EventList(max_kept)
        self.memory_snapshots: Kept[dict[str, Any]] = Kept(max_kept)
        self.gradient_violations: Kept[dict[str, Any]] = Kept(max_kept)
        self.gradient_norms: Kept[float] = Kept(max_kept)
        self.losses: Kept[float] = Kept(max_kept)
        self.forward_times: Kept[float] = Kept(max_kept)
        self.backward_times: Kept[float] = Kept(max_kept)
        self._forget()
        self._log = UserLogger(logger)
        self._notes = Notes(self.log_dir, {"debugger": self._settings()})
        self._live: LiveChecks | None = None
        self._open: dict[str, Any] = {}
        """The scopes that are open: `anomaly`, `profile`, `memory`."""
        self._weight_norm: float | None = None
        self._seen: Counter[str] = Counter()
        self._model: weakref.ref[nn.Module] | None = None
        # A debugger need not be closed: its run is finished when it is collected, or when the program ends.
        self._finalizer = weakref.finalize(self, Notes.close, self._notes)

    def _forget(self) -> None:
        """Set everything that is not a list to its initial state."""
        self.anomaly_detected = False
        """Whether NaN or an infinity was found, or `anomaly_detection()` ended by an exception."""
        self.nan_detections = self.inf_detections = 0
        self.gradient_explosions = self.gradient_vanishing = 0
        self.memory_statistics: dict[str, dict[str, float]] = {}
        """Of the last `memory_tracking()`, by place: `bytes`, `peak_bytes`, `growth_bytes` and, with enough steps,
        `growth_bytes_per_step`."""
        self.last_profile: dict[str, Any] = {}
        """What the last `profiling()` found: verdicts and the slowest operators."""
        self.last_gradients: GradientReport | None = None
        self._parameters: RowsByName = {}
        self._bad_parameters: dict[str, frozenset[str]] = {}
        self.last_forward: dict[str, dict[str, Any]] = {}
        """The calls of the last debugged forward pass, by name."""
        self._tables: dict[str, dict[str, Any]] = {}

    # ------------------------------------------------------------------ scopes

    @contextlib.contextmanager
    def anomaly_detection(self, enabled: bool | None = None) -> Iterator[NonFiniteScope | None]:
        """Report where NaN and infinities come from while the block runs: forward, backward or optimizer.

        This is torch's anomaly mode and more, and slow (see the guide for figures): use it to find a fault, not to
        train.
        """
        is_on = self._is_on(enabled, self.enable_anomaly_detection, "anomaly_detection")
        with self._scope("anomaly", is_on, lambda: scopes.anomaly_scope(self)) as scope:
            yield scope

    @contextlib.contextmanager
    def profiling(
        self, enabled: bool | None = None, output_file: str | Path | None = None, *, schedule: Any = None
    ) -> Iterator[ProfileScope | None]:
        """Profile the block and write a Chrome trace. Naming an output file turns it on as well.

        `schedule` bounds long blocks: `{"wait": 1, "warmup": 1, "active": 3, "repeat": 1}` steps. The trace has Python
        stacks unless `anomaly_detection()` is open: most Python calls are its own then.
        """
        is_on = self._is_on(enabled, self.enable_profiling or output_file is not None, "profiling")
        with self._scope("profile", is_on, lambda: scopes.profiler_scope(self, output_file, schedule)) as scope:
            yield scope

    @contextlib.contextmanager
    def memory_tracking(self, enabled: bool | None = None, **options: Any) -> Iterator[MemoryScope | None]:
        """Track memory while the block runs and report what grows. `options` go to `sonde.probes.memory.scope`."""
        is_on = self._is_on(enabled, self.enable_memory_tracking, "memory_tracking")
        with self._scope("memory", is_on, lambda: scopes.tracking_scope(self, **options)) as scope:
            yield scope

    @contextlib.contextmanager
    def _scope(
        self, name: str, is_on: bool, make: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Iterator[Any]:
        """Enter a scope if it is on; one that is open already is yielded again."""
        if not is_on or name in self._open:
            yield self._open.get(name) if is_on else None
            return
        with make() as self._open[name]:
            try:
                yield self._open[name]
            finally:
                del self._open[name]

    @contextlib.contextmanager
    def _enabled_scopes(self, profiled: Mapping[str, int] | None = None) -> Iterator[None]:
        """Enter the scopes whose flags are on; `profiled` is the schedule of the profiler."""
        with contextlib.ExitStack() as stack:
            if self.enable_memory_tracking:
                stack.enter_context(self.memory_tracking())
            if self.enable_anomaly_detection:
                stack.enter_context(self.anomaly_detection())
            if self.enable_profiling:
                stack.enter_context(self.profiling(schedule=profiled))
            yield

    # ------------------------------------------------------------------ checks

    def check_gradients(self, model: nn.Module, gradient_threshold: float | None = None) -> float | None:
        """Check all gradients of a model, in one pass, and return their total norm.

        Args:
            model: The model, after a backward pass.
            gradient_threshold: A norm above it is an explosion. None: the norms of the steps before decide.

        Returns:
            The norm; NaN or infinite if a gradient is. None if gradient checking is off, 0.0 if there are no gradients.

        """
        _check_threshold(gradient_threshold)
        return self._check_gradients(model, gradient_threshold)

    def _check_gradients(
        self, model: nn.Module, threshold: float | None = None, step: int | None = None
    ) -> float | None:
        """Check all gradients; with `step`, as an automatic check of that step."""
        if not self.enable_gradient_checking:
            return None
        self._remember(model)
        found = gradients(model)
        if not found:
            self._log_debug_event(
                "no_gradients",
                f"{type(model).__name__} has no gradients: call check_gradients after loss.backward(), and before "
                "optimizer.zero_grad()",
            )
            return 0.0
        # How large the weights are is needed once; they are read along with the gradients, in one transfer.
        weights = {} if self._weight_norm is not None else parameters(model)
        readings = readings_of(found | {f"{_WEIGHT}{name}": each for name, each in weights.items()})
        readings_of_weights = {name: readings.pop(name) for name in list(readings) if name.startswith(_WEIGHT)}
        if readings_of_weights:
            self._weight_norm = total_norm(readings_of_weights.values())
        self._mark("gradient")
        self._notes.readings("gradient", readings)
        norm = checks.check_gradients(self, _rows(readings), threshold, step=step)
        self._notes.log(gradient_norm=norm)
        return norm

    def check_model_parameters(self, model: nn.Module) -> dict[str, Any]:
        """Check all parameters of a model, in one pass.

        Returns:
            Counts of elements (`total_parameters`, `nan_parameters`, `inf_parameters`, `zero_parameters`), names
            (`constant_parameters`, `out_of_range_parameters`) and `parameter_ranges` by name: min, max, mean, std.

        """
        self._remember(model)
        _check_has_values(model)
        readings = read_parameters(model)
        self._mark("parameter")
        self._notes.readings("parameter", readings)
        checks.check_parameters(self, _rows(readings))
        stats = self.last_parameters
        self._log_debug_event("parameter_check_completed", "Model parameter check completed", checks.counts_only(stats))
        return stats

    # ------------------------------------------------------------------ passes

    def debug_forward_pass(self, model: nn.Module, inputs: Any, layer_hooks: bool = True) -> Any:
        """Return `model(inputs)`; in debug mode `last_forward` then has a row for every layer's call.

        The outputs are those of the plain call and carry gradients as it does.
        """
        if not self.debug_mode:
            return model(inputs)
        self._remember(model)
        self._mark("forward")
        return passes.forward(self, model, inputs, layer_hooks=layer_hooks)

    def debug_backward_pass(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run `loss.backward()`; in debug mode check the loss and note every gradient."""
        if not isinstance(loss, Tensor):
            raise OptionError(f"debug_backward_pass(loss) takes the loss itself, a tensor; got {type(loss).__name__}.")
        if not self.debug_mode:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call] # torch
            return
        model = self._model() if self._model is not None else None
        named = {} if model is None else {id(parameter): name for name, parameter in parameters(model).items()}
        self._mark("backward")
        self._take_loss(loss)
        passes.backward(self, loss, retain_graph=retain_graph, names=named)

    def debug_training_step(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Optimizer,
        gradient_threshold: float | None = None,
    ) -> dict[str, Any]:
        """Train one step exactly as the plain calls would, and check each part of it.

        Returns:
            `forward_outputs`, `loss`, `gradient_norm` (None if gradient checking is off) and `parameter_stats`.

        """
        if not all(map(callable, (loss_fn, getattr(optimizer, "step", None)))):
            raise OptionError(
                "debug_training_step(model, inputs, targets, loss_fn, optimizer) takes a function of outputs and "
                f"targets, and an optimizer; got {type(loss_fn).__name__} and {type(optimizer).__name__}."
            )
        try:
            outputs = self.debug_forward_pass(model, inputs)
            loss = loss_fn(outputs, targets)
            value = loss.detach().item()
            if not self.debug_mode:
                self._take_loss(loss)
            self.debug_backward_pass(loss)
            norm = self.check_gradients(model, gradient_threshold)
            optimizer.step()
            optimizer.zero_grad()
            stats = self.check_model_parameters(model)
        except Exception as error:
            data = {"error": str(error), "error_type": type(error).__name__}
            self._log_debug_event("training_step_error", f"{type(error).__name__} in a training step: {error}", data)
            raise
        self._notes.end_step()
        kept = outputs.detach() if isinstance(outputs, Tensor) else outputs
        return {"forward_outputs": kept, "loss": value, "gradient_norm": norm, "parameter_stats": stats}

    def _take_loss(self, loss: Tensor) -> None:
        if loss.numel() == 1:
            self._mark("loss")
            value = loss.detach().item()
            self._notes.log(loss=value)
            checks.check_loss(self, value)

    # ------------------------------------------------------------------ results

    def get_debug_summary(self) -> dict[str, Any]:
        """Return counters and states. In a `debug_training_session`, all steps so far are checked first."""
        self._catch_up()
        summary = {
            "debug_mode": self.debug_mode,
            "anomaly_detected": self.anomaly_detected,
            "profiler_active": self.profiler_active,
            "nan_detections": self.nan_detections,
            "inf_detections": self.inf_detections,
            "gradient_explosions": self.gradient_explosions,
            "gradient_vanishing": self.gradient_vanishing,
            "debug_events_count": self.debug_events.total,
            "memory_snapshots_count": self.memory_snapshots.total,
            "gradient_violations_count": self.gradient_violations.total,
        }
        memory = self._open["memory"].statistics() if "memory" in self._open else self.memory_statistics
        return summary | ({"memory_statistics": memory} if memory else {})

    def save_debug_report(self, filename: str | Path | None = None, format: str | None = None) -> Path:
        """Write a report and return its path.

        Args:
            filename: Where; by default `debug_report_<time>` in the log directory.
            format: "json", "md" or "html"; by default what the file name ends with, else JSON.

        """
        path = report.save(self, filename, format)
        self._log.log("info", "report_saved", f"Debug report saved to {path}")
        return path

    def clear_debug_data(self) -> None:
        """Delete events, snapshots, violations, counters and results; the run on disk keeps them."""
        self._catch_up()
        for kept in (self.debug_events, self.memory_snapshots, self.gradient_violations):
            kept.clear()
        for numbers in (self.gradient_norms, self.losses, self.forward_times, self.backward_times):
            numbers.clear()
        self._forget()
        self._log.log("info", "data_cleared", "Debug data cleared")

    @property
    def last_parameters(self) -> dict[str, Any]:
        """What the last check of the parameters found; see `check_model_parameters`. Empty before one."""
        return checks.parameter_stats(self._parameters, self.parameter_limit) if self._parameters else {}

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the model that `debug_training_session` watches, causes first; empty without one."""
        return self._notes.findings

    @property
    def run(self) -> Path | None:
        """The run that this debugger writes, once there is something in it."""
        return self._notes.path

    def close(self, error: BaseException | None = None) -> None:
        """Finish the run, as failed if an error ended it. If it is never called, this happens at the program's end."""
        self._catch_up()
        self._notes.close(error)
        if self._live is not None:
            live, self._live = self._live, None
            live.close()
            live.update()  # the last look of the diagnosis comes when the run ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _log_debug_event(self, event_type: str, message: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Note an event in memory, in the run and in the logger. Returns the entry."""
        return self._note(event_type, message, data)

    # ------------------------------------------------------------------ inside

    def _note(
        self,
        event_type: str,
        message: str,
        data: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        finding: Level | None = None,
    ) -> dict[str, Any]:
        """Note an event. `step` is that of an automatic check; `finding` is the level of a finding of the run."""
        values = plain(dict(data or {}) | ({} if step is None else {"step": step}))
        words = str(message) if step is None else f"Step {step}: {message}"
        entry = {
            "timestamp": datetime.now().isoformat(),
            "event_type": str(event_type),
            "message": words,
            "data": values,
        }
        self.debug_events.append(entry)
        self._seen[entry["event_type"]] += 1
        if finding is not None:
            # The run has its findings already, and without a logger the session itself reports them.
            if self._log.is_given:
                self._log.log(finding, entry["event_type"], words, values)
            return entry
        # The run holds every step as readings; its timeline is for what is special.
        if entry["event_type"] not in ROUTINE or self._seen[entry["event_type"]] <= _ROUTINE_IN_RUN:
            self._notes.event(entry["event_type"], words, values)
        self._log.log(level_of(entry["event_type"]), entry["event_type"], words, values, ration=step is not None)
        return entry

    def _watch(self, model: nn.Module) -> None:
        """Record the model and check every step of it."""
        self._remember(model)
        self._live = LiveChecks(self, self._notes.watch(model))

    def _catch_up(self) -> None:
        """Wait until all steps so far are recorded and judged, and check those that are new."""
        if self._live is not None:
            self._notes.flush()
            self._live.update()

    def _mark(self, what: str) -> None:
        if self._live is not None:
            self._live.mark(what)

    def _count_nonfinite(self, kind: str, number: int) -> None:
        self.anomaly_detected = True
        self.nan_detections += number if kind == "nan" else 0
        self.inf_detections += number if kind == "inf" else 0

    def _keep_table_of(self, entry: dict[str, Any], name: str) -> None:
        """Let only the latest event of a kind keep its long table."""
        before = self._tables.get(name)
        if before is not None:
            before["data"].pop(name, None)
        self._tables[name] = entry

    def _is_on(self, enabled: bool | None, default: bool, what: str) -> bool:
        if enabled is None and not default:
            message = f"{what}() does nothing: enable_{what} is False. Pass enabled=True to use it here."
            self._log.log("info", f"{what}_skipped", message)
        return default if enabled is None else enabled

    def _remember(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"a model is needed, a torch.nn.Module; got {type(model).__name__}.")
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            self._weight_norm = None

    def _settings(self) -> dict[str, Any]:
        names = ("anomaly_detection", "profiling", "memory_tracking", "gradient_checking")
        return {"debug_mode": self.debug_mode} | {f"enable_{name}": getattr(self, f"enable_{name}") for name in names}


def _rows(readings: Mapping[str, Reading]) -> RowsByName:
    return {name: reading.row for name, reading in readings.items()}


def _check_threshold(threshold: Any) -> None:
    known = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if threshold is not None and (not known or not threshold > 0):
        raise OptionError(f"gradient_threshold takes a norm above 0, or None; got {threshold!r}.")


def _check_has_values(model: nn.Module) -> None:
    found = list(model.parameters())
    if found and all(parameter.is_meta for parameter in found):
        raise OptionError(
            f"The parameters of {type(model).__name__} are on the meta device, which holds no values. "
            "Give it some with model.to_empty(device=...) and its weights."
        )
