"""Rules about training and evaluation mode, batch norms and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.core import schema, signals
from sonde.core.facts import ModuleFacts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import PATIENCE, is_learning_well, is_near_chance
from sonde.diagnosis.ownership import MODEL, module_of
from sonde.diagnosis.rule import Found, Threshold, above, below, by_number, fact, few, rule
from sonde.diagnosis.tape.flow import unregistered_dropout
from sonde.diagnosis.tape.unused import noisy_teacher
from sonde.records import Phase

NORMS: Final = ("BatchNorm", "SyncBatchNorm", "InstanceNorm")


@dataclass(frozen=True, slots=True)
class Mode:
    """The mode that a module with different behaviour in training last ran in."""

    name: str
    kind: str
    training: float
    """1 if it was in training mode, 0 if not, in between if it ran in both within a step."""
    since: int
    """The first step in that mode."""
    root: float | None
    """The mode of the model it belongs to."""

    @property
    def is_norm(self) -> bool:
        """Whether it normalises by the batch or by running statistics."""
        return self.kind.startswith(NORMS)


def modes(case: Case, phase: Phase, before: int | None = None) -> list[Mode]:
    """Return the modes of the modules that ran in a phase and behave differently in training, up to a step.

    Raises:
        NotMeasured: No module's mode is known.

    """
    part = signals.part_of(signals.TRAINING)
    sites = [site for site in (*case.sites("vital"), *case.sites("vital", "eval")) if site.part == part]
    if not sites:
        raise NotMeasured("modes of modules")
    known: dict[str, tuple[float, int]] = {}
    for site in sites:
        curve = case.curve(site.key) if site.phase == phase else None
        if curve is not None and before is not None:
            curve = (curve[0][curve[0] < before], curve[1][curve[0] < before])
        if curve is not None and len(curve[0]):
            steps, values = curve
            held = len(values) - 1
            while held > 0 and values[held - 1] == values[-1]:
                held -= 1
            known[site.name] = (float(values[-1]), int(steps[held]))
    roots = {name for name in known if not _depends_on_mode(case, name)}
    return [
        Mode(name, case.modules[name].kind, training, since, _root_of(name, roots, known))
        for name, (training, since) in known.items()
        if name not in roots
    ]


def _depends_on_mode(case: Case, name: str) -> bool:
    module = case.modules.get(name)
    if module is None:
        return False
    if "Dropout" in module.kind:
        return bool(module.settings.get("p", 1))
    # Without running statistics a norm does the same in both modes.
    return module.kind.startswith(NORMS) and module.settings.get("track_running_stats", True) is not False


def _root_of(name: str, roots: set[str], known: dict[str, tuple[float, int]]) -> float | None:
    own = [root for root in roots if root == "(model)" or name.startswith(f"{root}.")]
    return known[max(own, key=len)][0] if own else None


MODE_STEPS = Threshold(3, "persistence: steps trained in evaluation mode")


@rule(
    "eval_mode_in_training",
    needs=[signals.TRAINING],
    explains=["overfitting"],
    exact=True,
    fix="Call model.train() before the training loop, and again after every evaluation.",
    refute="Print model.training where the training pass begins: if it is True, this finding is wrong.",
    since=MODE_STEPS,
)
def eval_mode_in_training(case: Case) -> Found | None:
    """The model trains in evaluation mode.

    Batch norms in evaluation mode inside a model in training mode are intended.
    """
    known = modes(case, "train")
    off = [mode for mode in known if mode.training == 0 and mode.root in (0, None) and _is_trained(case, mode)]
    if not off or (off[0].root is None and len(off) < len(known)):
        return None
    since = min(mode.since for mode in off)
    steps = case.step - since + 1
    if steps < MODE_STEPS:
        return None
    names = [mode.name for mode in off]
    when = "from the start" if since <= 1 else f"since step {since}"
    put = next((call for call in case.facts.calls("eval") if since - 1 in call.steps), None)
    return Found(
        step=since,
        sites=(signals.LOOP, *names),
        evidence=(
            below("training flag of these modules in training passes", 0, 0, f"{names[0]}:vital.training mean"),
            above("steps trained in this mode", steps, MODE_STEPS),
            fact("modules", len(names)),
        ),
        cause=f"The model trains in evaluation mode {when}: "
        + (f"nothing calls train() after the eval(){put.place}, so " if put is not None and put.place else "")
        + f"{few(names)} "
        + (
            by_number(names, "uses", "use") + " running statistics instead of those of the batch."
            if off[0].is_norm
            else by_number(names, "does", "do") + " not drop anything."
        ),
    )


def _is_trained(case: Case, mode: Mode) -> bool:
    """Return whether a module should learn: a norm with frozen weights should not."""
    own = [each for name, each in case.parameters.items() if module_of(name) == mode.name]
    return not mode.is_norm or not own or any(each.trainable for each in own)


@rule(
    "train_mode_in_eval",
    needs=[signals.DROPPED, signals.TRAINING],
    explains=["overfitting", "train_val_preproc_mismatch"],
    exact=True,
    fix="Call model.eval() before evaluating, and model.train() after it.",
    refute=(
        "Evaluate the same batch twice: if the results are equal and running statistics do not change, this finding is "
        "wrong."
    ),
)
def train_mode_in_eval(case: Case) -> Found | None:
    """Evaluation runs in training mode.

    Dropout in training mode inside a model in evaluation mode is intended: it samples uncertainty. A pass whose result
    is a target of the same step, such as a teacher's, is not an evaluation.
    """
    case.wait_for_tape()
    if (found := noisy_teacher(case)) is not None:
        return found
    # The last evaluation, after training, may well be another function than those before.
    evaluated = _evaluated_in_training(case, None) or _evaluated_in_training(case, case.step)
    if evaluated is None:
        return _drops_by_function(case)
    on, since, passes = evaluated
    names = [mode.name for mode in on]
    norms = [mode.name for mode in on if mode.is_norm]
    return Found(
        step=since,
        sites=("(validation)", *names),
        evidence=(
            above("training flag in passes without gradients", 1, 1, f"{names[0]}:vital.training@eval mean"),
            above("such passes", passes, 2),
            fact("batch norms that learn from evaluation data", len(norms)),
        ),
        cause=f"Evaluation runs in training mode: {few(names)} "
        + (
            by_number(names, "uses and updates its statistics with", "use and update their statistics with")
            + " evaluation batches."
            if norms
            else by_number(names, "drops", "drop") + " values at random."
        ),
    )


DROPPED_ROUNDS = Threshold(2, "evaluations in which a function dropped values: one may be a dry run")


def _drops_by_function(case: Case) -> Found | None:
    """Find evaluations of a model in training mode, in which a function drops values that asks for this mode."""
    dropped, mode = case.vital(signals.LOOP, signals.DROPPED, "eval"), case.curve(f"{MODEL}:vital.training@eval")
    if dropped is None or mode is None or not (mode[1] == 1).all():
        return None
    rounds = dropped.since(int(mode[0][0]))
    makes_targets = case.taped is not None and any(
        not case.taped.needed.isdisjoint(call.outs.values()) and not case.taped.tape.ops[call.first].grad_enabled
        for call in case.taped.tape.root_calls()
        if call.first < len(case.taped.tape.ops)
    )
    if len(rounds) < DROPPED_ROUNDS or makes_targets:
        return None
    return Found(
        step=int(rounds.steps[0]),
        sites=("(validation)", MODEL),
        evidence=(
            above("evaluations in which a function dropped values", len(rounds), DROPPED_ROUNDS, f"{dropped.key} mean"),
            above("training flag of the model meanwhile", 1, 1, f"{MODEL}:vital.training@eval mean"),
        ),
        cause="Evaluation runs in training mode: a function of the model, such as F.dropout(x, p, self.training), "
        "drops values at random.",
    )


def _evaluated_in_training(case: Case, before: int | None) -> tuple[list[Mode], int, float] | None:
    """Return the modules that were last evaluated in training mode, since when, and in how many passes."""
    taped = case.taped
    on = [mode for mode in modes(case, "eval", before) if mode.training == 1 and mode.root in (1, None)]
    on = [mode for mode in on if taped is None or not taped.makes_targets(mode.name)]
    if not on or (on[0].root is None and not any(mode.is_norm for mode in on)):
        return None
    since = min(mode.since for mode in on)
    track = case.track(f"{on[0].name}:output@eval")
    steps = np.zeros(0) if track is None else track.steps
    during = (steps >= since) & (steps < (np.inf if before is None else before))
    # A single pass may be a dry run before training.
    passes = 0.0 if track is None else float(track.rows[during][:, schema.SEEN].sum())
    rounds = int(during.sum())
    return (on, since, passes) if passes >= 2 and (before is None or rounds >= 2) else None


FEW_PER_CHANNEL = Threshold(8, "values per channel: of fewer, the variance is off by half")
TOO_FEW_PER_CHANNEL = Threshold(4, "the same; with two, every output is +1 or -1")


@rule(
    "batchnorm_small_batch",
    needs=[signals.TRAINING],
    explains=["overfitting"],
    fix="Use larger batches, or GroupNorm or LayerNorm, which do not depend on the batch.",
    refute="Compare the loss of one batch in train() and eval() mode: if they are about equal, this finding is wrong.",
    since=2,
)
def batchnorm_small_batch(case: Case) -> Found | None:
    """Batch norms get too few values per channel."""
    thin: dict[str, float] = {}
    norms = [mode for mode in modes(case, "train") if mode.kind.startswith("BatchNorm") and mode.training > 0]
    for mode in norms:
        track = case.track(f"{mode.name}:output")
        channels = case.modules[mode.name].settings.get("num_features")
        if track is None or not isinstance(channels, int) or not channels:
            continue
        recent = track.last(16).rows
        each = float(np.median(recent[:, schema.COUNT] / recent[:, schema.SEEN])) / channels
        if each < FEW_PER_CHANNEL:
            thin[mode.name] = each
    if norms and not any(case.track(f"{mode.name}:output") for mode in norms):
        raise NotMeasured("outputs of batch norms")
    if not thin:
        return None
    least = min(thin.values())
    return Found(
        severity="warning" if least <= TOO_FEW_PER_CHANNEL else "info",
        step=1,
        sites=tuple(thin),
        evidence=(
            below("values per channel in a batch", least, FEW_PER_CHANNEL),
            fact("batch norms", len(thin)),
        ),
        cause=f"{few(list(thin))} {by_number(list(thin), 'normalises', 'normalise')} by only {least:g} values per "
        "channel: their statistics are mostly noise, and evaluation uses different ones.",
    )


MOMENTUM_USUAL = Threshold(0.1, "momentum: torch's default; with less, statistics take longer than usual")
MOSTLY = Threshold(0.5, "share of the initial values that is left in running statistics: more than half")
_MANY_BATCHES = 30


def _keeps_start(case: Case, name: str, momentum: float) -> bool:
    """Return whether an evaluation after many steps used statistics that were mostly what they began with.

    After n batches (1 - momentum)^n of the initial values is left. A norm that was trained before began with more.
    """
    evaluated, weight = case.track(f"{name}:output@eval"), case.first_panel("parameter")
    if evaluated is None or not len(evaluated) or evaluated.steps[-1] < _MANY_BATCHES:
        return False
    at = next((place for place, site in enumerate(weight.sites) if site.name == f"{name}.weight"), None)
    is_new = at is not None and bool(weight.read[:, at].any())
    if is_new and at is not None:
        row = weight.rows[np.flatnonzero(weight.read[:, at])[0], at]
        is_new = float(row[schema.MIN]) == float(row[schema.MAX])
    return is_new and (1 - momentum) ** float(evaluated.steps[-1]) > MOSTLY


def _slow_statistics(case: Case, names: list[str]) -> Found:
    momentum = case.modules[names[0]].settings.get("momentum")
    track = case.track(f"{names[0]}:output@eval")
    step = 0 if track is None else int(track.steps[-1])
    left = (1 - float(momentum)) ** step if isinstance(momentum, int | float) else float("nan")
    return Found(
        severity="warning",
        step=step,
        sites=tuple(names),
        evidence=(above("share of the initial values left in the statistics", left, MOSTLY), fact("steps", step)),
        cause=f"{few(names)} {by_number(names, 'has', 'have')} momentum={momentum}: after {step} steps {left:.0%} of "
        "the "
        "running statistics is still their initial 0 and 1, and evaluation uses those.",
        refute="Compare running_mean with the mean of a batch: if they agree, this finding is wrong.",
    )


MOMENTUM_HIGH = Threshold(0.9, "momentum: torch's is the share of the new batch; Keras' 0.9 is torch's 0.1")


def _averaged_without_statistics(case: Case) -> Found | None:
    """Find averaged weights that are evaluated with the batch norm statistics of the weights of the last step."""
    for call in case.facts.calls("averaged.call"):
        norms = call.data.get("norms")
        if call.data.get("copied") and isinstance(norms, int):
            return Found(
                severity="warning",
                step=call.steps[0],
                sites=("(validation)", "(model)"),
                evidence=(fact("batch norms whose running mean is that of the model itself", norms),),
                cause=f"Averaged weights are evaluated{call.place} with the running statistics of batch norm that "
                "belong to the model's present weights: AveragedModel averages parameters only.",
                fix="Call torch.optim.swa_utils.update_bn(loader, averaged) before evaluating it, or pass "
                "use_buffers=True.",
                refute="Compare running_mean of both models: if they differ, this finding is wrong.",
            )
    return None


STALE_PAIRS = Threshold(3, "steps in a row in which the weights of a copy changed and its statistics did not")


def _copied_without_statistics(case: Case) -> Found | None:
    """Find a copy in evaluation mode that follows the weights of a model, but not the statistics of its batch norms."""
    for call in case.facts.calls("copy"):
        stale = call.data.get("stale")
        if call.data.get("follows") and isinstance(stale, int) and stale >= STALE_PAIRS:
            return Found(
                severity="warning",
                step=int(call.data.get("last") or 0),
                sites=(call.about, "(loop)"),
                evidence=(above("steps in which its weights changed and its statistics did not", stale, STALE_PAIRS),),
                cause=f"`{call.about}` follows the weights of {call.data['follows']}, but not its buffers: its batch "
                "norms are in evaluation mode and keep the running statistics of the start.",
                fix="Copy the buffers too: for slow, fast in zip(copy.buffers(), model.buffers()): slow.copy_(fast).",
                refute="Compare running_mean of both: if they agree, this finding is wrong.",
            )
    return None


@rule(
    "batchnorm_stats_stale",
    needs=["facts.program"],
    explains=["overfitting"],
    exact=True,
    fix="Use momentum=0.1, torch's default; it is the share of the new batch, not of the running statistics.",
    refute="Print running_mean after some steps: if it has changed from its initial value, this finding is wrong.",
    since=0,
)
def batchnorm_stats_stale(case: Case) -> Found | None:
    """Running statistics of batch norms are never updated, or only reflect the last batch."""
    case.need_facts()
    if (found := _averaged_without_statistics(case) or _copied_without_statistics(case)) is not None:
        return found
    norms = [
        (name, momentum)
        for name, module in case.modules.items()
        if module.kind.startswith(("BatchNorm", "SyncBatchNorm"))
        # A module of the user's own may have the name, and a momentum that is the share of the running statistics.
        and module.settings.get("track_running_stats") is True
        and isinstance(momentum := module.settings.get("momentum"), int | float)
    ]
    still = [name for name, momentum in norms if momentum == 0]
    slow = [name for name, momentum in norms if 0 < momentum < MOMENTUM_USUAL and _keeps_start(case, name, momentum)]
    hasty = [name for name, momentum in norms if momentum >= MOMENTUM_HIGH]
    if still:
        return Found(
            severity="warning",
            step=0,
            sites=tuple(still),
            evidence=(below("momentum", 0.0, 0.0), fact("batch norms", len(still))),
            cause=f"{few(still)} {by_number(still, 'has', 'have')} momentum=0: running mean and variance "
            "stay at 0 and 1, and evaluation uses those.",
        )
    if slow:
        return _slow_statistics(case, slow)
    if hasty:
        return Found(
            severity="info",
            step=0,
            sites=tuple(hasty),
            evidence=(
                above("momentum", max(value for _, value in norms), MOMENTUM_HIGH),
                fact("batch norms", len(hasty)),
            ),
            cause=f"{few(hasty)} {by_number(hasty, 'has', 'have')} a momentum near 1: in torch it is the share "
            "of the new batch, so evaluation uses hardly more than the last batch.",
            fix="Use momentum=0.1 (Keras' 0.9 is torch's 0.1).",
            refute="If evaluation should use the last batch, this finding is wrong.",
        )
    return None


_OF_TORCH = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")


@rule(
    "dropout_ignores_mode",
    needs=[signals.DROPPED, signals.TRAINING],
    exact=True,
    fix="Write F.dropout(x, p, training=self.training), or dropout_p=p if self.training else 0.0 for attention, or use "
    "nn.Dropout, which follows the mode.",
    refute=(
        "Call the model twice on the same input in eval() mode: if the outputs are equal, or sampling is intended, "
        "this "
        "finding is wrong."
    ),
)
def dropout_ignores_mode(case: Case) -> Found | None:
    """Dropout is active in evaluation mode.

    A dropout module of the user's own that ignores the mode is intended: it samples.
    """
    if (taped := unregistered_dropout(case)) is not None:
        return taped
    dropped = case.vital(signals.LOOP, signals.DROPPED, "eval")
    mode = case.curve(f"{MODEL}:vital.training@eval")
    if dropped is None or mode is None or mode[1][-1] != 0:
        return None
    later = dropped.since(int(mode[0][-1]))
    if not len(later) or any(_is_own_dropout(module) for module in case.modules.values()):
        return None
    return Found(
        step=int(later.steps[0]),
        sites=(MODEL, signals.LOOP),
        evidence=(
            above("evaluations in which values were dropped", len(later), 1, f"{dropped.key} mean"),
            below("training flag of the model meanwhile", 0, 0, f"{MODEL}:vital.training@eval mean"),
        ),
        cause="The model is in evaluation mode, but dropout is active: a function drops values without asking "
        "self.training.",
    )


def _is_own_dropout(module: ModuleFacts) -> bool:
    return "dropout" in module.kind.lower() and module.kind not in _OF_TORCH and module.name != MODEL


DROPPED_SHARE = Threshold(0.8, "share of units dropped: 0.1 to 0.5 is usual, 0.8 the most in Srivastava et al. 2014")
DROPPED_LEVEL = Threshold(0.5, "loss over that of guessing: below, the model learns all the same")


@rule(
    "dropout_too_high",
    needs=["facts.order"],
    explains=[
        "constant_output",
        "loss_oscillation",
        "lr_schedule_collapse",
        "lr_too_high",
        "lr_too_low",
        "overfitting",
        "vanishing_gradient",
    ],
    fix="Write p={keep:.2g} if a share of {share:.2g} should be kept; 0.1 to 0.5 is usual.",
    refute="Train 200 steps with p=0.2: if the loss does not fall further, this finding is wrong.",
    since=PATIENCE,
)
def dropout_too_high(case: Case) -> Found | None:
    """Dropout drops nearly all units, and the run does not learn well."""
    ran = set(case.need_facts().order)
    high = [each for each in case.facts.modules if each.name in ran and _share(each) >= DROPPED_SHARE]
    if not high:
        return None
    names, share = [each.name for each in high], max(map(_share, high))
    known = case.learning.points >= PATIENCE and case.learning.state != "unknown"
    harmless = not known or (is_learning_well(case) and not is_near_chance(case, DROPPED_LEVEL))
    return Found(
        severity="info" if harmless else "warning",
        step=1,
        sites=tuple(names),
        evidence=(
            above("share of the units that are dropped", share, DROPPED_SHARE),
            fact("dropouts like this", len(names)),
            fact("loss over the first loss", case.learning.recent / (case.learning.initial or float("nan"))),
        ),
        cause=f"{few(names)} {by_number(names, 'drops', 'drop')} {share:.0%} of all units in training: p is the share "
        "to drop, not the share to keep.",
        values={"keep": 1 - share, "share": share},
    )


def _share(module: ModuleFacts) -> float:
    p = module.settings.get("p")
    is_dropout = "Dropout" in module.kind and module.training and isinstance(p, int | float)
    return float(p) if is_dropout and isinstance(p, int | float) else 0.0
