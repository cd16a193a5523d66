"""Rules about training and evaluation mode, batch norms and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import PATIENCE, is_learning_well
from sonde.diagnosis.ownership import MODEL, module_of
from sonde.diagnosis.rule import Found, Threshold, above, below, by_number, fact, few, rule
from sonde.facts import ModuleFacts
from sonde.records import Phase

NORMS: Final = ("BatchNorm", "SyncBatchNorm", "InstanceNorm")


@dataclass(frozen=True, slots=True)
class Mode:
    """A module that behaves differently in training, in the mode it ran in last."""

    name: str
    kind: str
    training: float
    """1 if it was in training mode, 0 if not, something between if it was both within a step."""
    since: int
    """The step from which on it was so."""
    root: float | None
    """The same of the model it belongs to."""

    @property
    def is_norm(self) -> bool:
        """Whether it normalises by the batch or by what it remembers."""
        return self.kind.startswith(NORMS)


def modes(case: Case, phase: Phase) -> list[Mode]:
    """Return the mode of all modules that care, which ran in a phase.

    Raises:
        NotMeasured: No module's mode is known.

    """
    part = vitals.part_of(vitals.TRAINING)
    sites = [site for site in (*case.sites("vital"), *case.sites("vital", "eval")) if site.part == part]
    if not sites:
        raise NotMeasured("modes of modules")
    known: dict[str, tuple[float, int]] = {}
    for site in sites:
        curve = case.curve(site.key) if site.phase == phase else None
        if curve is not None:
            steps, values = curve
            held = len(values) - 1
            while held > 0 and values[held - 1] == values[-1]:
                held -= 1
            known[site.name] = (float(values[-1]), int(steps[held]))
    roots = {name for name in known if not _cares(case, name)}
    return [
        Mode(name, case.modules[name].kind, training, since, _root_of(name, roots, known))
        for name, (training, since) in known.items()
        if name not in roots
    ]


def _cares(case: Case, name: str) -> bool:
    module = case.modules.get(name)
    if module is None:
        return False
    if "Dropout" in module.kind:
        return bool(module.settings.get("p", 1))
    # Without a memory of its own a norm does the same in both modes.
    return module.kind.startswith(NORMS) and module.settings.get("track_running_stats", True) is not False


def _root_of(name: str, roots: set[str], known: dict[str, tuple[float, int]]) -> float | None:
    own = [root for root in roots if root == "(model)" or name.startswith(f"{root}.")]
    return known[max(own, key=len)][0] if own else None


MODE_STEPS = Threshold(3, "persistence: steps trained in evaluation mode")


@rule(
    "eval_mode_in_training",
    needs=[vitals.TRAINING],
    explains=["overfitting"],
    exact=True,
    fix="Call model.train() before the training loop, and again after every evaluation.",
    refute="Print model.training where the training pass begins: True refutes it.",
    since=3,
)
def eval_mode_in_training(case: Case) -> Found | None:
    """The model trains in evaluation mode.

    Find steps of a model in evaluation mode, of which a part that is trained would behave differently.

    Batch norms that are kept in evaluation mode inside a model in training mode are so on purpose.
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
    return Found(
        step=since,
        sites=tuple(names),
        evidence=(
            below("training flag of these modules in training passes", 0, 0, f"{names[0]}:vital.training mean"),
            above("steps trained like that", steps, MODE_STEPS),
            fact("modules", len(names)),
        ),
        cause=f"The model trains in evaluation mode {when}: {few(names)} "
        + (
            by_number(names, "uses and keeps", "use and keep") + " old statistics instead of the batch's."
            if off[0].is_norm
            else by_number(names, "does", "do") + " not drop anything."
        ),
    )


def _is_trained(case: Case, mode: Mode) -> bool:
    """Say whether a module is meant to learn: a norm whose own weights are frozen is not."""
    own = [each for name, each in case.parameters.items() if module_of(name) == mode.name]
    return not mode.is_norm or not own or any(each.trainable for each in own)


@rule(
    "train_mode_in_eval",
    needs=[vitals.TRAINING],
    explains=["overfitting", "train_val_preproc_mismatch"],
    exact=True,
    fix="Call model.eval() before evaluating, and model.train() after it.",
    refute="Evaluate the same batch twice: equal results, and running statistics that do not move, refute it.",
    since=1,
)
def train_mode_in_eval(case: Case) -> Found | None:
    """Evaluation runs in training mode.

    Find evaluation passes of a model that is in training mode as a whole.

    Dropout alone in training mode, inside a model in evaluation mode, is how uncertainty is sampled.
    """
    on = [mode for mode in modes(case, "eval") if mode.training == 1 and mode.root in (1, None)]
    if not on or (on[0].root is None and not any(mode.is_norm for mode in on)):
        return None
    since = min(mode.since for mode in on)
    # A single pass may be a dry run before training.
    passes = _passes(case, on[0].name, since)
    if passes < 2:
        return None
    names = [mode.name for mode in on]
    norms = [mode.name for mode in on if mode.is_norm]
    return Found(
        step=since,
        sites=tuple(names),
        evidence=(
            above(
                "training flag of these modules in passes without gradients",
                1,
                1,
                f"{names[0]}:vital.training@eval mean",
            ),
            above("such passes", passes, 2),
            fact("batch norms that learn from evaluation data", len(norms)),
        ),
        cause=f"Evaluation runs in training mode: {few(names)} "
        + (
            by_number(names, "takes its statistics from, and remembers,", "take their statistics from, and remember,")
            + " evaluation batches."
            if norms
            else by_number(names, "drops", "drop") + " values at random."
        ),
    )


def _passes(case: Case, name: str, since: int) -> float:
    track = case.track(f"{name}:output@eval")
    return 0.0 if track is None else float(track.since(since).rows[:, schema.SEEN].sum())


FEW_PER_CHANNEL = Threshold(8, "values per channel below which a batch's variance is off by half")
TOO_FEW_PER_CHANNEL = Threshold(4, "values per channel; with two, every output is +1 or -1")


@rule(
    "batchnorm_small_batch",
    needs=[vitals.TRAINING],
    explains=["overfitting"],
    fix="Use larger batches, or GroupNorm or LayerNorm, which do not depend on the batch.",
    refute="Compare the loss of one batch in train() and eval() mode: about equal losses refute it.",
    since=2,
)
def batchnorm_small_batch(case: Case) -> Found | None:
    """Batch norms see too few values per channel.

    Find batch norms in training mode that normalise by a handful of values.
    """
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
        "channel: statistics of so few are mostly noise, and evaluation uses quite other ones.",
    )


@rule(
    "batchnorm_stats_stale",
    explains=["overfitting"],
    exact=True,
    fix="Use momentum=0.1, which is torch's default; it is the share of the new batch, not of the old.",
    refute="Print running_mean after some steps: anything but its first value refutes it.",
    since=0,
)
def batchnorm_stats_stale(case: Case) -> Found | None:
    """Running statistics of batch norms never move.

    Find batch norms with a momentum of 0, which never learn, or near 1, which forget all but the last batch.
    """
    case.need_facts()
    norms = [
        (name, momentum)
        for name, module in case.modules.items()
        if module.kind.startswith(("BatchNorm", "SyncBatchNorm"))
        and module.settings.get("track_running_stats", True)
        and isinstance(momentum := module.settings.get("momentum"), int | float)
    ]
    still = [name for name, momentum in norms if momentum == 0]
    hasty = [name for name, momentum in norms if momentum >= 0.9]
    if still:
        return Found(
            severity="warning",
            step=0,
            sites=tuple(still),
            evidence=(below("momentum", 0.0, 0.0), fact("batch norms", len(still))),
            cause=f"{few(still)} {by_number(still, 'has', 'have')} momentum=0: running mean and variance "
            "stay at 0 and 1, and evaluation uses those.",
        )
    if hasty:
        return Found(
            severity="info",
            step=0,
            sites=tuple(hasty),
            evidence=(above("momentum", max(value for _, value in norms), 0.9), fact("batch norms", len(hasty))),
            cause=f"{few(hasty)} {by_number(hasty, 'has', 'have')} a momentum near 1: in torch it is the share "
            "of the new batch, so evaluation uses little but the last batch.",
            fix="Use momentum=0.1 (Keras' 0.9 is torch's 0.1).",
            refute="If the last batch is meant to decide, it is fine.",
        )
    return None


_OF_TORCH = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")


@rule(
    "dropout_ignores_mode",
    needs=[vitals.DROPPED, vitals.TRAINING],
    exact=True,
    fix="Write F.dropout(x, p, training=self.training), or use nn.Dropout, which knows the mode.",
    refute=(
        "Call the model twice on the same input in eval() mode: equal outputs refute it. If you mean to sample, "
        "it is fine."
    ),
    since=1,
)
def dropout_ignores_mode(case: Case) -> Found | None:
    """Dropout drops in evaluation too.

    Find values that F.dropout dropped in evaluation passes of a model in evaluation mode.

    Who writes a dropout module of their own that ignores the mode means to sample.
    """
    dropped = case.vital(vitals.LOOP, vitals.DROPPED, "eval")
    mode = case.curve(f"{MODEL}:vital.training@eval")
    if dropped is None or mode is None or mode[1][-1] != 0:
        return None
    later = dropped.since(int(mode[0][-1]))
    if not len(later) or any(_is_own_dropout(module) for module in case.modules.values()):
        return None
    return Found(
        step=int(later.steps[0]),
        sites=(MODEL, vitals.LOOP),
        evidence=(
            above("evaluations in which values were dropped", len(later), 1, f"{dropped.key} mean"),
            below("training flag of the model meanwhile", 0, 0, f"{MODEL}:vital.training@eval mean"),
        ),
        cause="The model is in evaluation mode, but dropout still drops values: F.dropout is called without the mode.",
    )


def _is_own_dropout(module: ModuleFacts) -> bool:
    return "dropout" in module.kind.lower() and module.kind not in _OF_TORCH and module.name != MODEL


DROPPED_SHARE = Threshold(
    0.8, "of the units dropped; usual recipes drop 0.1 to 0.5, and the original paper at most 0.8"
)


@rule(
    "dropout_too_high",
    explains=["dormant_units", "loss_oscillation"],
    fix="Write p={keep:.2g} if {share:.2g} was meant to be kept; usual are 0.1 to 0.5.",
    refute="Train 200 steps with p=0.2: if the loss falls no further, it was not the dropout.",
    since=PATIENCE,
)
def dropout_too_high(case: Case) -> Found | None:
    """Dropout leaves too little to learn from.

    Find dropouts that drop nearly everything, in a run that does not learn well all the same.
    """
    ran = set(case.need_facts().order)
    high = [each for each in case.facts.modules if each.name in ran and _share(each) >= DROPPED_SHARE]
    if not high:
        return None
    names, share = [each.name for each in high], max(map(_share, high))
    harmless = case.learning.points < PATIENCE or case.learning.state == "unknown" or is_learning_well(case)
    return Found(
        severity="info" if harmless else "warning",
        step=1,
        sites=tuple(names),
        evidence=(
            above("share of the units that are dropped", share, DROPPED_SHARE),
            fact("dropouts like that", len(names)),
            fact("part of the first loss that is left", case.learning.recent / (case.learning.initial or float("nan"))),
        ),
        cause=f"{few(names)} {by_number(names, 'drops', 'drop')} {share:.0%} of all units in training: p is the share "
        "to drop, not the share to keep.",
        values={"keep": 1 - share, "share": share},
    )


def _share(module: ModuleFacts) -> float:
    p = module.settings.get("p")
    is_dropout = "Dropout" in module.kind and module.training and isinstance(p, int | float)
    return float(p) if is_dropout and isinstance(p, int | float) else 0.0
