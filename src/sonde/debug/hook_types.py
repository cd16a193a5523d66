"""What hooks are made of: triggers, conditions and actions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, Literal

import numpy as np

from sonde.core.arguments import whole_number
from sonde.errors import OptionError

_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}


class AlertSeverity(StrEnum):
    """How severe an alert is."""

    Info = "info"
    Warning = "warning"
    Critical = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """What triggers, conditions and callbacks see: a tensor of a layer at a step."""

    layer: str
    values: Any
    """The tensor: a torch tensor on a live model, or what was passed in."""
    is_forward: bool
    step: int
    """The step under way, as the run counts it: the first is 1. Hooks that are run by hand see what `set_step` said."""
    shape: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else is known: `loss`, `gradient_norm`, `memory_mb`, and whatever the caller added."""
    statistics: Callable[[], Mapping[str, float | None]] = dict
    """Computes the statistics of the tensor; a condition that does not need them costs nothing."""

    def number(self, name: str) -> float | None:
        """Return a number by name from the metadata or the statistics; None if it is not known."""
        value = self.metadata.get(name)
        if value is None:
            value = self.statistics().get(name)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class HookCondition:
    """A condition on an occasion. It is false where the number it needs is not known."""

    text: str
    holds: Callable[[Occasion], bool]

    @staticmethod
    def LossThreshold(threshold: float, comparison: str = ">") -> HookCondition:
        """Fire if the last loss is above (or otherwise to) a threshold."""
        return HookCondition.Statistic("loss", comparison, threshold)

    @staticmethod
    def GradientNormThreshold(threshold: float, comparison: str = ">") -> HookCondition:
        """Fire if a gradient's norm is above a threshold: the tensor's own in a backward, else the last known."""
        compare = _comparison(comparison)

        def holds(occasion: Occasion) -> bool:
            norm = occasion.metadata.get("gradient_norm")
            if norm is None and not occasion.is_forward:
                norm = occasion.statistics().get("l2_norm")
            return norm is not None and compare(float(norm), threshold)

        return HookCondition(f"gradient norm {comparison} {threshold:g}", holds)

    @staticmethod
    def MemoryThreshold(megabytes: float) -> HookCondition:
        """Fire if the process holds more memory than this."""
        return HookCondition.Statistic("memory_mb", ">", megabytes)

    @staticmethod
    def StepRange(start: int, end: int) -> HookCondition:
        """Fire from step `start` on and before step `end`."""
        if end <= start:
            raise OptionError(f"StepRange({start}, {end}) holds no step: the second number must be the larger one.")
        return HookCondition(f"step in [{start}, {end})", lambda occasion: start <= occasion.step < end)

    @staticmethod
    def NonFinite() -> HookCondition:
        """Fire if the tensor has an element that is NaN or infinite."""

        def holds(occasion: Occasion) -> bool:
            statistics = occasion.statistics()
            return bool((statistics.get("nan_count") or 0) + (statistics.get("inf_count") or 0))

        return HookCondition("NaN or infinite", holds)

    @staticmethod
    def Statistic(name: str, comparison: str, threshold: float) -> HookCondition:
        """Fire if a statistic of the tensor (`mean`, `max`, ...) or a number of the metadata is beyond a bound."""
        compare = _comparison(comparison)

        def holds(occasion: Occasion) -> bool:
            value = occasion.number(name)
            return value is not None and compare(value, threshold)

        return HookCondition(f"{name} {comparison} {threshold:g}", holds)

    @staticmethod
    def Custom(predicate: Callable[[Occasion], bool]) -> HookCondition:
        """Fire if a function of the occasion returns true."""
        return HookCondition(f"custom {getattr(predicate, '__name__', 'predicate')}", predicate)


@dataclass(frozen=True, slots=True)
class HookTrigger:
    """When a hook fires, for the layers that its patterns match."""

    kind: Literal["every_forward", "every_backward", "every_n_steps", "once", "layer_specific", "conditional"]
    interval: int = 1
    layers: tuple[str, ...] = ()
    condition: HookCondition | None = None

    EveryForward: ClassVar[HookTrigger]
    EveryBackward: ClassVar[HookTrigger]
    Once: ClassVar[HookTrigger]

    @staticmethod
    def EveryNSteps(n: int) -> HookTrigger:
        """Fire in the forward of each n-th step."""
        whole_number("EveryNSteps", n)
        return HookTrigger("every_n_steps", interval=n)

    @staticmethod
    def LayerSpecific(layers: list[str] | tuple[str, ...] | str) -> HookTrigger:
        """Fire in the forward of these layers, by their exact names."""
        return HookTrigger("layer_specific", layers=as_names("LayerSpecific", layers))

    @staticmethod
    def Conditional(condition: HookCondition | Callable[[Occasion], bool]) -> HookTrigger:
        """Fire where a condition, or a function of the occasion, holds, forward or backward."""
        if not isinstance(condition, HookCondition):
            if not callable(condition):
                raise OptionError(
                    f"Conditional takes a condition such as HookCondition.NonFinite(); got {condition!r}."
                )
            condition = HookCondition.Custom(condition)
        return HookTrigger("conditional", condition=condition)

    def fires(self, occasion: Occasion) -> bool:
        """Return whether the hook fires here."""
        if self.kind == "every_backward":
            return not occasion.is_forward
        if self.kind == "conditional":
            assert self.condition is not None
            return self.condition.holds(occasion)
        if not occasion.is_forward:
            return False
        if self.kind == "every_n_steps":
            return occasion.step % self.interval == 0
        return occasion.layer in self.layers if self.kind == "layer_specific" else True

    @property
    def needs_backward(self) -> bool:
        """Whether it needs gradients."""
        return self.kind in ("every_backward", "conditional")


HookTrigger.EveryForward = HookTrigger("every_forward")
HookTrigger.EveryBackward = HookTrigger("every_backward")
HookTrigger.Once = HookTrigger("once")

ActionKind = Literal[
    "inspect_tensor",
    "track_gradients",
    "record_activations",
    "save_snapshot",
    "alert",
    "custom_callback",
    "pause_training",
    "stop_training",
    "breakpoint",
    "capture_bundle",
]


@dataclass(frozen=True, slots=True)
class HookAction:
    """What a hook does."""

    kind: ActionKind
    path: str | None = None
    message: str = ""
    severity: AlertSeverity = AlertSeverity.Warning
    webhook: str | None = None
    callback: str | Callable[[Occasion], Any] | None = None

    InspectTensor: ClassVar[HookAction]
    TrackGradients: ClassVar[HookAction]
    RecordActivations: ClassVar[HookAction]
    PauseTraining: ClassVar[HookAction]
    StopTraining: ClassVar[HookAction]
    Breakpoint: ClassVar[HookAction]
    CaptureBundle: ClassVar[HookAction]

    @staticmethod
    def SaveSnapshot(path: str | None = None) -> HookAction:
        """Save the tensor as a safetensors file: at `path`, else in the run's folder."""
        return HookAction("save_snapshot", path=path)

    @staticmethod
    def Alert(
        message: str, severity: AlertSeverity | str = AlertSeverity.Warning, webhook: str | None = None
    ) -> HookAction:
        """Raise an alert: in the log, in the run, to the session's listeners and, if given, to a web address."""
        known = [each.value for each in AlertSeverity]
        if severity not in known:
            raise OptionError(f"severity={severity!r}: choose from {', '.join(known)}.")
        if webhook is not None:
            check_address(webhook)
        return HookAction("alert", message=message, severity=AlertSeverity(severity), webhook=webhook)

    @staticmethod
    def CustomCallback(callback: str | Callable[[Occasion], Any]) -> HookAction:
        """Call a function with the occasion: itself, or the name under which it was registered."""
        if not callable(callback) and not isinstance(callback, str):
            raise OptionError(f"CustomCallback takes a function or the name of one; got {callback!r}.")
        return HookAction("custom_callback", callback=callback)


HookAction.InspectTensor = HookAction("inspect_tensor")
HookAction.TrackGradients = HookAction("track_gradients")
HookAction.RecordActivations = HookAction("record_activations")
HookAction.PauseTraining = HookAction("pause_training")
HookAction.StopTraining = HookAction("stop_training")
HookAction.Breakpoint = HookAction("breakpoint")
HookAction.CaptureBundle = HookAction("capture_bundle")


def _comparison(text: str) -> Callable[[float, float], bool]:
    if text not in _COMPARISONS:
        raise OptionError(f"comparison={text!r}: choose from {', '.join(_COMPARISONS)}.")
    compare = _COMPARISONS[text]
    return lambda value, threshold: bool(np.isfinite(value) and compare(value, threshold))


def as_names(what: str, names: Any) -> tuple[str, ...]:
    """Return names as a tuple, also if one name was given."""
    listed = (names,) if isinstance(names, str) else tuple(names)
    wrong = [name for name in listed if not isinstance(name, str)]
    if wrong:
        raise OptionError(f"{what} takes names of layers; got {wrong[0]!r}.")
    return listed


def check_address(address: str) -> None:
    """Raise an error unless messages can be posted to an address."""
    if not address.startswith(("http://", "https://")):
        raise OptionError(f"webhook={address!r}: give an address that begins with http:// or https://.")
