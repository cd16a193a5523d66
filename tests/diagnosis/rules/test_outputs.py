"""Mistakes in the loss and in what it is given, each beside a look-alike that is well."""

from __future__ import annotations

import math

import numpy as np
import pytest
from handmade import UNKNOWN, ask, found, loss, model, module, optimizer, patient

from sonde.core.facts import Facts
from sonde.records import Event

rng = np.random.default_rng(0)
LOGITS = [rng.normal(size=(32, 5)) for _ in range(6)]


GIVEN = ("double_softmax", "double_sigmoid", "relu_before_logits", "logits_into_prob_loss", "wrong_dim_softmax")


def softmax(values, axis=1):
    powers = np.exp(values - values.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def judged(kind, batches, *, last="Linear", target=None, outputs=None, **facts):
    """A loss as the recorder sees it: statistics of its input, and its rows and columns."""
    readings = {
        "loss_fn:input.input": batches,
        "loss_fn:output": outputs or [1.0] * len(batches),
        "loss_fn:vital.row_sum": [batch.sum(1) for batch in batches],
        "loss_fn:vital.row_min": [batch.min(1) for batch in batches],
        "loss_fn:vital.column_sum": [batch.sum(0) for batch in batches],
        "loss_fn:vital.sample_spread": [batch.var() for batch in batches],
        "last:output": batches,
    }
    if kind in ("cross_entropy", "nll_loss"):
        readings["loss_fn:vital.log_z"] = [np.log(np.exp(batch).sum(1)) for batch in batches]
        readings["loss_fn:vital.column_log_z"] = [np.log(np.exp(batch).sum(0)) for batch in batches]
    if target is not None:
        readings["loss_fn:input.target"] = target
    about = {"loss_fn:input.input": {"kind": kind, "dtype": "float32"}, "loss_fn:output": {"kind": kind}}
    known = model(
        "head.weight",
        losses=(loss(kind, classes=5, input_shape=batches[0].shape, target_shape=(32,)),),
        modules=(module("head", "Linear"), module("last", last)),
        order=("head", "last", "loss_fn"),
        **facts,
    )
    return patient(readings, known, about=about)


PROBABILITIES = [softmax(batch) for batch in LOGITS]
LOG_PROBABILITIES = [np.log(batch) for batch in PROBABILITIES]
SQUASHED = [1 / (1 + np.exp(-batch)) for batch in LOGITS]
RECTIFIED = [np.maximum(batch, 0) for batch in LOGITS]
OVER_THE_BATCH = [softmax(batch, 0) for batch in LOGITS]


def test_probabilities_into_cross_entropy_name_the_floor_and_the_softmax():
    finding = found("double_softmax", judged("cross_entropy", PROBABILITIES, last="Softmax"))
    assert finding.sites == ("last", "loss_fn")
    floor = next(item.value for item in finding.evidence if "cannot be gone below" in item.name)
    assert floor == pytest.approx(math.log((math.e + 4) / math.e))


def test_probabilities_into_bce_with_logits_are_a_double_sigmoid():
    assert found("double_sigmoid", judged("binary_cross_entropy_with_logits", SQUASHED)).sites == ("loss_fn",)


def test_rectified_logits_are_named():
    assert found("relu_before_logits", judged("cross_entropy", RECTIFIED, last="ReLU")).sites[0] == "last"


@pytest.mark.parametrize("batches", [LOGITS, PROBABILITIES], ids=["logits", "probabilities"])
def test_nll_without_logarithms_is_critical(batches):
    assert found("logits_into_prob_loss", judged("nll_loss", batches)).severity == "critical"


def test_what_torch_refused_is_explained():
    words = "RuntimeError: all elements of input should be between 0 and 1"
    case = patient({}, events=[Event(event_type="exception", message=words, timestamp=0.0)])
    assert "binary_cross_entropy_with_logits" in found("logits_into_prob_loss", case).fix


@pytest.mark.parametrize(
    ("kind", "batches"), [("cross_entropy", OVER_THE_BATCH), ("nll_loss", [np.log(batch) for batch in OVER_THE_BATCH])]
)
def test_a_softmax_over_the_batch_is_detected_from_sums_and_from_log_sums(kind, batches):
    assert found("wrong_dim_softmax", judged(kind, batches)).severity == "critical"


@pytest.mark.parametrize(
    "case",
    [
        judged("cross_entropy", LOGITS),
        judged("cross_entropy", LOG_PROBABILITIES),
        judged("nll_loss", LOG_PROBABILITIES),
        judged("binary_cross_entropy_with_logits", LOGITS),
        judged("binary_cross_entropy", SQUASHED),
    ],
    ids=["logits", "log-probabilities twice", "nll", "bce with logits", "bce"],
)
def test_losses_that_get_what_they_want_are_well(case):
    for kind in (
        "double_softmax",
        "double_sigmoid",
        "relu_before_logits",
        "logits_into_prob_loss",
        "wrong_dim_softmax",
    ):
        assert ask(kind, case) is None, kind


def test_without_a_loss_of_torch_there_is_no_verdict():
    assert ask("double_softmax", patient({"loss:scalar": [1.0] * 5}, model("a.weight"))) == UNKNOWN


@pytest.mark.parametrize(
    ("shape", "target", "ill"),
    [
        ((32, 1), (32,), True),
        ((32,), (32, 1), True),
        ((32, 1), (32, 1), False),
        ((32, 4), (), False),
        ((8, 3), (1, 3), False),
    ],
)
def test_shapes_that_make_all_pairs_are_named(shape, target, ill):
    facts = Facts(losses=(loss("mse_loss", input_shape=shape, target_shape=target),))
    assert (ask("broadcast_loss", patient({"loss:scalar": [1.0]}, facts)) is not None) is ill


def accumulated(ratio, *, passes=4, kind="SGD", optimizers=1):
    names = ["a.weight", "b.weight"][:optimizers]
    facts = model(
        *names,
        losses=(loss("cross_entropy"),),
        optimizers=tuple(optimizer(name, kind=kind, name=f"optimizer{at or ''}") for at, name in enumerate(names)),
    )
    readings = {
        "(loop):vital.forwards": [passes] * 5,
        "(loop):vital.backwards": [passes] * 5,
        "loss_fn:output": [[2.0] * passes] * 5,
        "(loop):vital.root": [[2.0 * ratio] * passes] * 5,
    }
    return patient(readings, facts, about={"loss_fn:output": {"kind": "cross_entropy"}})


def test_whole_losses_that_are_added_up_are_named_and_noted_where_the_scale_does_not_matter():
    assert found("accumulation_not_scaled", accumulated(1.0)).severity == "warning"
    assert found("accumulation_not_scaled", accumulated(1.0, kind="AdamW")).severity == "info"


@pytest.mark.parametrize("case", [accumulated(0.25), accumulated(1.0, passes=1), accumulated(1.0, optimizers=2)])
def test_divided_losses_single_passes_and_games_are_well(case):
    assert ask("accumulation_not_scaled", case) is None


def test_a_loss_that_is_turned_around_is_reported_at_once():
    assert found("loss_sign_flipped", accumulated(-1.0, passes=1)).severity == "critical"
    assert ask("loss_sign_flipped", accumulated(1.0, passes=1)) is None
    assert ask("loss_sign_flipped", accumulated(-1.0, passes=1, optimizers=2)) is None


def falling(losses):
    return patient({"loss:scalar": losses}, model("a.weight"))


def test_a_loss_that_falls_ever_faster_below_zero_has_the_wrong_sign():
    assert found("loss_sign_flipped", falling([1 - 0.01 * step**2.5 for step in range(60)])).severity == "critical"


@pytest.mark.parametrize(
    "losses",
    [
        [2 * 0.95**step for step in range(60)],
        [-3 + 4 * 0.95**step for step in range(60)],
        [1 - 0.05 * step for step in range(60)],
    ],
    ids=["usual", "a likelihood", "steady"],
)
def test_losses_that_may_be_negative_are_well(losses):
    assert ask("loss_sign_flipped", falling(losses)) is None


def summed(reduction, *, step=0.2, kind="SGD", root=1.0, more=(), losses=()):
    facts = model("a.weight", "b.weight", kind=kind, losses=(
        loss("mse_loss", settings={"reduction": reduction}, input_shape=(64, 1), target_shape=(64, 1)),))  # fmt: skip
    readings = {f"{name}.weight:{what}": [np.ones((4, 4)) * size] * 6
                for name in "ab"
                for what, size in (("parameter", 1.0), ("update", step), ("gradient", 1.0))}  # fmt: skip
    readings |= {
        "loss_fn:input.input": [[0.1, 0.2]] * 6,
        "loss_fn:output": [64.0] * 6,
        "(loop):vital.root": [64.0 * root] * 6,
    }
    readings |= {f"loss_fn:{part}#1": [values] * 6 for part, values in more}
    readings |= {"loss:scalar": losses} if losses else {}
    about = {key: {"shape": (4, 4)} for key in readings if "weight" in key}
    about |= {"loss_fn:input.input": {"kind": "mse_loss"}, "loss_fn:output": {"kind": "mse_loss"}}
    about |= {f"loss_fn:{part}#1": {"kind": "l1_loss"} for part, _ in more}
    return patient(readings, facts, about=about)


def test_a_sum_that_makes_steps_too_long_is_named():
    assert "64 samples" in found("wrong_loss_reduction", summed("sum")).cause


@pytest.mark.parametrize(("highest", "ill"), [(64.0, False), (160.0, True)])
def test_a_sum_whose_loss_falls_from_its_start_makes_steps_that_are_none_too_long(highest, ill):
    case = summed("sum", losses=[64.0, highest, *(64 * 0.8**step for step in range(2, 60))])
    assert (ask("wrong_loss_reduction", case) is not None) is ill


@pytest.mark.parametrize(("root", "ill"), [(1.5, True), (1.5 / 64, False)])
def test_a_sum_beside_another_term_is_divided_if_the_total_is_far_below_it(root, ill):
    case = summed("sum", root=root, more=[("input.input", [0.1, 0.2]), ("output", 32.0)])
    assert (ask("wrong_loss_reduction", case) is not None) is ill


@pytest.mark.parametrize(
    "case", [summed("mean"), summed("sum", step=0.001), summed("sum", kind="Adam"), summed("sum", root=1 / 64)]
)
def test_means_short_steps_and_sums_that_are_divided_are_well(case):
    assert ask("wrong_loss_reduction", case) is None


def regression(last, targets):
    outputs = [1 / (1 + np.exp(-batch)) for batch in LOGITS]
    return judged("mse_loss", outputs, last=last, target=targets)


def test_targets_beyond_the_last_activation_are_named():
    finding = found("output_range_mismatch", regression("Sigmoid", LOGITS))
    assert finding.sites == ("last", "loss_fn")


def test_targets_within_its_range_or_a_linear_end_are_well():
    assert ask("output_range_mismatch", regression("Sigmoid", PROBABILITIES)) is None
    assert ask("output_range_mismatch", regression("Linear", LOGITS)) is None


@pytest.mark.parametrize(("counts", "ill"), [([8, 0, 8], True), ([8, 3, 8], False)])
def test_a_batch_without_a_target_that_counts_is_named(counts, ill):
    finding = ask("empty_target", patient({"loss_fn:vital.valid_targets": counts}))
    assert (finding is not None) is ill
    assert finding is None or finding.step == 2


@pytest.mark.parametrize(("first", "severity"), [(1.7, None), (4.0, "info"), (12.0, "warning")])
def test_a_first_loss_far_above_guessing_is_a_note_or_a_warning(first, severity):
    finding = ask("large_initial_loss", judged("cross_entropy", LOGITS, outputs=[first] * 6))
    assert (finding.severity if finding else None) == severity
