"""Rules of other tools, re-expressed with their published thresholds and fed from the same readings.

SageMaker Debugger looks at saved tensors (by default every 500 steps; here at every step). AutoTrainer looks once an
epoch (here every 20 steps) and only once 30 % of the training is over and the accuracy does not satisfy (below 0.6;
where a program logs no accuracy: while the loss has fallen by less than 40 %). Where a rule needs single elements that
readings do not hold, the nearest statistic stands in for them, as its docstring says. `names` lists the kinds for
which a rule counts as naming the cause: a tool that says "exploding tensor" of a NaN is given that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from scoring import Said

from sonde.core import schema, signals, statistics
from sonde.records import Block, Event, Finding, Quantity, Site

NON_FINITE = (
    "nan_forward",
    "nan_backward",
    "nan_in_data",
    "fp16_overflow",
    "fully_masked_attention",
    "exploding_gradient",
)


@dataclass
class Tape:
    """Everything that was read in a run, by site. A sink."""

    sites: dict[int, Site] = field(default_factory=dict)
    series: dict[int, list[tuple[int, np.ndarray, np.ndarray | None]]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    last_step: int = 0
    reported: dict[str, int] = field(default_factory=dict)
    """The last step read when a finding of a kind first came as a warning or worse."""

    def take_sites(self, sites: list[Site]) -> None:
        self.sites.update((site.id, site) for site in sites)

    def take_block(self, block: Block) -> None:
        self.last_step = max(self.last_step, block.step)
        for index, site in enumerate(block.sites.tolist()):
            bins = block.bins[index] if block.binned[index] else None
            self.series.setdefault(site, []).append((block.step, block.rows[index], bins))

    def take_event(self, event: Event) -> None:
        self.events.append(event)

    def take_finding(self, finding: Finding) -> None:
        if finding.severity != "info":
            self.reported.setdefault(finding.kind, self.last_step)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def of(self, quantity: Quantity, phase: str = "train", part: str | None = None) -> Iterator[Site]:
        """Yield the sites of a quantity that were read, in the model's order."""
        for site in self.sites.values():
            if (
                site.quantity == quantity
                and site.phase == phase
                and site.id in self.series
                and part in (None, site.part)
            ):
                yield site

    def values(self, site: Site, measure: str) -> list[tuple[int, float]]:
        """Return a measure of a site over the steps."""
        steps, rows, _ = zip(*self.series[site.id], strict=True)
        return list(zip(steps, statistics.compute(measure, np.stack(rows)).tolist(), strict=True))

    def width(self, site: Site) -> list[tuple[int, float]]:
        """Return, over the steps, the width of the middle 90 % of values spread evenly around zero."""
        return [
            (step, 2 * float(statistics.abs_quantile(row, bins, 0.9)[0]))
            for step, row, bins in self.series[site.id]
            if bins is not None
        ]

    def rows(self, site: Site) -> list[tuple[int, np.ndarray]]:
        return [(step, row) for step, row, _ in self.series[site.id]]

    def scalar(self, *names: str) -> list[tuple[int, float]]:
        """Return the first of these logged numbers that there is; not finite ones are NaN."""
        for site in self.of("scalar"):
            if site.name in names:
                return [(step, row[schema.MEAN] if schema.finite(row) else math.nan) for step, row in self.rows(site)]
        return []

    @property
    def kernels(self) -> list[Site]:
        """The gradients of weights, first layer first."""
        return [site for site in self.of("gradient") if len(site.shape) > 1]


Alarm = Callable[[Tape], int | None]
"""Looks at a run and returns the step at which the rule first holds."""


@dataclass(frozen=True)
class PeerRule:
    name: str
    alarm: Alarm
    names: tuple[str, ...] = ()


def _first(*found: int | None) -> int | None:
    return min((step for step in found if step is not None), default=None)


def _persists(values: list[tuple[int, float]], holds: Callable[[float], bool], times: int = 1) -> int | None:
    count = 0
    for step, value in values:
        count = count + 1 if holds(value) else 0
        if count >= times:
            return step
    return None


# ------------------------------------------------------------------ SageMaker Debugger


def vanishing_gradient(tape: Tape) -> int | None:
    """Mean |g| of any gradient below 1e-7."""
    return _first(*(_persists(tape.values(site, "abs_mean"), lambda mean: mean < 1e-7) for site in tape.of("gradient")))


def exploding_tensor(tape: Tape) -> int | None:
    """Any NaN or infinity in any tensor, or in the loss."""
    found = [
        _persists(
            [(step, schema.finite(row) - row[schema.COUNT]) for step, row in tape.rows(site)], lambda lost: lost < 0
        )
        for quantity in ("parameter", "gradient", "output", "scalar")
        for site in tape.of(quantity)
    ]
    return _first(*found)


def dead_relu(tape: Tape) -> int | None:
    """More than half of a rectifier's units inactive. Readings know "never active" instead of "active below 1 %"."""
    sites = tape.of("vital", part=signals.part_of(signals.EVER_ACTIVE))
    return _first(*(_persists(tape.values(site, "mean"), lambda share: share < 0.5, times=3) for site in sites))


def saturated_activation(tape: Tape) -> int | None:
    """Half of the outputs of a tanh (input beyond 9.5) or sigmoid (above 17 or below -23) at their ends.

    In float32 these inputs give outputs of exactly 1 in size, or below 2**-33.
    """
    found = []
    for site in tape.of("output"):
        if site.kind in ("Tanh", "Sigmoid"):
            shares = [(step, _saturated(row, bins)) for step, row, bins in tape.series[site.id]]
            found.append(_persists(shares, lambda share: share > 0.5))
    return _first(*found)


def _saturated(row: np.ndarray, bins: np.ndarray | None) -> float:
    small = 0 if bins is None else bins[: -33 - schema.FIRST_EXPONENT].sum()
    return float((row[schema.GE_ONE] + small) / max(row[schema.COUNT], 1))


def update_ratio_large(tape: Tape) -> int | None:
    """|update| / |weight| above 10."""
    return _first(*(_persists(values, lambda ratio: ratio > 10) for values in _update_ratios(tape)))


def update_ratio_small(tape: Tape) -> int | None:
    """|update| / |weight| below 1e-8."""
    return _first(*(_persists(values, lambda ratio: ratio < 1e-8) for values in _update_ratios(tape)))


def unchanged_tensor(tape: Tape) -> int | None:
    """A weight close to itself (relative 1e-5) over three steps. The ratio of norms stands for single elements."""
    return _first(*(_persists(values, lambda ratio: ratio < 1e-5, times=3) for values in _update_ratios(tape)))


def _update_ratios(tape: Tape) -> list[list[tuple[int, float]]]:
    weights = {site.name: dict(tape.values(site, "norm")) for site in tape.of("parameter") if len(site.shape) > 1}
    return [
        [
            (step, norm / (weights[site.name].get(step, math.nan) + 1e-9))
            for step, norm in tape.values(site, "norm")
            if step > 0
        ]
        for site in tape.of("update")
        if site.name in weights
    ]


def poor_initialization(tape: Tape) -> int | None:
    """In the first ten steps: variances of weights apart by more than 10, or 90 % of a gradient within 0.001."""
    stds = [
        values[0][1] for site in tape.of("parameter") if len(site.shape) > 1 and (values := tape.values(site, "std"))
    ]
    if len(stds) > 1 and max(stds) ** 2 > 10 * min(stds) ** 2:
        return 1
    early = [[(step, width) for step, width in tape.width(site) if step <= 10] for site in tape.kernels]
    return _first(*(_persists(values, lambda width: width < 1e-3) for values in early))


def all_zero(tape: Tape) -> int | None:
    """A gradient, or a weight after the first step, of zeros only."""
    found = []
    for site in [*tape.kernels, *(site for site in tape.of("parameter") if len(site.shape) > 1)]:
        shares = [(step, row[schema.ZERO] / max(row[schema.COUNT], 1)) for step, row in tape.rows(site) if step > 0]
        found.append(_persists(shares, lambda share: share == 1))
    return _first(*found)


def loss_not_decreasing(tape: Tape) -> int | None:
    """The loss falls by less than 0.1 % in ten steps; of means over ten steps, to spare it the noise of batches."""
    values = tape.scalar("loss", "train_loss")
    losses = np.array([value for _, value in values])
    for end in range(20, len(losses) + 1, 10):
        before, now = losses[end - 20 : end - 10].mean(), losses[end - 10 : end].mean()
        if not now < before * (1 - 0.001):
            return values[end - 1][0]
    return None


def overfit(tape: Tape) -> int | None:
    """(validation - training loss) / training loss above 0.1."""
    train = dict(tape.scalar("loss", "train_loss"))
    for step, value in tape.scalar("val_loss"):
        known = [loss for at, loss in train.items() if step - 20 < at <= step]
        if known and (value - np.mean(known)) / np.mean(known) > 0.1:
            return step
    return None


def class_imbalance(tape: Tape) -> int | None:
    """More than ten labels of one class for one of another, after 500.

    Readings hold the largest and the smallest count of each batch; their sums stand for those of the classes.
    """
    for site in tape.of("vital", part=signals.part_of(signals.LABEL_COUNTS)):
        seen = most = least = 0.0
        for step, row in tape.rows(site):
            seen += row[schema.MEAN] * row[schema.COUNT]
            most, least = most + row[schema.MAX], least + row[schema.MIN]
            if seen > 500 and most > 10 * least:
                return step
    return None


def check_input_images(tape: Tape) -> int | None:
    """The mean of images over 500 of them beyond 0.2."""
    for site in tape.of("input"):
        if len(site.shape) == 4:
            images, total = 0, 0.0
            for step, row in tape.rows(site):
                images, total = images + site.shape[0], total + row[schema.MEAN] * site.shape[0]
                if images >= 500:
                    return step if abs(total / images) > 0.2 else None
    return None


# ------------------------------------------------------------------ AutoTrainer


def _gate(tape: Tape) -> int:
    """Return the step from which AutoTrainer's rules look, or one past the end if it is content."""
    accuracy, losses = tape.scalar("accuracy"), [value for _, value in tape.scalar("loss", "train_loss")]
    if accuracy:
        content = np.mean([value for _, value in accuracy[-5:]]) >= 0.6
    else:
        content = len(losses) > 20 and np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    return tape.last_step + 1 if content else math.ceil(0.3 * tape.last_step)


def _checked(tape: Tape, values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    start = _gate(tape)
    return [(step, value) for step, value in values if step >= start and step % 20 == 0]


def _first_over_last(tape: Tape) -> list[tuple[int, float, float]]:
    if len(tape.kernels) < 2:
        return []
    first, last = (dict(tape.values(tape.kernels[index], "norm")) for index in (0, -1))
    return [(step, first[step], last[step]) for step in first if step in last]


def autotrainer_vanish(tape: Tape) -> int | None:
    """First over last gradient below 1e-3 and the first below 1e-4."""
    values = [(step, float(a < 1e-3 * b and a < 1e-4)) for step, a, b in _first_over_last(tape)]
    return _persists(_checked(tape, values), bool)


def autotrainer_explode(tape: Tape) -> int | None:
    """First over last gradient above 70, or anything not finite, or a loss of 1000 and more."""
    ratio = [(step, float(a > 70 * b)) for step, a, b in _first_over_last(tape)]
    loss = [(step, float(not value < 1e3)) for step, value in tape.scalar("loss", "train_loss")]
    return _first(_persists(_checked(tape, ratio), bool), _persists(loss, bool), exploding_tensor(tape))


def autotrainer_dying_relu(tape: Tape) -> int | None:
    """At least 70 % of all entries of the weights' gradients exactly zero."""
    zeros: dict[int, np.ndarray] = {}
    for site in tape.kernels:
        for step, row in tape.rows(site):
            zeros[step] = zeros.get(step, np.zeros(2)) + row[[schema.ZERO, schema.COUNT]]
    values = [(step, float(zero >= 0.7 * count)) for step, (zero, count) in zeros.items()]
    return _persists(_checked(tape, values), bool)


def autotrainer_slow(tape: Tape) -> int | None:
    """The accuracy never gains 0.01 between looks and stays below 0.6."""
    values = [value for _, value in tape.scalar("accuracy")]
    looks = [np.mean(values[start : start + 20]) for start in range(0, len(values) - 19, 20)]
    if len(looks) > 2 and max(np.diff(looks)) < 0.01 and looks[-1] < 0.6:
        return tape.last_step
    return None


def autotrainer_improper_loss(tape: Tape) -> int | None:
    """A negative loss."""
    return _persists(tape.scalar("loss", "train_loss"), lambda loss: loss < 0)


def autotrainer_abnormal_data(tape: Tape) -> int | None:
    """Mean |output| of a layer that is not the last of 10 and more."""
    outputs = [site for site in tape.of("output") if site.name not in ("(model)", "loss_fn")][:-1]
    return _first(*(_persists(tape.values(site, "abs_mean"), lambda mean: mean >= 10) for site in outputs))


def loss_not_finite(tape: Tape) -> int | None:
    """`if not torch.isfinite(loss): stop`, as many loops have it."""
    return next((step for step, value in tape.scalar("loss", "train_loss") if not math.isfinite(value)), None)


SAGEMAKER = (
    PeerRule("VanishingGradient", vanishing_gradient, ("vanishing_gradient", "bad_init_scale", "zero_init_blocked")),
    PeerRule("ExplodingTensor", exploding_tensor, NON_FINITE),
    PeerRule("DeadRelu", dead_relu, ("dead_relu",)),
    PeerRule("SaturatedActivation", saturated_activation, ("saturated_activation",)),
    PeerRule("WeightUpdateRatio (large)", update_ratio_large, ("lr_too_high",)),
    PeerRule("WeightUpdateRatio (small)", update_ratio_small, ("lr_too_low", "optimizer_step_noop")),
    PeerRule("UnchangedTensor", unchanged_tensor, ("optimizer_step_noop",)),
    PeerRule(
        "PoorWeightInitialization", poor_initialization, ("bad_init_scale", "symmetric_init", "large_initial_loss")
    ),
    PeerRule("AllZero", all_zero, ("zero_grad_misplaced", "zero_init_blocked")),
    PeerRule("ClassImbalance", class_imbalance, ("class_imbalance_collapse", "sorted_labels")),
    PeerRule("CheckInputImages", check_input_images, ("unnormalised_inputs",)),
    PeerRule("Overfit", overfit, ("overfitting",)),
    PeerRule("LossNotDecreasing", loss_not_decreasing, ("not_learning",)),
)
AUTOTRAINER = (
    PeerRule("gradient explode", autotrainer_explode, NON_FINITE),
    PeerRule("gradient vanish", autotrainer_vanish, ("vanishing_gradient", "bad_init_scale")),
    PeerRule("dying ReLU", autotrainer_dying_relu, ("dead_relu",)),
    PeerRule("improper loss", autotrainer_improper_loss, ("logits_into_prob_loss", "loss_sign_flipped")),
    PeerRule("abnormal data", autotrainer_abnormal_data, ("unnormalised_inputs",)),
    PeerRule("slow convergence", autotrainer_slow, ("lr_too_low", "not_learning")),
)
NAN_CHECK = (PeerRule("the loss is not finite", loss_not_finite, (*NON_FINITE, "nan_in_loss")),)
PEERS = {"SageMaker Debugger": SAGEMAKER, "AutoTrainer": AUTOTRAINER, "NaN check of the loss": NAN_CHECK}


def opinions(rules: tuple[PeerRule, ...], tape: Tape, kinds: tuple[str, ...]) -> tuple[Said, ...]:
    """Return what the rules say of a run, earliest first; a rule that may mean one of `kinds` is taken to mean it."""
    said = []
    for rule in rules:
        step = rule.alarm(tape)
        if step is not None:
            meant = next((kind for kind in kinds if kind in rule.names), rule.name)
            said.append(Said(meant, (), step))
    return tuple(sorted(said, key=lambda each: each.step))
