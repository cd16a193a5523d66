"""Wrong modes, weak norms, numbers that are not finite or too coarse; each beside a look-alike that is well."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import ask, found, model, module, optimizer, patient, weight

from sonde.core.facts import Facts
from sonde.diagnosis.doctor import Doctor
from sonde.records import Finding

NAN, INF = float("nan"), float("inf")
rng = np.random.default_rng(0)


def moded(norm, drop, root, *, phase="", steps=8, frozen=False, at=0):
    """A model with a batch norm and a dropout, whose modes are written once, at step `at` + 1."""
    facts = Facts(
        parameters=(weight("bn.weight", shape=(8,), kind="BatchNorm1d", trainable=not frozen),),
        modules=(
            module("bn", "BatchNorm1d", num_features=8),
            module("drop", "Dropout", p=0.5),
            module("(model)", "Net"),
        ),
        optimizers=(optimizer("bn.weight"),),
    )
    modes = {"bn": norm, "drop": drop, "(model)": root}
    readings = {f"{name}:vital.training{phase}": [None] * at + [float(value)] for name, value in modes.items()}
    readings["loss:scalar"] = [1.0] * steps
    readings[f"bn:output{phase}"] = readings[f"drop:output{phase}"] = [None] * at + [np.ones(8 * 16)] * (steps - at)
    return patient(readings, facts)


def test_training_in_evaluation_mode_is_named_with_the_step_it_began():
    finding = found("eval_mode_in_training", moded(0, 0, 0, at=3))
    assert (finding.step, finding.sites) == (4, ("(loop)", "bn", "drop")), "the place to edit comes first"


@pytest.mark.parametrize(
    "case",
    [moded(1, 1, 1), moded(0, 1, 1), moded(0, 0, 0, at=6), moded(0.5, 0.5, 0.5)],
    ids=["training", "norms kept in evaluation mode on purpose", "too short", "both within a step"],
)
def test_other_modes_of_training_are_well(case):
    assert ask("eval_mode_in_training", case) is None


def test_evaluating_in_training_mode_is_named():
    finding = found("train_mode_in_eval", moded(1, 1, 1, phase="@eval", at=2))
    assert (finding.step, finding.sites[0]) == (3, "(validation)")


@pytest.mark.parametrize(
    "case",
    [moded(0, 0, 0, phase="@eval"), moded(0, 1, 0, phase="@eval"), moded(1, 1, 1, phase="@eval", at=7)],
    ids=["evaluation mode", "sampling by dropout", "one dry run"],
)
def test_other_modes_of_evaluation_are_well(case):
    assert ask("train_mode_in_eval", case) is None


@pytest.mark.parametrize(("batch", "severity"), [(2, "warning"), (6, "info"), (32, None)])
def test_batch_norms_over_a_handful_of_values_are_named(batch, severity):
    facts = Facts(modules=(module("bn", "BatchNorm1d", num_features=4),))
    case = patient({"bn:vital.training": [1.0], "bn:output": [np.ones(4 * batch)] * 3}, facts)
    finding = ask("batchnorm_small_batch", case)
    assert (finding.severity if finding else None) == severity


@pytest.mark.parametrize(("momentum", "severity"), [(0.0, "warning"), (0.99, "info"), (0.1, None), (None, None)])
def test_a_momentum_at_either_end_is_named(momentum, severity):
    norm = module("bn", "BatchNorm2d", momentum=momentum, track_running_stats=True)
    finding = ask("batchnorm_stats_stale", patient({}, Facts(modules=(norm,))))
    assert (finding.severity if finding else None) == severity


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_the_momentum_of_a_module_that_is_only_called_like_a_batch_norm_may_mean_anything(momentum):
    norm = module("bn", "BatchNormFlow", momentum=momentum)
    assert ask("batchnorm_stats_stale", patient({}, Facts(modules=(norm,)))) is None


@pytest.mark.parametrize(
    ("momentum", "steps", "first", "said"),
    [
        (0.001, 60, 1.0, True),
        (0.1, 60, 1.0, False),
        (0.01, 200, 1.0, False),  # long enough for a small momentum
        (0.001, 20, 1.0, False),  # an evaluation before training proper
        (0.001, 60, [0.5, 2.0], False),  # it was trained before
    ],
)
def test_running_statistics_that_are_mostly_their_initial_values_are_named(momentum, steps, first, said):
    facts = Facts(modules=(module("bn", "BatchNorm2d", momentum=momentum, track_running_stats=True),))
    readings = {"bn.weight:parameter": [first] * steps, "bn:output@eval": [None] * (steps - 1) + [1.0]}
    finding = ask("batchnorm_stats_stale", patient(readings, facts))
    assert isinstance(finding, Finding) is said
    assert not said or "94%" in finding.cause


@pytest.mark.parametrize(
    ("bias", "norm", "noted"), [(True, "BatchNorm2d", True), (False, "BatchNorm2d", False), (True, "LayerNorm", False)]
)
def test_a_bias_before_a_batch_norm_is_a_note(bias, norm, noted):
    facts = Facts(modules=(module("conv", "Conv2d", bias=bias), module("bn", norm)), edges=(("conv", "bn"),))
    finding = ask("bias_before_norm", patient({"loss:scalar": [1.0]}, facts))
    assert (finding.severity if isinstance(finding, Finding) else None) == ("info" if noted else None)


ORDER = {
    "(model):input[0]": 1.0,
    "a:output": 1.0,
    "b:output": 1.0,
    "loss_fn:output": 1.0,
    "a.weight:gradient": 1.0,
    "a.weight:update": 1.0,
    "a.weight:parameter": 1.0,
}
STAGES = {
    "(model):input[0]": ("nan_in_data", "(model)"),
    "a:output": ("nan_forward", "a"),
    "b:output": ("nan_forward", "b"),
    "loss_fn:output": ("nan_in_loss", "loss_fn"),
    "a.weight:gradient": ("nan_backward", "a.weight"),
    "a.weight:update": ("nan_in_optimizer", "a.weight"),
}
KINDS = ("nan_in_data", "nan_in_weights", "nan_forward", "nan_in_loss", "nan_backward", "nan_in_optimizer")


def broken_from(first, value=NAN, **more):
    """All that comes after the first bad place in a step is bad too."""
    keys = list(ORDER)
    bad = keys[keys.index(first) :]
    return patient({key: [1.0, 1.0, [1.0, value] if key in bad else 1.0] for key in keys}, model("a.weight"), **more)


@pytest.mark.parametrize("first", STAGES)
def test_the_first_place_that_is_not_finite_is_named_and_no_other(first):
    kind, site = STAGES[first]
    case = broken_from(first)
    finding = found(kind, case)
    assert (finding.sites[0], finding.step, finding.severity) == (site, 3, "critical")
    assert [other for other in KINDS if ask(other, case) is not None] == [kind]


def test_weights_that_are_not_finite_before_the_first_step_are_named():
    case = patient({"a.weight:parameter": [[NAN, 1.0]], "a:output": [None, NAN]}, model("a.weight"), first_step=0)
    assert found("nan_in_weights", case).step == 0


def test_masks_of_negative_infinity_and_steps_held_back_are_well():
    assert ask("nan_in_data", broken_from("(model):input[0]", -INF)) is None
    case = patient({"a.weight:gradient": [1.0, INF, 1.0]}, model("a.weight"), skipped=(2,))
    assert ask("nan_backward", case) is None


def test_gaps_that_the_model_fills_are_a_note():
    case = patient({"(model):input[0]": [[1.0, NAN]] * 3, "a:output": [1.0] * 3}, model("a.weight"))
    assert found("nan_in_data", case).severity == "info"


@pytest.mark.parametrize(
    ("gradient", "severity"), [([1.0] * 3, "info"), ([1.0, 1.0, NAN], "critical"), ([], "critical")]
)
def test_an_input_of_a_pass_without_a_loss_is_a_note(gradient, severity):
    bad = [1.0, 1.0, [1.0, NAN]]
    readings = {"(model):input[0]": bad, "a:output": bad, "a.weight:gradient": gradient}
    assert found("nan_in_data", patient(readings, model("a.weight"))).severity == severity


def test_a_repeated_step_has_the_better_word():
    doctor = Doctor()
    doctor.take(
        Finding(kind="nan_in_loss", severity="critical", confidence=0.99, step=3, last_step=3, data={"origin": {}})
    )
    kinds = [finding.kind for finding in doctor.look(broken_from("b:output"))]
    assert "nan_in_loss" in kinds
    assert "nan_forward" not in kinds


@pytest.mark.parametrize(("dtype", "value", "severity"), [("float16", INF, "critical"), ("float16", 6e4, "warning"),
                                                          ("float16", 1e3, None), ("bfloat16", 1e6, None)])  # fmt: skip
def test_float16_that_is_full_is_named(dtype, value, severity):
    finding = ask("fp16_overflow", patient({"a:output": [[1.0, value]] * 2}, about={"a:output": {"dtype": dtype}}))
    assert (finding.severity if finding else None) == severity


def scaled(scales, skipped=()):
    return patient({"scaler.scale:scalar": scales}, Facts(scaler=True), skipped=skipped)


def test_a_scale_below_one_and_late_steps_held_back_are_named():
    assert found("loss_scale_collapse", scaled([2.0**-step for step in range(8)])).sites == ("scaler",)
    assert found("loss_scale_collapse", scaled([64.0] * 80, skipped=range(45, 80, 3)))


def test_a_scale_that_settles_is_well():
    settling = [2.0 ** (16 - min(step, 6)) for step in range(80)]
    assert ask("loss_scale_collapse", scaled(settling, skipped=range(1, 7))) is None


def halves(zeros, *, dtype="float16", scaler=False):
    values = np.where(np.arange(100) < zeros, 0.0, 1e-7)
    about = {"a.weight:gradient": {"dtype": dtype, "shape": (10, 10)}}
    return patient({"a.weight:gradient": [values] * 8}, model("a.weight", scaler=scaler), about=about)


def test_gradients_lost_in_float16_are_named():
    assert found("grad_underflow", halves(70)).sites == ("a.weight",)
    for case in (halves(5), halves(70, dtype="float32"), halves(70, scaler=True)):
        assert ask("grad_underflow", case) is None


def rounded(zeros, *, dtype="bfloat16", rates=None, losses=None):
    update = np.where(np.arange(100) < zeros, 0.0, 1e-3)
    readings = {
        "a.weight:update": [update] * 30,
        "a.weight:gradient": [np.ones(100)] * 30,
        "optimizer.group0.lr:scalar": rates or [1e-3] * 30,
        "loss:scalar": losses or [2.0] * 30,
    }
    about = {"a.weight:update": {"dtype": dtype, "shape": (10, 10)}}
    return patient(readings, model("a.weight"), about=about)


def test_updates_that_are_rounded_away_are_named():
    assert found("low_precision_stall", rounded(95)).severity == "warning"
    assert found("low_precision_stall", rounded(95, losses=[2.0 * 0.9**step for step in range(30)])).severity == "info"


@pytest.mark.parametrize(
    "case",
    [rounded(50), rounded(95, dtype="float32"), rounded(95, rates=[1e-5 * step for step in range(1, 31)]),
     rounded(95, rates=[1e-2] * 5 + [1e-5] * 25)],
    ids=["usual", "float32", "warm-up", "end of the schedule"],
)  # fmt: skip
def test_updates_that_are_short_for_a_while_are_well(case):
    assert ask("low_precision_stall", case) is None


def test_layers_outside_autocast_are_a_note():
    facts = Facts(modules=(module("a", "Linear"), module("b", "Linear")), autocast="bfloat16")
    about = {"a:output": {"kind": "Linear", "dtype": "bfloat16"}, "b:output": {"kind": "Linear", "dtype": "float32"}}
    case = patient({"a:output": [1.0] * 3, "b:output": [1.0] * 3}, facts, about=about)
    assert found("autocast_missing", case).sites == ("b",)
    about["b:output"] = about["a:output"]
    assert ask("autocast_missing", patient({"a:output": [1.0] * 3, "b:output": [1.0] * 3}, facts, about=about)) is None


def dropping(root, kind="Dropout", root_kind="Net"):
    readings = {"(model):vital.training@eval": [float(root)], "(loop):vital.dropped@eval": [1.0, 1.0]}
    return patient(
        readings | {"loss:scalar": [1.0] * 4}, Facts(modules=(module("(model)", root_kind), module("drop", kind)))
    )


def test_dropping_in_evaluation_mode_is_named():
    assert found("dropout_ignores_mode", dropping(0)).step == 1
    assert ask("dropout_ignores_mode", dropping(1)) is None
    assert ask("dropout_ignores_mode", dropping(0, "SamplingDropout")) is None


def test_the_name_of_the_whole_model_does_not_excuse_dropping():
    assert found("dropout_ignores_mode", dropping(0, root_kind="DropoutNet")).step == 1


@pytest.mark.parametrize(("last", "ill"), [(4e-7, True), (0.0, True), (1e-3, False)])
def test_weights_without_a_gradient_count_if_all_others_hardly_fit_into_float16(last, ill):
    readings = {
        "a.weight:gradient": [np.zeros((4, 4))] * 8,
        "b.weight:gradient": [np.full((4, 4), last)] * 8,
        "loss:scalar": [1e-5] * 8,
    }
    about = {f"{name}.weight:gradient": {"dtype": "float16", "shape": (4, 4)} for name in "ab"}
    finding = ask("grad_underflow", patient(readings, model("a.weight", "b.weight"), about=about))
    assert (finding is not None) is ill


@pytest.mark.parametrize("told", [{"origin": {}, "reason": "unknown"}, {"origin": {"repeated": False}}])
def test_readings_that_show_an_earlier_stage_count_more_than_a_finding_without_a_reason(told):
    doctor = Doctor()
    case = patient(
        {"attend:output[0]": [1.0, np.array([1.0, np.nan])], "loss:scalar": [1.0, np.nan]}, model("a.weight")
    )
    doctor.take(Finding(kind="nan_in_loss", severity="critical", confidence=0.9, step=2, last_step=2, data=told))
    assert next(finding.kind for finding in doctor.look(case)) == "nan_forward"
    doctor.take(Finding(kind="fully_masked_attention", severity="critical", confidence=0.9, step=2, last_step=2))
    assert "nan_forward" not in [finding.kind for finding in doctor.look(case)]
