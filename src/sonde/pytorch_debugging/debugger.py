"""`PyTorchDebugger`: checks, scopes and reports around a training loop that somebody else has written."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.checks import NonFiniteScope, parameters, read_gradients, read_parameters
from sonde.errors import OptionError
from sonde.pytorch_debugging import passes, report, scopes
from sonde.pytorch_debugging.event_list import ROUTINE, EventList
from sonde.pytorch_debugging.gradient_report import GradientReport, report_gradients
from sonde.pytorch_debugging.kept import MAX_KEPT, Kept
from sonde.pytorch_debugging.log_place import made_folder
from sonde.pytorch_debugging.norm_history import NormHistory
from sonde.pytorch_debugging.notes import Notes
from sonde.pytorch_debugging.parameter_report import LARGEST_USUAL, counts_only, parameter_stats
from sonde.pytorch_debugging.plain_values import plain
from sonde.pytorch_debugging.speaking import Level, Speaker
from sonde.records import Finding

if TYPE_CHECKING:
    from sonde.probes.memory_scope import MemoryScope
    from sonde.probes.profiling import ProfileScope

_ERRORS: Final = ("anomaly_detected", "_error", "nan_", "inf_", "gradient_explosion", "loss_anomaly")
_ROUTINE_IN_RUN: Final = 5
_WARNINGS: Final = ("gradient_vanishing", "memory_leak", "out_of_range", "recovery", "_skipped")


class PyTorchDebugger:
    """Looks at gradients, parameters, passes, memory and time when asked, and keeps what it saw.

    Everything goes into a run under `log_dir` (open it with `sonde show`) and, bounded, into the lists below, from
    which reports are made. Nothing here changes what is trained, and no exception is swallowed.

    Args:
        logger: A `logging` logger, or an object with `log_info`, `log_warning` and `log_error`.
        debug_mode: Whether `debug_forward_pass` and `debug_backward_pass` look; else they run the plain calls.
        enable_anomaly_detection: Whether `anomaly_detection()` does something unless told otherwise.
        enable_profiling: The same for `profiling()`.
        enable_memory_tracking: The same for `memory_tracking()`.
        enable_gradient_checking: Whether `check_gradients` looks.
        log_dir: Where runs, traces and reports go.
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
        """What gradient norms are held against if a check is given no threshold; None: the run's own history."""
        self.parameter_limit = LARGEST_USUAL
        """Parameters with larger magnitudes are out of range."""
        self.anomaly_detected = False
        self.profiler_active = False
        self.nan_detections = 0
        self.inf_detections = 0
        self.gradient_explosions = 0
        self.gradient_vanishing = 0
        self.debug_events = EventList(max_kept)
        self.memory_snapshots: Kept[dict[str, Any]] = Kept(max_kept)
        self.gradient_violations: Kept[dict[str, Any]] = Kept(max_kept)
        self.gradient_norms: Kept[float] = Kept(max_kept)
        self.losses: Kept[float] = Kept(max_kept)
        self.forward_times: Kept[float] = Kept(max_kept)
        self.backward_times: Kept[float] = Kept(max_kept)
        self.last_gradients: GradientReport | None = None
        self.last_forward: dict[str, dict[str, Any]] = {}
        """The calls of the last debugged forward pass, by name."""
        self.last_parameters: dict[str, Any] = {}
        self._history = NormHistory()
        self._speaker = Speaker(logger)
        self._notes = Notes(self.log_dir, {"debugger": self._settings()})
        self._anomaly: NonFiniteScope | None = None
        self._profile: ProfileScope | None = None
        self._memory: MemoryScope | None = None
        self._tables: dict[str, dict[str, Any]] = {}
        self._seen: Counter[str] = Counter()
        self._model: weakref.ref[nn.Module] | None = None
        # Nobody has to close a debugger: its run is finished when it goes, or when the program ends.
        self._finalizer = weakref.finalize(self, Notes.close, self._notes)

    # ------------------------------------------------------------------ scopes

    @contextlib.contextmanager
    def anomaly_detection(self, enabled: bool | None = None) -> Iterator[NonFiniteScope | None]:
        """Tell where NaN and infinities come from while the block runs: forward, backward or optimizer.

        This is torch's anomaly mode and more, and slow (see the guide for figures): use it to find out, not to train.
        """
        if not self._is_on(enabled, self.enable_anomaly_detection, "anomaly_detection"):
            yield None
        elif self._anomaly is not None:
            yield self._anomaly  # already inside one
        else:
            with scopes.anomaly_scope(self) as self._anomaly:
                try:
                    yield self._anomaly
                finally:
                    self._anomaly = None

    @contextlib.contextmanager
    def profiling(
        self, enabled: bool | None = None, output_file: str | Path | None = None, *, schedule: Any = None
    ) -> Iterator[ProfileScope | None]:
        """Profile the block and write a Chrome trace. Naming an output file turns it on as well.

        `schedule` bounds long blocks: `{"wait": 1, "warmup": 1, "active": 3, "repeat": 1}` steps.
        """
        wanted = self.enable_profiling or output_file is not None
        if not self._is_on(enabled, wanted, "profiling"):
            yield None
        elif self._profile is not None:
            yield self._profile
        else:
            with scopes.profiler_scope(self, output_file, schedule) as self._profile:
                try:
                    yield self._profile
                finally:
                    self._profile = None

    @contextlib.contextmanager
    def memory_tracking(self, enabled: bool | None = None, **options: Any) -> Iterator[MemoryScope | None]:
        """Watch memory while the block runs and tell what grows. `options` go to `sonde.probes.memory_scope`."""
        if not self._is_on(enabled, self.enable_memory_tracking, "memory_tracking"):
            yield None
        elif self._memory is not None:
            yield self._memory
        else:
            with scopes.tracking_scope(self, **options) as self._memory:
                try:
                    yield self._memory
                finally:
                    self._memory = None

    # ------------------------------------------------------------------ checks

    def check_gradients(self, model: nn.Module, gradient_threshold: float | None = None) -> float | None:
        """Look at all gradients of a model, in one pass, and return their total norm.

        Args:
            model: The model, after a backward pass.
            gradient_threshold: A norm above it is an explosion. None: what this run is used to decides.

        Returns:
            The norm; NaN or infinite if a gradient is. None if gradient checking is off, 0.0 if there are no gradients.

        """
        if not self.enable_gradient_checking:
            return None
        self._remember(model)
        _check_threshold(gradient_threshold)
        readings = read_gradients(model)
        if not readings:
            self._log_debug_event(
                "no_gradients",
                f"{type(model).__name__} has no gradients: call check_gradients after loss.backward(), and before "
                "optimizer.zero_grad()",
            )
            return 0.0
        threshold = self.gradient_threshold if gradient_threshold is None else gradient_threshold
        found = report_gradients(readings, threshold, self._history)
        self.last_gradients = found
        self.gradient_norms.append(found.norm)
        self._notes.readings("gradient", readings)
        self._notes.log(gradient_norm=found.norm)
        self._tell_gradients(found)
        return found.norm

    def check_model_parameters(self, model: nn.Module) -> dict[str, Any]:
        """Look at all parameters of a model, in one pass.

        Returns:
            Counts of elements (`total_parameters`, `nan_parameters`, `inf_parameters`, `zero_parameters`), names
            (`constant_parameters`, `out_of_range_parameters`) and `parameter_ranges` by name: min, max, mean, std.

        """
        self._remember(model)
        _check_has_values(model)
        readings = read_parameters(model)
        stats = parameter_stats(readings, self.parameter_limit)
        self.last_parameters = stats
        self._notes.readings("parameter", readings)
        for kind in ("nan", "inf"):
            bad = {name: int(count) for name, each in readings.items() if (count := each.get(kind))}
            if bad:
                first, data = next(iter(bad)), {"parameter_name": next(iter(bad)), f"{kind}_count": bad}
                message = f"{_written(kind)} in {_count(bad, 'parameter')}, first {first} ({bad[first]} elements)"
                self._log_debug_event(f"{kind}_parameter_detected", message, data)
        if stats["out_of_range_parameters"]:
            names = stats["out_of_range_parameters"]
            message = f"{_count(names, 'parameter')} beyond +-{self.parameter_limit:g}, first {names[0]}"
            self._log_debug_event("out_of_range_parameter_detected", message, {"parameters": names[:20]})
        self._log_debug_event("parameter_check_completed", "Model parameter check completed", counts_only(stats))
        return stats

    # ------------------------------------------------------------------ passes

    def debug_forward_pass(self, model: nn.Module, inputs: Any, layer_hooks: bool = True) -> Any:
        """Return `model(inputs)`; in debug mode with a table of every layer's call in `last_forward`.

        The outputs are those of the plain call and carry gradients as it does.
        """
        if not self.debug_mode:
            return model(inputs)
        self._remember(model)
        return passes.forward(self, model, inputs, layer_hooks=layer_hooks)

    def debug_backward_pass(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run `loss.backward()`; in debug mode with a word on the loss and on every gradient."""
        if not isinstance(loss, Tensor):
            raise OptionError(f"debug_backward_pass(loss) takes the loss itself, a tensor; got {type(loss).__name__}.")
        if not self.debug_mode:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call] # torch
            return
        model = self._model() if self._model is not None else None
        named = {} if model is None else {id(parameter): name for name, parameter in parameters(model).items()}
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
        """Train one step exactly as the plain calls would, and look at each part of it.

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
            self.losses.append(value)
            self._notes.log(loss=value)
            if not math.isfinite(value):
                data = {"loss_value": value, "loss_type": "NaN" if math.isnan(value) else "Inf"}
                self._log_debug_event("loss_anomaly", f"The loss is {value}", data)
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

    # ------------------------------------------------------------------ what was seen

    def get_debug_summary(self) -> dict[str, Any]:
        """Return what was seen so far, in numbers."""
        return {
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

    def save_debug_report(self, filename: str | Path | None = None, format: str | None = None) -> Path:
        """Write a report and return its path.

        Args:
            filename: Where; by default `debug_report_<time>` in the log directory.
            format: "json", "md" or "html"; by default what the file name ends with, else JSON.

        """
        path = report.save(self, filename, format)
        self._speaker.say("info", "report_saved", f"Debug report saved to {path}")
        return path

    def clear_debug_data(self) -> None:
        """Forget events, snapshots, violations and counters; the run on disk keeps them."""
        self.debug_events.clear()
        self.memory_snapshots.clear()
        self.gradient_violations.clear()
        for numbers in (self.gradient_norms, self.losses, self.forward_times, self.backward_times):
            numbers.clear()
        self.nan_detections = self.inf_detections = self.gradient_explosions = self.gradient_vanishing = 0
        self._tables.clear()
        self._speaker.say("info", "data_cleared", "Debug data cleared")

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the model that `debug_training_session` watches, causes first; empty without one."""
        return self._notes.findings

    @property
    def run(self) -> Path | None:
        """The run that this debugger writes, once it has something to say."""
        return self._notes.path

    def close(self, error: BaseException | None = None) -> None:
        """Finish the run, as failed if an error ended it. Who forgets it loses nothing: it is done in the end."""
        self._notes.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _log_debug_event(self, event_type: str, message: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Note an event: in memory, in the run and to the logger. Returns the entry."""
        values = plain(dict(data or {}))
        entry = {
            "timestamp": datetime.now().isoformat(),
            "event_type": str(event_type),
            "message": str(message),
            "data": values,
        }
        self.debug_events.append(entry)
        self._seen[entry["event_type"]] += 1
        # What every step says is in the run as readings and numbers; its timeline is for what is special.
        if entry["event_type"] not in ROUTINE or self._seen[entry["event_type"]] <= _ROUTINE_IN_RUN:
            self._notes.event(entry["event_type"], entry["message"], values)
        self._speaker.say(_level(entry["event_type"]), entry["event_type"], entry["message"], values)
        return entry

    # ------------------------------------------------------------------ inside

    def _tell_gradients(self, found: GradientReport) -> None:
        for kind, bad in (("nan", found.nan), ("inf", found.inf)):
            if bad:
                first = next(iter(bad))
                message = f"{_written(kind)} in {_count(bad, 'gradient')}, first {first} ({bad[first]} elements)"
                self._violate(f"{kind}_gradient_detected", message, found)
        self.nan_detections += len(found.nan)
        self.inf_detections += len(found.inf)
        if found.verdict == "exploding":
            self.gradient_explosions += 1
            message = f"The gradient norm is {found.norm}"
            if math.isfinite(found.norm):
                held = f"held against {found.held_against()}; largest: {found.largest[0][0]}"
                message = f"Gradient norm {found.norm:.4g}, {held}"
            self._violate("gradient_explosion", message, found)
        elif found.verdict == "vanishing":
            self.gradient_vanishing += 1
            message = f"Gradient norm {found.norm:.4g} has vanished, held against {found.held_against()}"
            self._violate("gradient_vanishing", message, found)

    def _violate(self, kind: str, message: str, found: GradientReport) -> None:
        entry = self._log_debug_event(kind, message, found.data())
        self.gradient_violations.append(entry)

    def _keep_table_of(self, entry: dict[str, Any], name: str) -> None:
        """Let only the latest event of a kind keep its long table."""
        before = self._tables.get(name)
        if before is not None:
            before["data"].pop(name, None)
        self._tables[name] = entry

    def _is_on(self, enabled: bool | None, default: bool, what: str) -> bool:
        if enabled is None and not default:
            message = f"{what}() does nothing: enable_{what} is False. Pass enabled=True to use it here."
            self._speaker.say("info", f"{what}_skipped", message)
        return default if enabled is None else enabled

    def _remember(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"a model is needed, a torch.nn.Module; got {type(model).__name__}.")
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)

    def _settings(self) -> dict[str, Any]:
        names = ("anomaly_detection", "profiling", "memory_tracking", "gradient_checking")
        return {"debug_mode": self.debug_mode} | {f"enable_{name}": getattr(self, f"enable_{name}") for name in names}


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


def _level(event_type: str) -> Level:
    if any(word in event_type for word in _ERRORS):
        return "error"
    return "warning" if any(word in event_type for word in _WARNINGS) else "info"


def _written(kind: str) -> str:
    return {"nan": "NaN", "inf": "Inf"}[kind]


def _count(items: Any, word: str) -> str:
    return f"{len(items)} {word}{'s' if len(items) != 1 else ''}"
