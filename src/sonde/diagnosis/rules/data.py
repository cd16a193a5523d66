"""Rules about the inputs of a model, in training and in evaluation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde import schema, vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import began_badly, gravity
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.symptoms import BADLY_SCALED
from sonde.diagnosis.track import Track
from sonde.records import Evidence, Phase

MIN_ELEMENTS = 16
"""Of fewer elements two batches may look the same by chance."""


# What tells one batch from another. Sums are left out: their last digits depend on the order of additions.
_IDENTITY = [schema.COUNT, schema.MIN, schema.MAX, schema.MEAN, schema.M2, schema.ZERO]


def model_input(case: Case, phase: Phase = "train") -> Track:
    """Return the first input of the model; raises NotMeasured if there is none.

    Where the first is made of whole numbers (tokens), it is that one: what is asked is what the program was fed.
    """
    tracks = [track for track in case.of("input", phase) if track.name != vitals.LOSS and track.site.call == 0]
    if not tracks:
        raise NotMeasured("inputs of the model")
    return tracks[0]


def is_real(track: Track) -> bool:
    """Say whether an input is made of real numbers, not of ids."""
    return "float" in track.site.dtype


def identities(track: Track) -> NDArray[np.int64]:
    """Return a number for each step that is the same where the batches are; -1 for batches too small to tell."""
    rows = track.rows[:, _IDENTITY]
    result: NDArray[np.int64] = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    result[track.rows[:, schema.COUNT] < MIN_ELEMENTS] = -1
    result[track.rows[:, schema.M2] == 0] = -1  # a constant says nothing
    return result


def normalises_inside(case: Case) -> bool:
    """Say whether the first thing that the model does is to normalise its input."""
    first = case.modules.get(case.facts.order[0]) if case.facts.order else None
    return first is not None and "Norm" in first.kind


COLUMN_LARGE = Threshold(100.0, "standard deviation of the largest feature")
COLUMN_RATIO = Threshold(1e3, "largest over smallest standard deviation of a feature")
INPUT_OFFSET = Threshold(10.0, "distance of the inputs from zero in standard deviations")
INPUT_LARGE = Threshold(30.0, "rms of an input of real numbers; pixels from 0 to 255 have about 100")


@rule(
    "unnormalised_inputs",
    needs=[vitals.COLUMN_SCALE, "input"],
    explains=[*BADLY_SCALED, "bad_init_scale", "target_scale"],
    fix="Standardise each feature with the training set's mean and standard deviation; divide pixels by 255.",
    refute="Train 50 steps on (x - mean) / std: if the loss behaves the same, the inputs are not to blame.",
    since=3,
)
def unnormalised_inputs(case: Case) -> Found | None:
    """Inputs are of very different, or very large, scale.

    Find real-valued inputs that are large, far from zero, or whose features differ in scale a thousandfold.
    """
    track = model_input(case)
    if not is_real(track) or normalises_inside(case):
        return None
    evidence = _columns(case, track) or _whole_of_unnormalised_inputs(track)
    if evidence is None:
        return None
    return Found(
        severity="warning" if began_badly(case) else gravity(case),
        step=int(track.steps[0]),
        sites=("loader", track.name),
        evidence=evidence,
        cause="Inputs are not normalised: a few large numbers decide everything, and the first layer is badly scaled.",
    )


def _columns(case: Case, track: Track) -> tuple[Evidence, ...] | None:
    scales = case.vital(track.name, vitals.COLUMN_SCALE)
    if scales is None:
        return None
    high, low = float(np.median(scales.stat("max"))), float(np.median(scales.stat("min")))
    if low <= 0:  # a constant feature says nothing about scale
        low = float(np.median(scales.stat("mean")))
    ratio = high / low if low > 0 else 0.0
    if ratio < COLUMN_RATIO or high < COLUMN_LARGE:
        return None
    return (
        above("largest over smallest standard deviation of a feature", ratio, COLUMN_RATIO),
        above("standard deviation of the largest feature", high, COLUMN_LARGE, f"{scales.key} max"),
    )


def _whole_of_unnormalised_inputs(track: Track) -> tuple[Evidence, ...] | None:
    size, std = float(np.median(track.stat("rms"))), float(np.median(track.stat("std")))
    offset = abs(float(np.median(track.stat("mean")))) / std if std > 0 else 0.0
    if offset >= INPUT_OFFSET and size >= 1:
        return (above("distance of the inputs from zero in standard deviations", offset, INPUT_OFFSET),)
    if size >= INPUT_LARGE:
        return (above("size (rms) of the inputs", size, INPUT_LARGE, f"{track.key} rms"),)
    return None


INPUT_TINY = Threshold(0.01, "standard deviation of all inputs: normalised twice, or divided by 255 twice")


@rule(
    "double_normalised",
    needs=["input"],
    explains=["bad_init_scale", "constant_output", "lr_too_low", "vanishing_gradient"],
    fix="Normalise once: divide by 255 or use ToTensor(), not both.",
    refute="Train 50 steps on inputs scaled to a standard deviation of 1: a loss that behaves the same refutes it.",
    since=3,
)
def double_normalised(case: Case) -> Found | None:
    """Inputs were scaled down twice.

    Find real-valued inputs that all lie close to each other and to zero.
    """
    track = model_input(case)
    if not is_real(track) or normalises_inside(case):
        return None
    spread, largest = float(np.median(track.stat("std"))), float(track.stat("abs_max").max())
    if not 0 < spread <= INPUT_TINY or largest > 10 * INPUT_TINY:
        return None
    return Found(
        severity=gravity(case),
        step=int(track.steps[0]),
        sites=("loader", track.name),
        evidence=(
            below("standard deviation of the inputs", spread, INPUT_TINY, f"{track.key} std"),
            fact("largest input", largest, f"{track.key} abs_max"),
        ),
        cause="Inputs are tiny: they were scaled down twice, and samples hardly differ.",
    )


CONSTANT_SHARE = Threshold(0.5, "of the features with one value for all samples of a look; less is usual for pixels")


@rule(
    "constant_feature",
    needs=[vitals.COLUMN_SCALE, "input"],
    severity="info",
    fix="Check how features are read and filled in; leave constant ones out.",
    refute="Compute the standard deviation of each feature over the training set: none at 0 refutes it.",
    since=3,
)
def constant_feature(case: Case) -> Found | None:
    """Most features of the input never vary.

    Find a table most of whose features have the same value in every sample.
    """
    track = model_input(case)
    scales = case.need_vital(track.name, vitals.COLUMN_SCALE)
    if not is_real(track) or len(scales) < 3:
        return None
    share = float(scales.stat("zero_share").min())
    samples = float(np.median(track.stat("count"))) / max(1.0, float(scales.stat("count")[-1]))
    if not CONSTANT_SHARE <= share < 1 or samples < 32:
        return None
    return Found(
        step=int(track.steps[0]),
        sites=("loader", track.name),
        evidence=(
            above("share of features that are constant", share, CONSTANT_SHARE, f"{scales.key} zero_share"),
            fact("looks", len(scales)),
        ),
        cause=f"{share:.0%} of the input's features have the same value in every sample: they tell nothing.",
    )


INPUT_SHIFT = Threshold(0.5, "standard deviations between the means of training and evaluation inputs")
INPUT_SHIFT_SIGMAS = Threshold(6.0, "the same in units of what a batch's mean varies by")
INPUT_STRETCH = Threshold(2.0, "ratio of the spread of training and evaluation inputs; augmentation stays below 1.5")


@rule(
    "train_val_preproc_mismatch",
    needs=["input"],
    explains=["overfitting"],
    fix="Use the same normalisation for both, with the training set's mean and standard deviation.",
    refute="Print the mean and standard deviation of one batch of each loader: equal ones refute it.",
    since=5,
)
def train_val_preproc_mismatch(case: Case) -> Found | None:
    """Evaluation inputs are prepared differently from those of training.

    Find a mean or a spread of evaluation inputs that training batches never have.
    """
    train, evaluated = model_input(case), model_input(case, "eval")
    if not is_real(train) or len(train) < 5 or train.name != evaluated.name:
        return None
    std, other = _std(train), _std(evaluated)
    if not (std > 0 and other > 0):
        return None
    mean, other_mean = float(train.total()[schema.MEAN]), float(evaluated.total()[schema.MEAN])
    shift = abs(other_mean - mean) / std
    noise = float(np.std(train.stat("mean"))) / std
    stretch = max(std / other, other / std)
    moved = shift >= INPUT_SHIFT and shift >= INPUT_SHIFT_SIGMAS * noise
    if not moved and stretch < INPUT_STRETCH:
        return None
    worst = (
        above("distance of the means in standard deviations", shift, INPUT_SHIFT, f"{evaluated.key} mean")
        if moved
        else above("ratio of the spreads", stretch, INPUT_STRETCH, f"{evaluated.key} std")
    )
    return Found(
        step=int(evaluated.steps[0]),
        sites=("loader", train.name),
        evidence=(
            worst,
            fact("standard deviation of training inputs", std, f"{train.key} std"),
            fact("standard deviation of evaluation inputs", other, f"{evaluated.key} std"),
        ),
        cause=f"Evaluation inputs are prepared differently: mean {other_mean:.3g} and spread {other:.3g} against "
        f"{mean:.3g} and {std:.3g} in training.",
    )


def _std(track: Track) -> float:
    total = track.total()
    count = total[schema.COUNT] - 1
    return float(np.sqrt(total[schema.M2] / count)) if count > 0 else 0.0


ALIKE_SHARE = Threshold(0.05, "of a batch's rows that repeat another: rows of few values meet again by themselves")
SEEN_SHARE = Threshold(0.9, "of the rows of every evaluation; in a sound split none, but for copies within the data")


@rule(
    "data_leakage",
    needs=[vitals.REPEATED_ROWS, vitals.SEEN_ROWS, "input"],
    exact=True,
    fix="Hold samples back that training never sees, and hand their loader to the evaluation.",
    refute="Intersect the indices of both sets: none in common refutes it.",
    since=2,
    lasting=True,
)
def data_leakage(case: Case) -> Found | None:
    """Evaluation runs on the training data.

    Find evaluations whose inputs, taken together or row by row, are those that training saw.
    """
    return _whole_of_data_leakage(case) or _rows(case)


def _whole_of_data_leakage(case: Case) -> Found | None:
    train, evaluated = model_input(case), model_input(case, "eval")
    if train.name != evaluated.name:
        return None
    same = [step for at, step in enumerate(evaluated.steps.tolist()) if _is_same(train, evaluated, at)]
    if len(same) < 2 or 2 * len(same) < len(evaluated):
        return None
    named = _named(case)
    return Found(
        severity="warning" if named else "info",
        step=same[0],
        sites=("loader",),
        evidence=(
            above("evaluations on the very data of training", len(same), 2, f"{evaluated.key} mean"),
            fact("evaluations looked at", len(evaluated)),
        ),
        cause="Evaluation runs on the training data" + (f", though {named[0]} is reported from it." if named else "."),
    )


def _rows(case: Case) -> Found | None:
    """Find evaluations nearly all rows of which were trained on, where rows are not alike by nature."""
    name = model_input(case).name
    seen, repeated = case.vital(name, vitals.SEEN_ROWS, "eval"), case.vital(name, vitals.REPEATED_ROWS)
    if seen is None or repeated is None or len(seen) < 2:
        return None
    share, alike = float(seen.numbers().min()), float(repeated.numbers().max())
    if share < SEEN_SHARE or alike > ALIKE_SHARE:
        return None
    named = _named(case)
    return Found(
        severity="warning" if named else "info",
        step=int(seen.steps[0]),
        sites=("loader",),
        evidence=(
            above("share of the rows of each evaluation that were trained on", share, SEEN_SHARE, seen.key),
            below("share of the rows of a batch that repeat another", alike, ALIKE_SHARE, repeated.key),
            fact("evaluations looked at", len(seen)),
        ),
        cause="The rows that are evaluated were trained on"
        + (f", though {named[0]} is reported from them: it says how well they are known by heart." if named else "."),
        fix="Split the data before anything is drawn from it, and check that the indices of both parts have none in "
        "common; copies of a row belong to one part.",
        refute="Intersect the indices of both sets: none in common refutes it, unless rows are in the data twice.",
    )


def _named(case: Case) -> list[str]:
    """Return the names of numbers that are said to be of other data than training's."""
    return [name for name in case.scalars() if name.lower().startswith(("val", "test", "dev"))]


def _is_same(train: Track, evaluated: Track, at: int) -> bool:
    """Say whether one evaluation saw what the training steps since the evaluation before saw."""
    row, step = evaluated.rows[at], int(evaluated.steps[at])
    start = int(evaluated.steps[at - 1]) if at else 0
    between = train.since(start + 1)
    between = Track(between.site, between.steps[between.steps <= step], between.rows[between.steps <= step])
    if not len(between) or row[schema.COUNT] < MIN_ELEMENTS or row[schema.M2] == 0:
        return False
    total = between.total()
    exact = [schema.COUNT, schema.MIN, schema.MAX, schema.ZERO]
    return bool(
        (total[exact] == row[exact]).all()
        and np.allclose(total[[schema.MEAN, schema.M2]], row[[schema.MEAN, schema.M2]], rtol=1e-5, atol=1e-9)
    )
