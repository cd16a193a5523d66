"""Rules about the inputs of a model, in training and in evaluation."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, signals
from sonde.core.facts import CallFacts
from sonde.core.metric_names import is_held_out
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import anomaly_severity, began_badly, generalises
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.symptoms import BADLY_SCALED
from sonde.diagnosis.tape.pairing import scored_in_loss
from sonde.diagnosis.tape.roles import chosen
from sonde.diagnosis.tape.targets import read_ahead, within_input
from sonde.diagnosis.tape.unused import learns_from_chosen_rows
from sonde.diagnosis.track import Track
from sonde.records import Evidence, Phase

MIN_ELEMENTS = Threshold(16, "elements of a batch: of fewer, two batches may look the same by chance")
# The columns that identify a batch. Sums are left out: their last digits depend on the order of additions.
_IDENTITY = [schema.COUNT, schema.MIN, schema.MAX, schema.MEAN, schema.M2, schema.ZERO]


def model_input(case: Case, phase: Phase = "train") -> Track:
    """Return the first input of the model, whether it holds real numbers or tokens.

    Raises:
        NotMeasured: There is none.

    """
    tracks = [track for track in case.of("input", phase) if track.name != signals.LOSS and track.site.call == 0]
    if not tracks:
        raise NotMeasured("inputs of the model")
    return tracks[0]


def is_real(track: Track) -> bool:
    """Return whether an input holds real numbers, not ids."""
    return "float" in track.site.dtype


def identities(case: Case, track: Track) -> NDArray[np.int64]:
    """Return a number for each step that is equal where batches are equal; -1 for batches that cannot be identified.

    Batches of one-hot rows or of permutations have the same readings though they differ, and a batch that is passed
    several times in a step has other readings. Where the exact marks of the first batches show that, only marked
    batches are identified.
    """
    rows = track.rows[:, _IDENTITY]
    result: NDArray[np.int64] = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    result[track.rows[:, schema.COUNT] < MIN_ELEMENTS] = -1
    result[track.rows[:, schema.M2] == 0] = -1  # a constant batch may equal another by chance
    calls, times = np.unique(track.rows[:, schema.SEEN], return_counts=True)
    result[track.rows[:, schema.SEEN] != calls[times.argmax()]] = -1  # an optimizer's closure may run more often
    marks = case.vital(track.name, signals.BATCH_MARK)
    if marks is None:
        return result
    _, at, of = np.intersect1d(track.steps, marks.steps, return_indices=True)
    exact = marks.numbers()[of].astype(np.int64)
    pairs = len(np.unique(np.stack([result[at], exact]), axis=1).T)
    if pairs == len(np.unique(result[at])) == len(np.unique(exact)):
        return result
    marked: NDArray[np.int64] = np.full(len(result), -1, np.int64)
    marked[at] = exact
    return marked


def normalises_inside(case: Case) -> bool:
    """Return whether the first module of the model normalises its input."""
    first = case.modules.get(case.facts.order[0]) if case.facts.order else None
    return first is not None and "Norm" in first.kind


COLUMN_LARGE = Threshold(100.0, "standard deviation of the largest feature; pixels from 0 to 255 have about 70")
COLUMN_RATIO = Threshold(1e3, "largest over smallest standard deviation of a feature: the small ones are ignored")
INPUT_OFFSET = Threshold(10.0, "distance of the inputs from zero in standard deviations")
INPUT_LARGE = Threshold(30.0, "rms of an input of real numbers; pixels from 0 to 255 have about 100")


@rule(
    "unnormalised_inputs",
    needs=[signals.COLUMN_SCALE, "input", "facts.order"],
    explains=[*BADLY_SCALED, "bad_init_scale", "target_scale"],
    fix="Standardise each feature with the training set's mean and standard deviation; divide pixels by 255.",
    refute="Train 50 steps on (x - mean) / std: if the loss does not change, this finding is wrong.",
    since=3,
)
def unnormalised_inputs(case: Case) -> Found | None:
    """Inputs are large, far from zero, or of very different scales."""
    track = model_input(case)
    if not is_real(track) or normalises_inside(case):
        return None
    evidence = _scales_of_features(case, track) or _scale(track)
    if evidence is None:
        return None
    return Found(
        severity="warning" if began_badly(case) else anomaly_severity(case),
        step=int(track.steps[0]),
        sites=("loader", track.name),
        evidence=evidence,
        cause="Inputs are not normalised: a few large values dominate, and the first layer is badly scaled.",
    )


def _scales_of_features(case: Case, track: Track) -> tuple[Evidence, ...] | None:
    scales = case.vital(track.name, signals.COLUMN_SCALE)
    if scales is None:
        return None
    high, low = float(np.median(scales.stat("max"))), float(np.median(scales.stat("min")))
    if low <= 0:  # a constant feature has no scale
        low = float(np.median(scales.stat("mean")))
    ratio = high / low if low > 0 else 0.0
    if ratio < COLUMN_RATIO or high < COLUMN_LARGE:
        return None
    return (
        above("largest over smallest standard deviation of a feature", ratio, COLUMN_RATIO),
        above("standard deviation of the largest feature", high, COLUMN_LARGE, f"{scales.key} max"),
    )


def _scale(track: Track) -> tuple[Evidence, ...] | None:
    size, std = float(np.median(track.stat("rms"))), float(np.median(track.stat("std")))
    offset = abs(float(np.median(track.stat("mean")))) / std if std > 0 else 0.0
    if offset >= INPUT_OFFSET and size >= 1:
        return (above("distance of the inputs from zero in standard deviations", offset, INPUT_OFFSET),)
    if size >= INPUT_LARGE:
        return (above("size (rms) of the inputs", size, INPUT_LARGE, f"{track.key} rms"),)
    return None


INPUT_TINY = Threshold(0.01, "standard deviation of all inputs: normalised twice, or divided by 255 twice")
INPUT_TINY_MAX = Threshold(0.1, "largest input: no feature is of a usual size")


@rule(
    "double_normalised",
    needs=["input", "facts.order"],
    explains=["bad_init_scale", "constant_output", "lr_too_low", "vanishing_gradient"],
    fix="Normalise once: divide by 255 or use ToTensor(), not both.",
    refute=(
        "Train 50 steps on inputs scaled to a standard deviation of 1: if the loss does not change, this finding is "
        "wrong."
    ),
    since=3,
)
def double_normalised(case: Case) -> Found | None:
    """Inputs are tiny, as if they had been scaled down twice."""
    track = model_input(case)
    if not is_real(track) or normalises_inside(case):
        return None
    spread, largest = float(np.median(track.stat("std"))), float(track.stat("abs_max").max())
    if not 0 < spread <= INPUT_TINY or largest > INPUT_TINY_MAX:
        return None
    return Found(
        severity=anomaly_severity(case),
        step=int(track.steps[0]),
        sites=("loader", track.name),
        evidence=(
            below("standard deviation of the inputs", spread, INPUT_TINY, f"{track.key} std"),
            fact("largest input", largest, f"{track.key} abs_max"),
        ),
        cause="Inputs are tiny, as if they had been scaled down twice, and samples hardly differ.",
    )


CONSTANT_SHARE = Threshold(0.5, "share of features with one value in all samples of a batch; pixels have fewer")
CONSTANT_LOOKS = Threshold(3, "persistence: batches whose features were measured")
CONSTANT_SAMPLES = Threshold(32, "samples of a batch: a rare feature may be constant in fewer")
CONSTANT_STEPS = Threshold(10, "persistence: steps in which the whole input was one number")
ALIKE_SAMPLES = Threshold(8, "samples of a batch: fewer may be equal by chance")
ALIKE_LOOKS = Threshold(5, "persistence: batches of which each holds one sample only")


@rule(
    "constant_feature",
    needs=[signals.COLUMN_SCALE, signals.REPEATED_ROWS, signals.BATCH_MARK, "input"],
    explains=["constant_output", "dead_relu", "label_shuffle_mismatch", "lr_too_low", "vanishing_gradient"],
    exact=True,
    fix="Check how features are read, cast and filled in; leave constant ones out.",
    refute="Compute the standard deviation of each feature over the training set: if none is 0, this finding is wrong.",
    since=CONSTANT_LOOKS,
)
def constant_feature(case: Case) -> Found | None:
    """The inputs, or most of their features, never vary."""
    track = model_input(case)
    if _is_one_number(track):
        number = float(track.rows[-1, schema.MAX]) + 0.0  # -0 is 0
        is_batch = len(track.site.shape) > 1 and track.site.shape[0] > 1 and _is_only_input(case)
        return Found(
            severity="warning" if is_batch else anomaly_severity(case),
            step=int(track.steps[0]),
            sites=("loader", track.name),
            evidence=(
                above("steps in which all inputs were the same number", len(track), CONSTANT_STEPS, f"{track.key} std"),
                fact("that number", number, f"{track.key} mean"),
            ),
            cause=f"Every input is {number:g} in every step: the model cannot tell samples apart.",
            refute="Print the inputs of a few batches: if they hold two different numbers, this finding is wrong.",
        )
    if (alike := _alike(case, track)) is not None:
        return alike
    scales = case.need_vital(track.name, signals.COLUMN_SCALE)
    if not is_real(track) or len(scales) < CONSTANT_LOOKS:
        return None
    share = float(scales.stat("zero_share").min())
    samples = float(np.median(track.stat("count"))) / max(1.0, float(scales.stat("count")[-1]))
    if not CONSTANT_SHARE <= share < 1 or samples < CONSTANT_SAMPLES:
        return None
    return Found(
        severity="info",
        step=int(track.steps[0]),
        sites=("loader", track.name),
        evidence=(
            above("share of features that are constant", share, CONSTANT_SHARE, f"{scales.key} zero_share"),
            fact("batches measured", len(scales)),
        ),
        cause=f"{share:.0%} of the input's features have the same value in every sample: they carry no information.",
    )


def _alike(case: Case, track: Track) -> Found | None:
    """Find batches whose samples are all the same, though batches differ from each other."""
    repeated, marks = (case.vital(track.name, each) for each in (signals.REPEATED_ROWS, signals.BATCH_MARK))
    samples = track.site.shape[0] if len(track.site.shape) > 1 else 0
    if repeated is None or marks is None or samples < ALIKE_SAMPLES or not is_real(track):
        return None
    shares = repeated.numbers()
    distinct = np.rint((1 - shares) * samples)
    if len(shares) < ALIKE_LOOKS or (distinct > 1).any() or len(np.unique(marks.numbers())) <= 1:
        return None
    return Found(
        severity="warning",
        step=int(repeated.steps[0]),
        sites=("loader", track.name, "(data)"),
        evidence=(above("batches whose samples are all the same", len(shares), ALIKE_LOOKS, f"{repeated.key} mean"),),
        cause=f"All {samples} samples of a batch are the same, in every batch that was looked at: one array is stored "
        "again and again while it is overwritten, or one sample is drawn each time.",
        fix="Store a copy of each sample (array.copy(), tensor.clone()), and check which indices are drawn.",
        refute="Print the first two samples of a batch: if they differ, this finding is wrong.",
    )


def _is_only_input(case: Case) -> bool:
    """Return whether the model is given one tensor, so that nothing else can tell samples apart."""
    return len({track.key for track in case.of("input", "train") if track.name != signals.LOSS}) == 1


def _is_one_number(track: Track) -> bool:
    low, high, count = (track.rows[:, column] for column in (schema.MIN, schema.MAX, schema.COUNT))
    bad = track.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0
    enough = len(track) >= CONSTANT_STEPS and bool((count >= MIN_ELEMENTS).all())
    return enough and not bad.any() and bool((low == high[0]).all() and (high == high[0]).all())


INPUT_SHIFT = Threshold(0.5, "standard deviations between the means of training and evaluation inputs")
INPUT_SHIFT_SIGMAS = Threshold(6.0, "the same over the standard deviation of the means of training batches")
INPUT_STRETCH = Threshold(2.0, "ratio of the spread of training and evaluation inputs; augmentation stays below 1.5")
TARGET_SHIFT = Threshold(5.0, "the same for targets, which differ more between parts of one series")
TARGET_STRETCH = Threshold(10.0, "ratio of the spreads of targets: parts of the same data differ less")
INPUT_BATCHES = Threshold(5, "training batches: fewer do not show how much they vary")


@rule(
    "train_val_preproc_mismatch",
    needs=["input", "facts.program"],
    explains=["overfitting"],
    fix="Use the same normalisation for both, with the training set's mean and standard deviation.",
    refute="Print the mean and standard deviation of a batch of each loader: if they are equal, this finding is wrong.",
    since=INPUT_BATCHES,
)
def train_val_preproc_mismatch(case: Case) -> Found | None:
    """Inputs or targets of the evaluation are preprocessed differently from those of training.

    Worth a note where the model does as well there: later parts of a series may lie elsewhere.
    """
    if (numbered := _numbers_classes_otherwise(case) or _numbered_apart(case)) is not None:
        return numbered
    if (fitted := _fitted_apart(case) or _prepared_apart(case)) is not None:
        return replace(fitted, severity="info") if generalises(case) else fitted
    if any(chosen(reading) for reading in case.rounds):
        return None  # a policy meets what its own choices lead to
    found = _differently(model_input(case), model_input(case, "eval"), "inputs", INPUT_SHIFT, INPUT_STRETCH)
    target = f"{signals.LOSS}:input.target"
    train, evaluated = case.track(target), case.track(f"{target}@eval")
    if found is not None and _goes_on(case, train, evaluated):
        return replace(found, severity="info")
    if found is None:
        made = any(reading.has_own_targets or reading.has_moving_target for reading in case.rounds)
        # Targets that were made are no data; and outputs may be scaled back to be compared with targets as they were.
        if train is not None and evaluated is not None and not made and not _outputs_move_too(case, train, evaluated):
            found = _differently(train, evaluated, "targets", TARGET_SHIFT, TARGET_STRETCH)
    return replace(found, severity="info") if found is not None and generalises(case) else found


def _numbers_classes_otherwise(case: Case) -> Found | None:
    """Find a data set for evaluation that gives the classes of the training set other numbers."""
    passes = [call for call in case.facts.calls("loader.pass") if call.data.get("classes")]
    for train, evaluated in itertools.permutations(passes, 2):
        ended = evaluated.count > 1 or case.final  # only then is it known whether it is trained on
        if not train.data.get("trained") or evaluated.data.get("trained") or not ended:
            continue
        one, two = _classes(train), _classes(evaluated)
        other = [name for name in one.keys() & two.keys() if one[name] != two[name]]
        # Data sets for two tasks may have some classes in common.
        if other and (one.keys() <= two.keys() or two.keys() <= one.keys()):
            name = min(other)
            return Found(
                exact=True,
                step=evaluated.steps[0],
                sites=("loader", "(validation)"),
                evidence=(
                    above("classes with another number", len(other), 1),
                    fact("classes in both", len(one.keys() & two.keys())),
                ),
                cause=f"The data that is evaluated{evaluated.place} numbers its classes otherwise than the data that "
                f"is trained on{train.place}: `{name}` is {two[name]} there, and {one[name]} in training.",
                fix="Sort the names of the classes before numbering them, and use the training set's numbers "
                "(class_to_idx) for both.",
                refute="Print class_to_idx of both data sets: if they are equal, this finding is wrong.",
            )
    return None


APART = Threshold(0.1, "deviations between what two scalers make of one number: of equal data they differ by less")


def _fitted_apart(case: Case) -> Found | None:
    """Find training data and data for evaluation that were each scaled by numbers of their own."""
    for call in case.facts.calls("data.fitted_apart"):
        apart, other = call.data.get("apart"), str(call.data.get("other"))
        if isinstance(apart, int | float) and apart < APART:
            continue
        way = str(call.data.get("way"))
        what = "as a whole" if call.data.get("whole") else f"in each of {call.data.get('columns')} columns"
        measured = isinstance(apart, int | float)
        return Found(
            exact=True,
            step=call.steps[0],
            sites=("loader", "(validation)", call.about),
            evidence=(
                fact("columns that are scaled in both", float(call.data.get("columns") or 0)),
                *((above("deviations between what both make of one number", float(apart or 0), APART),) * measured),
            ),
            cause=f"`{other}` is exactly {_SCALED.get(way, way)}, {what}, and so is `{call.about}`: the data that is "
            "evaluated was scaled by its own numbers, not by those of the training data. The same value means "
            "something else there.",
            fix="Fit the scaler on the training data only: "
            f"scaler.fit(...) for `{other}`, then scaler.transform(...) for `{call.about}`.",
            refute="Compare the mean and the deviation (or the lowest and the highest value) that each was scaled by: "
            "if they are equal, this finding is wrong.",
        )
    return None


_SCALED: Final = {
    "standardised": "standardised (mean 0, deviation 1)",
    "between 0 and 1": "scaled to its lowest and highest value (0 and 1)",
}


def _numbered_apart(case: Case) -> Found | None:
    """Find names that have another number in the data that is held out than in training."""
    for call in case.facts.calls("data.numbered_apart"):
        name, other = call.data.get("name"), call.data.get("other")
        if attribute := call.data.get("attribute"):
            return _numbered_by_sets(call, str(attribute))
        return Found(
            exact=True,
            step=call.steps[0],
            sites=("loader", "(validation)", call.about),
            evidence=(
                above("names with another number", float(call.data.get("differ") or 0), 1),
                fact("names in both", float(call.data.get("names") or 0)),
            ),
            cause=f"`{call.about}` numbers the same names otherwise than `{other}`: `{name}` is "
            f"{call.data.get('number')} there, and {call.data.get('in_training')} in training. An encoder was fitted "
            "anew on the data that is held out.",
            fix="Fit the encoder once, on the training data, and use it for both: encoder.transform(...), not "
            "fit_transform(...).",
            refute="Look up a few names in both: if they have the same number, this finding is wrong.",
        )
    return None


def _numbered_by_sets(call: CallFacts, attribute: str) -> Found:
    """Report two data sets of which each numbers names by itself."""
    return Found(
        exact=True,
        step=call.steps[0],
        sites=("loader", "(validation)"),
        evidence=(
            above("names with another number", float(call.data.get("differ") or 0), 1),
            fact("names in both", float(call.data.get("names") or 0)),
        ),
        cause=f"The data that is evaluated{call.place} has a `{attribute}` of its own: `{call.data.get('name')}` is "
        f"{call.data.get('number')} there, and {call.data.get('in_training')} in the data that is trained on.",
        fix=f"Build `{attribute}` once, from the training data, and hand it to both data sets.",
        refute=f"Compare `{attribute}` of both data sets: if they are equal, this finding is wrong.",
    )


def _prepared_apart(case: Case) -> Found | None:
    """Find two data sets of which each scales its samples by numbers of its own."""
    for call in case.facts.calls("data.prepared_apart"):
        attribute, one, two = (call.data.get(name) for name in ("attribute", "in_training", "number"))
        return Found(
            exact=True,
            step=call.steps[0],
            sites=("loader", "(validation)"),
            evidence=(
                fact(f"{attribute} of the data that is trained on", float(one or 0)),
                fact(f"{attribute} of the data that is evaluated", float(two or 0)),
            ),
            cause=f"The data that is evaluated{call.place} is scaled by other numbers than the data that is trained "
            f"on: `{attribute}` is {float(two or 0):.4g} there, and {float(one or 0):.4g} in training.",
            fix=f"Compute `{attribute}` on the training data, and hand it to both data sets.",
            refute=f"Print `{attribute}` of both data sets: if they are equal, this finding is wrong.",
        )
    return None


def _classes(call: CallFacts) -> dict[str, str]:
    lines = str(call.data["classes"]).split("\n")
    return {name: number for number, _, name in (line.partition(" ") for line in lines)}


def _goes_on(case: Case, train: Track | None, evaluated: Track | None) -> bool:
    """Return whether targets lie elsewhere as inputs do, and outputs follow them: a later part of a series."""
    before, after = model_input(case), model_input(case, "eval")
    if train is None or evaluated is None or not is_real(train):
        return False
    ways = [
        float(two.total()[schema.MEAN] - one.total()[schema.MEAN]) for one, two in ((before, after), (train, evaluated))
    ]
    return ways[0] * ways[1] >= ways[0] ** 2 / 2 and _outputs_move_too(case, train, evaluated)


def _outputs_move_too(case: Case, train: Track, evaluated: Track) -> bool:
    """Return whether the outputs of the evaluation lie elsewhere than those of training, as its targets do."""
    outputs = f"{signals.LOSS}:input.input"
    before, after = case.track(outputs), case.track(f"{outputs}@eval")
    if before is None or after is None:
        return False
    way = evaluated.total()[schema.MEAN] - train.total()[schema.MEAN]
    moved = after.total()[schema.MEAN] - before.total()[schema.MEAN]
    return bool(moved * np.sign(way) >= abs(way) / 2)


def _differently(
    train: Track, evaluated: Track, what: str, least_shift: Threshold, least_stretch: Threshold
) -> Found | None:
    """Find numbers of the evaluation that lie elsewhere as a whole, or are spread otherwise, than those of training."""
    if not is_real(train) or len(train) < INPUT_BATCHES or train.name != evaluated.name:
        return None
    std, other = _std(train), _std(evaluated)
    if not (std > 0 and other > 0):
        return None
    mean, other_mean = float(train.total()[schema.MEAN]), float(evaluated.total()[schema.MEAN])
    shift = abs(other_mean - mean) / std
    noise = float(np.std(train.stat("mean"))) / std
    stretch = max(std / other, other / std)
    moved = shift >= least_shift and shift >= INPUT_SHIFT_SIGMAS * noise and _moves_as_a_whole(train, evaluated)
    if not moved and stretch < least_stretch:
        return None
    worst = (
        above("distance of the means in standard deviations", shift, least_shift, f"{evaluated.key} mean")
        if moved
        else above("ratio of the spreads", stretch, least_stretch, f"{evaluated.key} std")
    )
    return Found(
        step=int(evaluated.steps[0]),
        sites=("loader", "(validation)", train.name),
        evidence=(
            worst,
            fact(f"standard deviation of training {what}", std, f"{train.key} std"),
            fact(f"standard deviation of evaluation {what}", other, f"{evaluated.key} std"),
        ),
        cause=f"Evaluation {what} are preprocessed differently: mean {other_mean:.3g} and spread {other:.3g} against "
        f"{mean:.3g} and {std:.3g} in training.",
    )


def _moves_as_a_whole(train: Track, evaluated: Track) -> bool:
    """Return whether the range moves as it does when all numbers are shifted, or shifted and stretched.

    A shift moves both ends with the mean (at least half as far, since ends vary). Where numbers are also stretched, the
    end ahead moves further than the mean. Other data, such as the last part of a series, lies elsewhere in the range.
    """
    before, after = train.total(), evaluated.total()
    shift = float(after[schema.MEAN] - before[schema.MEAN])
    behind, ahead = (float(after[end] - before[end]) * np.sign(shift) for end in _ends(shift))
    stretched = _std(evaluated) > _std(train) and ahead >= abs(shift)
    return bool(stretched or min(behind, ahead) >= abs(shift) / 2)


def _ends(shift: float) -> tuple[int, int]:
    """Return the columns of the ends of a range: the one behind and the one ahead of a movement."""
    return (schema.MIN, schema.MAX) if shift > 0 else (schema.MAX, schema.MIN)


def _std(track: Track) -> float:
    total = track.total()
    count = total[schema.COUNT] - 1
    return float(np.sqrt(total[schema.M2] / count)) if count > 0 else 0.0


@rule(
    "transform_of_all_parts",
    needs=["facts.program"],
    explains=["overfitting", "underfitting", "train_val_preproc_mismatch"],
    exact=True,
    refute="Print whether the data sets of both parts are one object: if they are not, this finding is wrong.",
    fix="Give each part a data set of its own: part.dataset = copy.copy(part.dataset) before its transform is set, or "
    "Subset(other_whole, indices) of a data set with the other transform.",
)
def transform_of_all_parts(case: Case) -> Found | None:
    """A transform is set for one part of a data set that was split, and counts for all parts."""
    for call in case.facts.calls("data.changed_through_a_part"):
        attribute, other = call.data.get("attribute"), call.data.get("other")
        if not _TRANSFORMS.search(str(attribute)):
            continue
        return Found(
            step=call.steps[0],
            sites=("loader", "(data)", call.about),
            evidence=(fact("parts that share the data set", 2),),
            cause=f"`{call.about}.dataset.{attribute}` is set{call.place}, but `{call.about}` and `{other}` are parts "
            f"of one data set: the transform (augmentation, normalisation) that is set last counts for training and "
            "validation alike.",
        )
    return None


_TRANSFORMS: Final = re.compile(r"transform|augment|preproc|train|mode|aug")


SEEN_SHARE = Threshold(0.9, "share of the rows of every evaluation that were trained on; 0 in a sound split")
ALIKE_SHARE = Threshold(0.05, "share of a batch's rows that repeat another: rows of few values are equal by chance")


@rule(
    "data_leakage",
    needs=[signals.BATCH_MARK, signals.REPEATED_ROWS, signals.SEEN_ROWS, "input"],
    exact=True,
    fix="Hold out samples that training never sees, and evaluate on those.",
    refute="Intersect the indices of both sets: if they have none in common, this finding is wrong.",
    since=2,
    lasting=True,
)
def data_leakage(case: Case) -> Found | None:
    """Evaluation runs on the training data, or the input holds the target."""
    if (taped := within_input(case) or read_ahead(case)) is not None:
        return taped
    if _sees_one_batch(case) and (taped := scored_in_loss(case)) is not None:
        return taped
    if learns_from_chosen_rows(case):
        return None  # the split may be one of rows: nodes of a graph are all inputs, and some of them targets
    return _same_inputs(case) or _same_rows(case)


def _sees_one_batch(case: Case) -> bool:
    """Return whether every step is given the same data, as where a graph is the only sample."""
    marks = case.vital(model_input(case).name, signals.BATCH_MARK)
    return marks is not None and len(marks) >= CONSTANT_LOOKS and len(np.unique(marks.numbers())) == 1


def _same_inputs(case: Case) -> Found | None:
    """Find evaluations whose inputs, taken together, are those of the training steps before."""
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
        sites=("loader", "(validation)"),
        evidence=(
            above("evaluations on the data of training", len(same), 2, f"{evaluated.key} mean"),
            fact("evaluations compared", len(evaluated)),
        ),
        cause="Evaluation runs on the training data" + (f", though {named[0]} claims other data." if named else "."),
    )


def _same_rows(case: Case) -> Found | None:
    """Find evaluations nearly all rows of which were trained on, where rows are not equal by chance."""
    name = model_input(case).name
    seen, repeated = case.vital(name, signals.SEEN_ROWS, "eval"), case.vital(name, signals.REPEATED_ROWS)
    if seen is None or repeated is None or len(seen) < 2:
        return None
    share, alike = float(seen.numbers().min()), float(repeated.numbers().max())
    if share < SEEN_SHARE or alike > ALIKE_SHARE:
        return None
    named = _named(case)
    return Found(
        severity="warning" if named else "info",
        step=int(seen.steps[0]),
        sites=("loader", "(validation)"),
        evidence=(
            above("share of the rows of each evaluation that were trained on", share, SEEN_SHARE, seen.key),
            below("share of the rows of a batch that repeat another", alike, ALIKE_SHARE, repeated.key),
            fact("evaluations compared", len(seen)),
        ),
        cause="The rows that are evaluated were trained on"
        + (f", though {named[0]} claims others: it measures memorisation." if named else "."),
        fix="Split the data before sampling from it, and check that both parts have no index in common; copies of a "
        "row belong in one part.",
        refute="Intersect the indices of both sets: if they have none in common and the data has no copies, this "
        "finding is wrong.",
    )


def _named(case: Case) -> list[str]:
    """Return the logged numbers, and the loaders that are only evaluated, whose names claim data held out."""
    passes = (call.data for call in case.facts.calls("loader.pass"))
    loaders = [str(data["named"]) for data in passes if data.get("named") and not data.get("trained")]
    return [*(name for name in case.scalars() if is_held_out(name)), *loaders]


def _is_same(train: Track, evaluated: Track, at: int) -> bool:
    """Return whether an evaluation saw what the training steps since the previous evaluation saw."""
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
