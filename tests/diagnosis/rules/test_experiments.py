"""What experiments mean: they confirm, add or drop findings, and stay silent about runs that learn."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnosis.rules.handmade import patient

from sonde.core.examination import Examination, Result, number, read, write
from sonde.diagnosis.doctor import Doctor
from sonde.diagnosis.rule import Found, Rule

FLAT = list(np.full(60, 2.3) + 0.001 * np.sin(np.arange(60)))
FALLING = list(np.linspace(2.3, 0.2, 60))


def result(experiment, numbers, **words):
    stored = {name: number(value) for name, value in numbers.items()}
    return Result(experiment=experiment, numbers=stored, words=words)


def findings(losses, *results, step=2, **readings):
    case = patient({"loss:scalar": losses, **readings})
    if results:
        case.take_examination(Examination(step=step, results=results))
    return {finding.kind: finding for finding in Doctor().look(case)}


CHANGES = {
    "lr_too_high": "learning rate x 0.01",
    "lr_too_low": "learning rate x 100",
    "unnormalised_inputs": "standardised inputs",
    "target_scale": "standardised targets",
    "weight_decay_too_large": "no weight decay",
    "clip_always_active": "no clipping",
    "dropout_too_high": "no dropout",
    "bad_init_scale": "default initialisation",
    "adam_eps_too_large": "eps 1e-8",
}


def learnability(skills, **words):
    numbers = {"steps": 100.0, "guess": 2.3, "floor": 0.0}
    for name, skill in {"default initialisation": skills["as is"], **skills}.items():
        numbers |= {f"skill.{name}": skill, f"end.{name}": 2.3 * (1 - skill), f"start.{name}": 2.3}
    return result("learnability", numbers, **words)


@pytest.mark.parametrize("kind", CHANGES)
def test_the_change_that_turns_failing_into_learning_is_the_cause(kind):
    tried = learnability({"as is": 0.01, CHANGES[kind]: 0.9})
    found = findings(FLAT, tried)[kind]
    assert found.basis == "experiment"
    assert "2.277" in found.experiment
    assert "0.23" in found.experiment
    assert found.fix
    assert kind not in findings(FALLING, tried)
    assert kind not in findings(FLAT, learnability({"as is": 0.3, CHANGES[kind]: 0.9}))


def test_a_specific_cause_comes_before_a_rate_that_makes_up_for_it():
    found = findings(FLAT, learnability({"as is": 0.0, "learning rate x 0.01": 0.9, "standardised inputs": 0.8}))
    assert "unnormalised_inputs" in found
    assert "lr_too_high" not in found


def test_the_fix_shows_the_changed_line_of_the_program():
    line = "train.py:12: optimizer = torch.optim.SGD(net.parameters(), lr=50.0, momentum=0.9)"
    tried = learnability({"as is": 0.0, "learning rate x 0.01": 0.9}, rate="50", optimizer_line=line)
    fix = findings(FLAT, tried)["lr_too_high"].fix
    assert "train.py:12: optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)" in fix


@pytest.mark.parametrize(
    ("skills", "is_refuted"),
    [
        ({"as is": 0.0, "learning rate x 10": 0.05, "learning rate x 100": -1.0}, True),
        ({"as is": 0.0, "learning rate x 10": 0.25}, False),
        ({"as is": 0.95}, False),  # a fault may make learning slow, or act later
        ({"as is": 0.0, "default initialisation": 0.9, "learning rate x 10": 0.0}, False),  # the weights were ruined
    ],
)
def test_a_change_that_makes_nothing_better_refutes_what_it_would_cure(skills, is_refuted):
    doctor, case = Doctor(), patient({"loss:scalar": FLAT})
    case.take_examination(Examination(step=20, results=(learnability(skills),)))
    doctor.look(case)
    assert ("lr_too_low" in doctor.refuted) == is_refuted


@pytest.mark.parametrize(("after", "best", "is_refuted"), [(2.2, 10.0, True), (2.2, 1.0, False), (2.4, 10.0, False)])
def test_updates_that_stop_short_of_the_lowest_loss_refute_a_rate_that_is_too_high(after, best, is_refuted):
    case, doctor = patient({"loss:scalar": FLAT}), Doctor()
    update = result("descent", {"start": 2.3, "loss.1": after, "best_factor": best, "without_gradient": 0.0})
    case.take_examination(Examination(step=2, results=(update,)))
    doctor.look(case)
    assert ("lr_too_high" in doctor.refuted) is is_refuted


def test_a_finding_that_is_refuted_is_dropped_unless_it_is_exact():
    for exact in (False, True):
        rule = Rule(kind="lr_too_low", find=lambda case: Found(cause="low", sites=()), exact=exact)
        doctor, case = Doctor(rules=[rule]), patient({"loss:scalar": FLAT})
        assert doctor.look(case)
        tried = learnability({"as is": 0.0, "learning rate x 10": 0.0})
        case.take_examination(Examination(step=20, results=(tried,)))
        assert bool(doctor.look(case)) == exact


def free(start, **numbers):
    return {"start": start, **{name.replace("__", "."): value for name, value in numbers.items()}}


def test_an_activation_that_holds_the_loss_back_is_named_by_what_it_is():
    numbers = free(1.6, scores__lowest=0.9, loss_inputs__lowest=0.0, loss_inputs__unbounded=0.0)
    words = {"between": "_softmax", "loss": "cross_entropy", "line": "net.py:3: return h.softmax(-1)", "module": "end"}
    found = findings(FALLING, result("free_outputs", numbers, **words))
    assert found["double_softmax"].exact
    assert "net.py:3" in found["double_softmax"].fix
    assert "double_sigmoid" not in found
    words |= {"between": "sigmoid", "loss": "binary_cross_entropy_with_logits"}
    assert "double_sigmoid" in findings(FALLING, result("free_outputs", numbers, **words))
    words |= {"between": "relu", "loss": "mse_loss"}
    assert "output_range_mismatch" in findings(FALLING, result("free_outputs", numbers, **words))


@pytest.mark.parametrize(
    "change",
    [
        {"between": "_softmax linalg_vector_norm"},  # a temperature that is too low for the batch is a choice
        {"between": "view add"},
        {"scores__lowest": 0.001},
        {"loss_inputs__unbounded": 1.0},  # log-probabilities must stay what they are
    ],
)
def test_a_loss_that_is_not_held_back_by_an_activation_is_left_alone(change):
    numbers = free(1.6, scores__lowest=0.9, loss_inputs__lowest=0.0, loss_inputs__unbounded=0.0)
    numbers |= free(1.6, **{name: value for name, value in change.items() if name != "between"})
    words = {"between": change.get("between", "_softmax"), "loss": "cross_entropy"}
    assert not findings(FALLING, result("free_outputs", numbers, **words))


def test_a_loss_without_a_bottom_is_flipped_only_if_it_leads_away_from_the_targets():
    numbers = free(-1.6, scores__lowest=-1e9, scores__unbounded=1.0)
    numbers |= {"scores.agreement_before": 0.25, "scores.agreement_after": 0.0}
    assert "loss_sign_flipped" in findings(FALLING, result("free_outputs", numbers, agreement="accuracy"))
    towards = numbers | {"scores.agreement_after": 1.0}
    assert not findings(FALLING, result("free_outputs", towards, agreement="accuracy"))


def test_what_depends_on_what_is_reported_as_it_was_measured():
    mixed = result("dependence", {"other_samples": 0.1, "relates_samples": 0.0})
    graph = result("dependence", {"other_samples": 0.1, "relates_samples": 1.0})
    assert "batch_axis_mixed" in findings(FALLING, mixed)
    assert not findings(FALLING, graph)
    leak = result("dependence", {"future": 0.3, "shift": 1.0})
    assert "future_leak" in findings(FALLING, leak)
    assert not findings(FALLING, result("dependence", {"future": 0.0, "shift": 1.0}))
    blind = result("dependence", {"inputs": 1.0, "ignored": 1.0}, ignored="batch[0]")
    assert "constant_output" in findings(FALLING, blind)
    partly = result("dependence", {"inputs": 2.0, "ignored": 1.0}, ignored="batch[1]")
    assert findings(FALLING, partly)["input_ignored"].severity == "info"
    assert findings(FLAT, partly)["input_ignored"].severity == "warning"
    blind = result("dependence", {"inputs": 1.0, "ignored": 0.0, "order": 1e-16})
    assert "order of its tokens" in findings(FLAT, blind)["input_ignored"].cause
    assert "input_ignored" not in findings(FALLING, blind), "a bag of words may be all that a task needs"
    cut = result("descent", {"without_gradient": 2.0}, without_gradient="first.weight, first.bias")
    assert findings(FALLING, cut)["graph_break_detach"].sites == ("first.weight", "first.bias")
    seen = {"first.weight:gradient": [[0.1, 0.2]] * len(FALLING)}
    assert findings(FALLING, cut, **seen)["graph_break_detach"].sites == ("first.bias",), "the training's own gradient"


def test_an_examination_is_read_as_it_was_written(tmp_path):
    written = Examination(step=3, results=(learnability({"as is": float("-inf")}),), seconds=1.5)
    write(tmp_path, written)
    assert read(tmp_path) == written
    assert read(tmp_path).number("learnability", "skill.as is") == float("-inf")


@pytest.mark.parametrize(("step", "rise", "is_refuted"), [(20, 12.0, True), (20, 1.5, False), (2, 12.0, False)])
def test_a_loss_that_depends_on_whose_target_is_whose_refutes_that_nothing_was_learnt(step, rise, is_refuted):
    losses = list(np.full(150, 0.7) + 0.001 * np.sin(np.arange(150)))
    permuted = result("information", {"start": 0.69, "permuted": 0.74, "scatter": 0.05 / rise, "rise": rise})
    case, doctor = patient({"loss:scalar": losses}, final=True), Doctor()
    assert "not_learning" in [each.kind for each in doctor.look(case)]
    case.take_examination(Examination(step=step, results=(permuted,)))
    assert ("not_learning" not in [each.kind for each in doctor.look(case)]) is is_refuted
    assert ("not_learning" in doctor.refuted) is is_refuted
